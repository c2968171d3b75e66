"""Wrong accesses that the CPU lane sees become the checks ``bounds`` and ``repeat``, with the line that makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.diagnosis.causes import likely_cause
from pytest_fusion.spec.inputs import tensor
from tests.interpreted import triton_interpreted

triton = triton_interpreted("accesses are seen only where kernels are interpreted")

tl = triton.language
T = torch.Tensor


def added_up(x: T) -> T:
    return x.sum().reshape(1)


CASE = Case({"n": 35}, "float32", {"x": TensorCase("float32", Layout("contiguous"))}, seed=1)


@triton.jit
def double_kernel(x, out, n, LOADED: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < LOADED, other=0.0)
    tl.store(out + i, value * 2, mask=i < STORED)


def double(x: T, *, loaded: int = 0, stored: int = 0) -> T:
    out = torch.empty_like(x)
    n = x.numel()
    double_kernel[(triton.cdiv(n, 16),)](x, out, n, LOADED=n + loaded, STORED=n + stored, BLOCK=16)
    return out


@triton.jit
def total_kernel(x, out, n, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x + i, mask=i < n, other=0.0), 0)
    if ATOMIC:
        tl.atomic_add(out, part)
    else:
        tl.store(out, tl.load(out) + part)


def total(x: T, *, atomic: bool = True) -> T:
    out = torch.zeros(1)
    total_kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), ATOMIC=atomic, BLOCK=16)
    return out


@triton.jit
def padded_kernel(x, out, columns, stride, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    # The padding of a row is read along, and dropped.
    value = tl.load(x + row * stride + i, mask=i < stride, other=0.0)
    if WHOLE:
        tl.store(x + row * stride + i, value, mask=i < stride)
    tl.store(out + row * columns + i, value, mask=i < columns)


def copy_rows(x: T, *, whole: bool = False) -> T:
    out = torch.empty(x.shape)
    padded_kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), WHOLE=whole, BLOCK=64)
    return out


PADDED = Case({"rows": 5, "columns": 7}, "float32", {"x": TensorCase("float32", Layout("padded"))}, seed=1)


@pytest.mark.parametrize(
    ("wrong", "slug", "code"),
    [
        ({"loaded": 1}, "out-of-bounds", "value = tl.load(x + i"),
        ({"stored": 1}, "out-of-bounds", "tl.store(out + i"),
    ],
)
def test_an_access_out_of_bounds_fails_at_its_line(judge_one: Any, wrong: Any, slug: str, code: str) -> None:
    """One element too many fails ``bounds``, whatever becomes of the result, and names statement and argument."""
    failure = judge_one(lambda x: double(x, **wrong), double, {"x": tensor("n")}, case=CASE).failure
    assert failure.check == "bounds"
    assert likely_cause(failure) == slug
    assert f"`{code}" in failure.reason
    assert failure.facts["kernel"] == "double_kernel"
    assert failure.facts["argument"] == ("x" if "loaded" in wrong else "out")
    assert failure.facts["offset"] == 35


def test_a_kernel_inside_its_bounds_passes(judge_one: Any) -> None:
    """The masks fit: no finding."""
    assert judge_one(double, double, {"x": tensor("n")}, case=CASE).failure is None


def test_a_lost_update_fails_repeat(judge_one: Any) -> None:
    """Programs that add up by load and store race; with an atomic they do not, though their order shows."""
    failure = judge_one(lambda x: total(x, atomic=False), total, {"x": tensor("n")}, case=CASE).failure
    assert failure.check == "repeat"
    assert likely_cause(failure) in {"racing-stores", "racing-load"}
    assert "tl.store(out, tl.load(out) + part)" in failure.reason
    assert judge_one(total, added_up, {"x": tensor("n")}, case=CASE, deterministic=False).failure is None


@pytest.mark.parametrize("declared", [False, {"out": False}])
def test_a_declared_chance_covers_no_race_of_plain_accesses(judge_one: Any, declared: Any) -> None:
    """Float atomics and locks are what may vary; a lost update is a finding all the same, unless `repeat` is off."""
    inputs = {"x": tensor("n")}
    failure = judge_one(lambda x: total(x, atomic=False), added_up, inputs, case=CASE, deterministic=declared).failure
    assert likely_cause(failure) in {"racing-stores", "racing-load"}


def test_a_race_that_is_switched_off_hides_no_other_access(judge_one: Any) -> None:
    """``without={"repeat": ...}`` takes the race out, and the read past the end behind it is still a finding."""

    def fused(x: T) -> T:
        double(x, loaded=1)
        return total(x, atomic=False)

    failure = judge_one(fused, added_up, {"x": tensor("n")}, case=CASE, without={"repeat": "known"}).failure
    assert likely_cause(failure) == "out-of-bounds"


def test_a_read_of_padding_that_is_dropped_passes(judge_one: Any) -> None:
    """Reading between a tensor's elements is legal as long as nothing comes of it; writing there is not."""
    inputs = {"x": tensor("rows columns")}
    assert judge_one(copy_rows, lambda x: x.clone(), inputs, case=PADDED).failure is None
    failure = judge_one(lambda x: copy_rows(x, whole=True), lambda x: x.clone(), inputs, case=PADDED).failure
    assert failure.check == "bounds"
    assert failure.facts["access"] == "gap-store"


@triton.jit
def scale_rows_kernel(grad, out, rows, columns, by_row, by_column, EXTRA: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(grad + row * by_row + i * by_column, mask=i < columns + EXTRA, other=0.0)
    tl.store(out + row * columns + i, value * 2, mask=i < columns)


class DoubledRows(torch.autograd.Function):
    """Its backward takes the strides of the upstream gradient, or those of a contiguous one, and ``extra`` elements."""

    @staticmethod
    def forward(ctx: Any, x: T, assumed: bool, extra: int) -> T:
        ctx.assumed, ctx.extra = assumed, extra
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: T) -> tuple[T, None, None]:
        out = torch.empty(grad.shape)
        rows, columns = grad.shape
        strides = (columns, 1) if ctx.assumed else grad.stride()
        scale_rows_kernel[(rows,)](grad, out, rows, columns, *strides, EXTRA=ctx.extra, BLOCK=16)
        return out, None, None


def bounds_in_backward(judge_one: Any, *, assumed: bool, extra: int) -> list[str | None]:
    """The causes of the first few failures of ``bounds`` among cases of one seed each."""
    causes: list[str | None] = []
    for seed in range(40):
        case = Case({"rows": 5, "hidden": 7}, "float32", {"x": TensorCase("float32", Layout("contiguous"))}, seed=seed)
        failure = judge_one(
            lambda x: DoubledRows.apply(x, assumed, extra), lambda x: x * 2, case=case, grad=True
        ).failure
        if failure is not None and failure.check == "bounds":
            causes.append(likely_cause(failure))
    return causes


@pytest.mark.slow
def test_strides_that_an_upstream_gradient_has_not_are_told_as_such(judge_one: Any) -> None:
    """One element expanded has no storage to read past: that is the same mistake as in other layouts.

    A load that goes too far is out of bounds whatever the layout.
    """
    assert set(bounds_in_backward(judge_one, assumed=True, extra=0)) == {"gradient-layout"}
    assert set(bounds_in_backward(judge_one, assumed=False, extra=1)) == {"out-of-bounds"}
    assert not bounds_in_backward(judge_one, assumed=False, extra=0)
