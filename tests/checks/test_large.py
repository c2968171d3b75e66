"""Offsets that do not fit 32 bits: found on few elements, in gigabytes of address space that hold almost nothing."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.case.choosing import large_offsets, search
from pytest_fusion.case.layouts import FAR, far_axis, geometry, goes_far
from pytest_fusion.case.make import make_inputs
from pytest_fusion.case.plan import Limits, make_plan
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import Context
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.modes import Judge
from pytest_fusion.engine.profiles import PROFILES
from pytest_fusion.engine.request import Request
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import place
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
from tests.interpreted import triton_interpreted

triton = triton_interpreted("the plants are judged by what an interpreted access shows")

tl = triton.language
T = torch.Tensor
CPU = torch.device("cpu")
MATRIX = {"x": tensor("rows hidden")}
ROWS_APART = Case({"rows": 3, "hidden": 20}, "float32", {"x": TensorCase("float32", Layout("large"))}, seed=1)


@triton.jit
def scaled(x, out, n, row, column, into, beside, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if WIDE == 0:
        at = pid * row + i * column
        to = pid * into + i * beside
    elif WIDE == 1:
        at = (pid * row).to(tl.int64) + (i * column).to(tl.int64)
        to = (pid * into).to(tl.int64) + (i * beside).to(tl.int64)
    else:
        at = pid.to(tl.int64) * row + i.to(tl.int64) * column
        to = pid.to(tl.int64) * into + i.to(tl.int64) * beside
    tl.store(out + to, tl.load(x + at, mask=i < n, other=0.0) * 2, mask=i < n)


def doubling(wide: int) -> Any:
    """``2 * x`` with offsets in 32 bits, in 32 bits widened too late, or in 64."""

    def fused(x: T) -> T:
        out = torch.empty(x.shape, dtype=x.dtype)
        if x.numel():
            block = triton.next_power_of_2(x.shape[1])
            scaled[(x.shape[0],)](x, out, x.shape[1], *x.stride(), *out.stride(), WIDE=wide, BLOCK=block)
        return out

    return fused


def doubling_in_place(wide: int) -> Any:
    def fused(x: T) -> None:
        if x.numel():
            block = triton.next_power_of_2(x.shape[1])
            scaled[(x.shape[0],)](x, x, x.shape[1], *x.stride(), *x.stride(), WIDE=wide, BLOCK=block)

    return fused


def doubled(x: T) -> T:
    return 2 * x


def doubled_in_place(x: T) -> None:
    x.mul_(2)


def examine(tmp_path: Path, fused: Any, reference: Any = doubled, inputs: Any = None, **keywords: Any) -> TestRecord:
    def outer() -> None: ...

    search.adopt(outer, outer)
    spec = FusionSpec(fused=fused, reference=reference, inputs=inputs or MATRIX, **keywords)
    request = Request("test", isolate="off", root=tmp_path, seed=0, profile=PROFILES["large"], first=True)
    return Judge().run(Job(spec, request, outer, {}))


@pytest.mark.parametrize("wide", [0, 1], ids=["in 32 bits", "widened after the product"])
def test_an_offset_in_32_bits_is_found(tmp_path: Path, wide: int) -> None:
    """It wraps around to an address before the tensor, and its cause is told from an ignored stride."""
    record = examine(tmp_path, doubling(wide))
    assert (record.verdict, record.failed_check, record.cause) == ("fail", "bounds", "int32-overflow"), record.message
    assert record.case is not None
    assert record.case["inputs"]["x"]["layout"] == "large"
    assert record.case["dims"]["rows"] * record.case["dims"]["hidden"] < 100


def test_an_offset_in_64_bits_passes(tmp_path: Path) -> None:
    """Every case of the profile is judged, each with one tensor that goes far, in whichever axis."""
    record = examine(tmp_path, doubling(2), dtypes=["float32", "bfloat16"])
    assert (record.verdict, record.message) == ("pass", "")
    assert 4 <= record.cases <= PROFILES["large"].covering
    assert not record.rejected


@pytest.mark.parametrize("wide", [0, 2])
def test_a_kernel_that_gets_copies_is_not_judged(tmp_path: Path, wide: int) -> None:
    """Whether its offsets would wrap around shows on none of them: that is unknown, and no pass."""
    kernel = doubling(wide)
    record = examine(tmp_path, lambda x: kernel(x.contiguous()))
    assert record.verdict == "unknown", record.message
    assert list(record.rejected) == ["dense"]
    assert "launched on copies, whose offsets fit 32 bits" in str(record.notes)


def test_a_store_with_an_offset_in_32_bits_is_found(tmp_path: Path) -> None:
    """Tensors that a kernel writes in place go far too, and the same kernel with 64 bits passes."""
    wrong = examine(tmp_path, doubling_in_place(0), doubled_in_place, mutates="x")
    right = examine(tmp_path, doubling_in_place(2), doubled_in_place, mutates="x")
    assert (wrong.verdict, wrong.cause) == ("fail", "int32-overflow"), wrong.message
    assert right.verdict == "pass", right.message


def test_an_ignored_stride_is_no_overflow(tmp_path: Path) -> None:
    """A kernel that is wrong for every padded tensor shrinks to one whose offsets fit."""

    def fused(x: T) -> T:
        return torch.as_strided(x, x.shape, (x.shape[1], 1)) * 2

    record = examine(tmp_path, fused)
    assert (record.verdict, record.cause) == ("fail", "ignores-strides"), record.message


@pytest.mark.parametrize(
    ("inputs", "keywords", "why"),
    [
        ({"x": tensor("rows hidden", layouts="contiguous")}, {}, "no input takes a layout with gaps"),
        (MATRIX, {"rejects": ValueError}, "ValueError (dense only)"),
        (MATRIX, {"dims": {"rows": 1, "hidden": 1}}, "no axis of 3 slices"),
    ],
)
def test_a_kernel_without_such_cases_is_unknown(tmp_path: Path, inputs: Any, keywords: Any, why: str) -> None:
    """Nothing passes for want of a case, and nothing fails: refusing strides is no bug."""

    def fused(x: T) -> T:
        if not x.is_contiguous():
            raise ValueError("dense only")
        return 2 * x

    record = examine(tmp_path, fused, inputs=inputs, **keywords)
    assert record.verdict == "unknown"
    assert any(why in note for note in record.notes), record.notes


def test_too_little_memory_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that has no room, found out before or while it is made, is rejected and says so."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory for a guarded region")

    monkeypatch.setattr("pytest_fusion.run.memory.backing._map", refuse)
    record = examine(tmp_path, doubling(2))
    assert (record.verdict, set(record.rejected)) == ("unknown", {"no-room-to-judge"})


@pytest.mark.parametrize("shape", [(3, 20), (2, 40), (5, 3, 40), (40,), (1, 7, 9), (64, 4, 2, 8)])
@pytest.mark.parametrize("variant", [0, 1, 2])
def test_the_last_slice_lies_beyond_32_bits(shape: tuple[int, ...], variant: int) -> None:
    """Elements are distinct, each stride fits 32 bits as launchers pass it, and the last offset does not."""
    layout = Layout("large", variant=variant)
    plan = geometry(shape, layout)
    reach = 0
    for stride, size in sorted(zip(plan.strides, shape, strict=True)):
        assert stride > reach or size == 1
        reach += (size - 1) * stride
    assert max(plan.strides) < FAR
    axis = far_axis(shape, variant) if variant < min(len(shape), 3) else None
    assert axis is not None or plan.strides == geometry(shape, Layout()).strides
    assert axis is None or reach >= FAR
    assert goes_far(shape, layout) is (reach >= FAR)


def test_a_far_case_replays() -> None:
    """Through JSON it stays the same case, with the same values at the same offsets."""
    spec = FusionSpec(fused=doubling(2), reference=doubled, inputs=MATRIX)
    plan = make_plan(spec, limits=Limits())
    made = list(large_offsets.cases(plan, 7, 5))
    assert made
    assert all(large_offsets.goes_far(spec, case) for case in made)
    assert [Case.from_json(json.loads(json.dumps(case.as_json()))) for case in made] == made
    placed = place(make_inputs(spec, made[0], CPU), made[0], CPU, FILLS[0])
    assert torch.equal(placed.arguments["x"], make_inputs(spec, made[0], CPU)["x"])


def test_what_lies_between_takes_no_memory() -> None:
    """Placing, judging and changing such tensors touches some pages of 8 GB, not all of them."""
    spec = FusionSpec(fused=doubling_in_place(2), reference=doubled_in_place, inputs=MATRIX, mutates="x")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = judge_case(Context(spec, CPU), ROWS_APART, again=True)
    assert result.failure is None
    assert result.rejected is None
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 1 << 30


@triton.jit
def poke(x, at):
    tl.store(x + at, 1.0)


@pytest.mark.parametrize(
    ("at", "check"), [(0, "inputs"), (25, "bounds"), (FAR // 2, "bounds"), (-1, "bounds"), (FAR + 60, "bounds")]
)
def test_a_stray_store_is_found(at: int, check: str) -> None:
    """Into an element, right behind a row, into the gap, before the tensor and behind it."""

    def fused(x: T) -> T:
        poke[(1,)](x, at)
        return 2 * x

    spec = FusionSpec(fused=fused, reference=doubled, inputs=MATRIX)
    found = judge_case(Context(spec, CPU), ROWS_APART).failure
    assert found is not None
    assert found.check == check


def test_a_torch_kernel_that_damages_the_guards_is_found() -> None:
    """Writes that no interpreter sees are found in the guards of such a tensor, with their distance."""

    def fused(x: T) -> T:
        torch.as_strided(x, (1,), (1,), x.storage_offset()).numel()
        import ctypes

        ctypes.memset(x.data_ptr() - 8, 1, 4)
        return 2 * x

    spec = FusionSpec(fused=fused, reference=doubled, inputs=MATRIX)
    found = judge_case(Context(spec, CPU), ROWS_APART).failure
    assert found is not None
    assert (found.check, found.facts["zone"], found.facts["elements"]) == ("bounds", "before", 2)
