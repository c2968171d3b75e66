"""Lanes that a masked load without ``other`` leaves undefined: which line's reach the result, and look-alikes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pytest_fusion import values
from pytest_fusion.interpreter.memory import undefined_lanes
from pytest_fusion.plugin.testing import examine
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
from tests.sweeps import sweep

T = torch.Tensor


@triton.jit
def weighted_sum_kernel(x, w, b, out, n, HOW: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, N)
    values = tl.load(x + row * n + at, mask=at < n, other=0.0)
    bias = tl.load(b + at, mask=at < n)
    if HOW == "undefined":
        weights = tl.load(w + at, mask=at < n)
        total = tl.sum(values * weights)
    elif HOW == "one":
        total = tl.sum(tl.where(at < n, values * tl.load(w + at, mask=at < n), 1.0))
    else:
        total = tl.sum(values * tl.load(w + at, mask=at < n, other=0.0))
    tl.store(out + row * n + at, total + bias, mask=at < n)


def reference(x: T, w: T, b: T) -> T:
    return (x * w).sum(-1, keepdim=True) + b


def spec(how: str) -> FusionSpec:
    def fused(x: T, w: T, b: T) -> T:
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        out = torch.empty_like(x)
        if x.numel():
            block = triton.next_power_of_2(x.shape[1])
            weighted_sum_kernel[(x.shape[0],)](x, w, b, out, x.shape[1], HOW=how, N=block)
        return out

    inputs = {"x": tensor("rows n"), "w": tensor("n"), "b": tensor("n")}
    return FusionSpec(fused=fused, reference=reference, inputs=inputs, dtypes="float32", name=f"weighted sum {how}")


def test_the_line_whose_lanes_reach_the_result_is_named(tmp_path: Path) -> None:
    """0 times an undefined weight is summed up; the bias, undefined beside it, is never stored there."""
    record = examine(spec("undefined"), seed=0, root=tmp_path)
    assert (record.failed_check, record.cause) == ("bounds", "wrong-neutral-element")
    assert "what the masked-off lanes of a load without other= hold, in 2 lines, which Triton" in record.message
    said = " ".join(map(str, (record.diagnosis or {})["evidence"]))
    assert "`weights = tl.load(w + at, mask=at < n)`" in said
    assert "bias = " not in said
    assert "--fusion-undefined zero" in said


@pytest.mark.slow
def test_a_wrong_value_in_defined_lanes_is_another_matter(tmp_path: Path) -> None:
    """Padding with 1 stays wrong whatever undefined lanes hold, and is told by its tiles."""
    record = examine(spec("one"), seed=0, root=tmp_path)
    assert record.failed_check == "values"
    assert "other=" not in str((record.diagnosis or {})["evidence"])
    assert record.cause in ("tail-mask", "wrong-neutral-element")


@pytest.mark.slow
def test_undefined_lanes_that_are_dropped_harm_nobody(tmp_path: Path) -> None:
    """A bias loaded without ``other`` and stored under the same mask is honest."""
    assert examine(spec("right"), seed=0, root=tmp_path).verdict == "pass"


@pytest.mark.slow
def test_one_can_look_past_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zeros there, as --fusion-undefined zero asks for, the kernel passes and a note says why."""
    monkeypatch.setattr(undefined_lanes, "environment_fill", lambda: "zero")
    record: Any = examine(spec("undefined"), seed=0, root=tmp_path)
    assert record.verdict == "pass", record.message
    assert any("--fusion-undefined zero" in note for note in record.notes)


@triton.jit
def softmax_kernel(x, out, n, HOW: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, N)
    values = tl.load(x + row * n + at, mask=at < n)
    if HOW == "most":
        most = tl.max(values)
    elif HOW == "least":
        most = tl.min(values)
    else:
        most = tl.max(tl.where(at < n, values, -float("inf")))
    shares = tl.where(at < n, tl.exp(values - most), 0.0)
    tl.store(out + row * n + at, shares / tl.sum(shares), mask=at < n)


def softmax_of(x: T, how: str) -> T:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        softmax_kernel[(x.shape[0],)](x, out, x.shape[1], HOW=how, N=triton.next_power_of_2(x.shape[1]))
    return out


class Softmax(torch.autograd.Function):
    """Its backward is wrong or right in what it makes of undefined lanes; the forward is right."""

    @staticmethod
    def forward(ctx: Any, x: T, how: str) -> T:
        ctx.how = how
        ctx.save_for_backward(x)
        return x.softmax(-1)

    @staticmethod
    def backward(ctx: Any, upstream: T) -> Any:
        (x,) = ctx.saved_tensors
        shares = softmax_of(x, ctx.how)
        return shares * (upstream - (upstream * shares).sum(-1, keepdim=True)), None


@sweep(("how", "wrong"), [("most", True), ("least", True), ("masked", False)])
@pytest.mark.parametrize("backward", [False, True])
def test_a_reader_that_passes_over_nan_is_seen_too(tmp_path: Path, how: str, wrong: bool, backward: bool) -> None:
    """A maximum of NaN and numbers is a number; a softmax is right whatever is subtracted, until it overflows."""
    fused = (lambda x: Softmax.apply(x, how)) if backward else (lambda x: softmax_of(x, how))
    record = examine(
        FusionSpec(
            fused=fused,
            reference=lambda x: x.softmax(-1),
            inputs={"x": tensor("rows n", values=values.normal())},
            dtypes="float32",
            grad=backward,
            name=f"softmax {how}",
        ),
        seed=0,
        root=tmp_path,
    )
    if not wrong:
        assert record.verdict == "pass", record.message
        return
    assert record.cause == "wrong-neutral-element", record.message
    assert "`values = tl.load(x + row * n + at, mask=at < n)`" in record.message
    assert record.failed_check == "bounds"
