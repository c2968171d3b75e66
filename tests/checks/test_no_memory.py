"""A judge that finds no memory for its own work, such as two dozen lanes of a large output."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from pytest_fusion import FusionFailure, FusionSpec, check_equivalent, tensor
from pytest_fusion.case.make import InputFailed
from pytest_fusion.case.plan import Limits, build, make_plan
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import CaseResult, Context, reject
from pytest_fusion.checks.trial import Trial
from pytest_fusion.oracle.operator_plan import plan_of
from pytest_fusion.oracle.reference import ReferenceFailed

T = torch.Tensor


def judged(fused: Any = lambda x: x * 2) -> Any:
    spec = FusionSpec(name="f", fused=fused, reference=lambda x: x * 2, inputs={"x": tensor("rows n")})
    plan = make_plan(spec, limits=Limits())
    return judge_case(Context(spec, torch.device("cpu")), build(plan, {"dim rows": 4, "dim n": 5}, 1))


@pytest.mark.parametrize("late", [False, True])
def test_the_case_is_rejected(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """It says nothing of the kernel, whether its reference runs out or what compares them."""

    def no_room(*_: Any, **__: Any) -> Any:
        if not late:
            raise torch.OutOfMemoryError("made up")
        try:
            raise torch.OutOfMemoryError("made up")
        except torch.OutOfMemoryError as error:
            raise ReferenceFailed("OutOfMemoryError: made up") from error

    monkeypatch.setattr(Trial, "judge", no_room)
    result = judged()
    assert (result.rejected, result.verdicts) == ("no-room-to-judge", [])


@pytest.mark.parametrize("own", [False, True])
def test_inputs_without_room(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """On a full card the kernel that fills with zeros could not be loaded, which no allocator tells."""
    full = RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ...")

    def no_room(*_: Any) -> Any:
        if not own:
            raise full
        raise InputFailed("x: RuntimeError: CUDA error: out of memory") from full

    monkeypatch.setattr("pytest_fusion.checks.case_judge.make_inputs", no_room)
    result = judged()
    assert (result.rejected, result.verdicts) == ("no-room-to-judge", [])


def test_another_error_of_the_reference_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the case before, so this is no question of its domain."""

    def raises(*_: Any, **__: Any) -> Any:
        raise ReferenceFailed("ValueError: made up") from ValueError("made up")

    monkeypatch.setattr(Trial, "judge", raises)
    with pytest.raises(ReferenceFailed, match="made up"):
        judged()


@pytest.mark.parametrize(
    ("error", "rejected"),
    [
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out-of-memory"),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."), "out-of-memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out-of-memory"),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), None),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
    ],
)
def test_a_driver_without_room_for_the_kernel(error: RuntimeError, rejected: str | None) -> None:
    """It says nothing of the kernel either; what else a launch may say does."""

    def launched(x: T) -> T:
        found = Future[T]()  # it raises, where in the launcher a `raise` refuses
        found.set_exception(error)
        return found.result()

    result = judged(launched)
    assert (result.rejected, result.failure is None) == (rejected, rejected is not None)


@pytest.mark.parametrize(("kind", "given_back"), [("no-room-to-judge", 1), ("out-of-memory", 1), ("too-expensive", 0)])
def test_a_full_card_gets_back_what_is_kept(monkeypatch: pytest.MonkeyPatch, kind: str, given_back: int) -> None:
    """Loading a kernel asks no allocator: the freed tensors that ours keeps would stay in its way for all cases."""
    seen: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(None))
    spec = FusionSpec(name="f", fused=lambda x: x, reference=lambda x: x, inputs={"x": tensor("n")})
    case = build(make_plan(spec, limits=Limits()), {"dim n": 3}, 1)
    for device in ("cuda", "cpu"):
        assert reject(Context(spec, torch.device(device)), CaseResult(case), kind, MemoryError()).rejected == kind
    assert len(seen) == given_back


def test_lanes_without_room_are_not_priced_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another way of pricing an operation allows is less, and would accuse the kernel."""
    from pytest_fusion.oracle.ops.rule_registry import OPERATORS

    def no_room(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setitem(OPERATORS, "mul", replace(OPERATORS["mul"], rule=no_room))
    plan_of.cache_clear()
    try:
        result = judged()
    finally:
        plan_of.cache_clear()
    assert (result.rejected, result.verdicts) == ("no-room-to-judge", [])


def test_a_wrong_kernel_is_wrong_still() -> None:
    """With memory enough."""
    assert judged(lambda x: x * 3).failure is not None


def test_what_had_no_room_is_let_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when Python next looks for cycles: on 80 GB, 74 were held while smaller sizes were tried, down to 1/64."""
    held: list[weakref.ref[T]] = []

    def no_room(*_: Any, **__: Any) -> Any:
        lanes = torch.zeros(4)
        held.append(weakref.ref(lanes))
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(Trial, "judge", no_room)
    gc.collect()
    gc.disable()
    try:
        judged()
        assert len(held) == 1
        assert held[0]() is None
    finally:
        gc.enable()


def test_one_call_without_room_for_its_judge_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel was right or wrong, and nobody knows; smaller tensors help."""

    def no_room(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(Trial, "judge", no_room)
    record = check_equivalent(torch.neg, torch.neg, torch.ones(3))
    assert (record.verdict, record.rejected) == ("unknown", {"no-room-to-judge": 1})
    assert "no case can be judged in the memory there is" in record.message
    assert "use smaller sizes" in record.message


def test_one_call_without_room_for_the_kernel_fails() -> None:
    """Whether the kernel asks for too much is for its author to say: the memory was not taken by the judge."""

    def asks_for_more(x: T) -> T:
        raise torch.OutOfMemoryError("made up")

    with pytest.raises(FusionFailure, match="no case could be judged"):
        check_equivalent(asks_for_more, torch.neg, torch.ones(3))
