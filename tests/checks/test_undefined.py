"""Hazard `undefined-lanes`: which line's masked lanes reach the result, what comes beside it, and look-alikes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import CaseResult, Context
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
    elif HOW == "beyond":
        total = tl.sum(values * tl.load(w + at, mask=at < n + 1, other=0.0))
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


def judged(spec: FusionSpec, **sizes: int) -> CaseResult:
    tensors = {name: TensorCase("float32") for name in spec.inputs}
    return judge_case(Context(spec, torch.device("cpu")), Case(sizes, "float32", tensors, seed=1))


def hazards(result: CaseResult) -> list[str]:
    return [verdict.reason for verdict in result.verdicts if verdict.code == "undefined-lanes"]


def test_the_line_whose_lanes_reach_the_result_is_named() -> None:
    """0 times an undefined weight is summed up; the bias, undefined beside it, is never stored there."""
    result = judged(spec("undefined"), rows=3, n=5)
    assert result.failure is None
    (reason,) = hazards(result)
    assert "`weights = tl.load(w + at, mask=at < n)` (test_undefined.py:" in reason
    assert "bias = " not in reason
    assert reason.startswith("15 of 15 element(s) of out, the first at [0, 0], depend on")
    assert reason.endswith("write other=0.0")
    (found,) = [verdict for verdict in result.verdicts if verdict.code]
    assert found.identity.startswith("bounds:undefined-lanes:weighted_sum_kernel:")


def test_nothing_is_undefined_in_whole_blocks() -> None:
    """Where no lane is masked off there is nothing to find."""
    assert hazards(judged(spec("undefined"), rows=3, n=8)) == []


def test_undefined_lanes_that_are_dropped_are_no_hazard() -> None:
    """A bias loaded without ``other`` and stored under the same mask is honest."""
    result = judged(spec("right"), rows=3, n=5)
    assert (result.failure, hazards(result)) == (None, [])


def test_chance_is_no_dependence() -> None:
    """Results that vary by themselves show nothing of what such lanes do."""
    steady, generator = spec("undefined"), torch.Generator().manual_seed(0)

    def fused(**given: Any) -> T:
        return steady.fused(**given) + 1e-7 * torch.rand((), generator=generator)

    result = judged(steady.with_(fused=fused, deterministic=False), rows=3, n=5)
    assert (result.failure, hazards(result)) == (None, [])


def test_a_wrong_value_is_found_behind_the_hazard() -> None:
    """The case goes on with 0 in such lanes: a factor too many is wrong, and a read past the end is out of bounds."""
    wrong = spec("undefined")
    result = judged(wrong.with_(fused=lambda **given: wrong.fused(**given) * 2), rows=3, n=5)
    assert (result.failure.check, len(hazards(result))) == ("values", 1)
    result = judged(spec("one"), rows=3, n=5)
    assert (result.failure.check, hazards(result)) == ("values", [])
    result = judged(spec("beyond"), rows=3, n=5)
    assert result.failure.identity.startswith("bounds:out-of-bounds-load")


def test_a_waived_check_takes_the_hazard_with_it() -> None:
    """``without={"bounds": ...}``: the result depends on what it reads, and is judged with 0 there."""
    result = judged(spec("undefined").with_(without={"bounds": "known"}), rows=3, n=5)
    assert (result.failure, hazards(result)) == (None, [])


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
def test_a_reader_that_passes_over_nan_is_seen_too(how: str, wrong: bool, backward: bool) -> None:
    """A maximum of NaN and numbers is a number; a softmax is right whatever is subtracted, until it overflows."""
    fused = (lambda x: Softmax.apply(x, how)) if backward else (lambda x: softmax_of(x, how))
    given = {"inputs": {"x": tensor("rows n")}, "dtypes": "float32", "grad": backward, "name": f"softmax {how}"}
    spec = FusionSpec(fused=fused, reference=lambda x: x.softmax(-1), **given)
    # Of four cases one asks for the same gradients under the other fill.
    seed = next(seed for seed in range(40) if counter_random.mix(seed, "twice") % 4 == 0)
    case = Case({"rows": 3, "n": 11}, "float32", {"x": TensorCase("float32")}, seed=seed)
    result = judge_case(Context(spec, torch.device("cpu")), case)
    assert result.failure is None
    assert len(hazards(result)) == wrong
    assert not wrong or "`values = tl.load(x + row * n + at, mask=at < n)`" in hazards(result)[0]
