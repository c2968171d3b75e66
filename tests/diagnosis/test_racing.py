"""Causes that programs tell whose loads and stores meet, beside those that may."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from pytest_fusion import FusionSpec, dim, tensor, values
from pytest_fusion.plugin.testing import examine
from tests.sweeps import sweep

T = torch.Tensor
BINS = {
    "w": tensor("n"),
    "index": tensor("n", dtype=torch.int64, values=values.indices("bins")),
    "bins": tensor("bins"),
}


def added_up(w: T, index: T, bins: T) -> T:
    return w.new_zeros(len(bins)).index_add(0, index, w)


@triton.jit
def bins_kernel(w, index, out, HOW: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0)
    target = out + tl.load(index + at)
    value = tl.load(w + at)
    if HOW == "load and store":
        tl.store(target, tl.load(target) + value)
    elif HOW == "twice":
        tl.atomic_add(target, value + value)
    else:
        tl.atomic_add(target, value)


@triton.jit
def bins_in_one_kernel(w, index, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    target = out + tl.load(index + at, mask=at < n, other=0)
    tl.store(target, tl.load(target, mask=at < n) + tl.load(w + at, mask=at < n), mask=at < n)


def bins_spec(how: str) -> FusionSpec:
    def fused(w: T, index: T, bins: T) -> T:
        out = torch.zeros(len(bins))
        if len(w) and how == "in one program":
            block = triton.next_power_of_2(len(w))
            bins_in_one_kernel[(1,)](w.contiguous(), index.contiguous(), out, len(w), BLOCK=block)
        elif len(w):
            bins_kernel[(len(w),)](w.contiguous(), index.contiguous(), out, HOW=how)
        return out

    return FusionSpec(fused=fused, reference=added_up, inputs=BINS, dtypes="float32", deterministic=False,
                      dims={"n": dim(0, 30), "bins": dim(1, 8)}, name=f"bins {how}")  # fmt: skip


@sweep(
    ("how", "check", "cause"),
    [
        ("load and store", "repeat", {"racing-load", "racing-stores"}),
        ("in one program", "repeat", {"racing-stores"}),
        ("twice", "values", {"unexplained"}),
    ],
    ids=("load and store", "in one program", "twice"),
    fast=("load and store",),
)
def test_a_race_is_named_where_results_may_vary(how: str, check: str, cause: set[str], tmp_path: Path) -> None:
    """Plain loads and stores that race are a finding there, too; wrong terms are none."""
    record = examine(bins_spec(how), seed=0, root=tmp_path, first=True)
    assert record.failed_check == check
    assert record.cause in cause, record.diagnosis


@triton.jit
def half_apart(x, out, n, HOW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    if HOW == "at half":
        tl.store(out + at // 2, value, mask=at < n)
    else:
        tl.store(out + tl.minimum(at, n - 1), value)


@pytest.mark.parametrize(("how", "cause"), [("at half", "wrong-index-map"), ("at the last one", "racing-stores")])
def test_stores_that_meet_and_leave_a_hole_go_elsewhere(how: str, cause: str, tmp_path: Path) -> None:
    """Where every element gets a value, the race is all there is."""

    def fused(x: T) -> T:
        out = torch.empty(len(x))
        if len(x):
            half_apart[(triton.cdiv(len(x), 4),)](x.contiguous(), out, len(x), HOW=how, BLOCK=4)
        return out

    spec = FusionSpec(fused=fused, reference=lambda x: x * 1, inputs={"x": tensor("n")}, dtypes="float32", name=how)
    record = examine(spec, seed=0, root=tmp_path, first=True)
    assert (record.failed_check, record.cause) == ("repeat", cause), record.message


@pytest.mark.slow
def test_a_sum_by_atomics_passes(tmp_path: Path) -> None:
    """Any order of a sum is right where results may vary."""
    assert examine(bins_spec("atomics"), seed=0, root=tmp_path).verdict == "pass"


@triton.jit
def doubled_in_place(x, row, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    own = x + tl.program_id(0) * row + at
    tl.store(own, tl.load(own, mask=at < n) * 2, mask=at < n)


@pytest.mark.parametrize("layout", ["transposed", "contiguous"])
def test_a_race_that_contiguous_tensors_do_not_have_is_one_of_strides(tmp_path: Path, layout: str) -> None:
    """Rows of one column's stride overlap: programs load what others store, and the tensor's layout is why."""

    def fused(x: T) -> T:
        out = x.clone()
        doubled_in_place[(len(x),)](out, out.stride(0), x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
        return out

    spec = FusionSpec(fused=fused, reference=lambda x: x * 2, inputs={"x": tensor("rows n", layouts=(layout,))},
                      dtypes="float32", dims={"rows": dim(1, 8), "n": dim(1, 8)}, name="doubled")  # fmt: skip
    record = examine(spec, seed=0, root=tmp_path, first=True, max_cases=24)
    wanted = ("repeat", "ignores-strides") if layout == "transposed" else (None, None)
    assert (record.failed_check, record.cause) == wanted, record.message
