"""Batches of `invariance`: which cases are asked, and with how many slices."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.context import CaseResult, Context
from pytest_fusion.checks.invariance.batches import Batches, Effort, InvarianceState, Spent
from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

T = torch.Tensor
CASE = Case({"rows": 5, "hidden": 9}, "float32", {"x": TensorCase("float32")}, seed=1)


def row_sums(x: T) -> T:
    return x.sum(-1)


SPEC = FusionSpec(fused=row_sums, reference=row_sums, inputs={"x": tensor("rows hidden")}, invariant="rows")


def test_cases_of_wider_slices_are_asked_besides() -> None:
    """Once the first cases had their turn, a case counts whose slices are twice as wide as any before it; one such
    case is asked even where the seconds are spent."""
    effort, asked = Effort(any_case=2, thorough=3, wide=2, calls=9), Spent()
    context, trial = effort_of("float32")
    for thorough, wide in ((False, 40), (False, 3), (True, 5)):
        assert effort.due(asked, trial(thorough), wide)
        effort.note(asked, trial(thorough), wide)
    assert [effort.due(asked, trial(True), wide) for wide in (40, 79, 80)] == [False, False, True]
    context.state(InvarianceState).outputs.seconds = 60.0
    assert effort.due(asked, trial(True), 80)
    effort.note(asked, trial(True), 80)
    assert not effort.due(asked, trial(True), 10_000)
    asked.found = True
    assert effort.due(asked, trial(False), 1)


def test_cases_of_16_bits_take_no_turn_of_those_of_32() -> None:
    """They round away most of what other sums show; once the seconds are spent, all have their turns together."""
    effort, asked = Effort(any_case=2, thorough=3, wide=0, calls=9), Spent()
    _, trial = effort_of("float16")
    for _ in range(2):
        assert effort.due(asked, trial(False), 9)
        effort.note(asked, trial(False), 9)
    assert not effort.due(asked, trial(False), 9)
    _, exact = effort_of("float32")
    assert effort.due(asked, exact(False), 9)
    late, slow = effort_of("float32")
    late.state(InvarianceState).outputs.seconds = 60.0
    asked.wide[False] = 1
    assert not effort.due(asked, slow(False), 9)


def effort_of(dtype: str) -> tuple[Context, Callable[[bool], Any]]:
    context, result = Context(SPEC, torch.device("cpu")), SimpleNamespace(case=SimpleNamespace(dtype=dtype))
    return context, lambda thorough: SimpleNamespace(thorough=thorough, context=context, result=result)


def test_a_size_of_the_kernels_own_is_learnt() -> None:
    """A block that is no power of two, and a grid that no longer grows, are gone around."""
    launches = {
        5: [Launch("k", (5, 1, 1), {"BLOCK": 96, "EVEN": True, "WIDE": 64})],
        1025: [Launch("k", (528, 1, 1), {"BLOCK": 96})],
        2049: [Launch("k", (528, 1, 1), {"BLOCK": 96})],
    }
    trial: Any = SimpleNamespace(result=CaseResult(CASE), context=Context(SPEC, torch.device("cpu")), spec=SPEC)
    assert Batches(trial, "rows", Spent()).learnt(launches) == [96, 97, 528, 529]


def test_slow_calls_leave_larger_batches_out() -> None:
    """An interpreted call of half a second is the largest of its case; after seconds of them a test asks for few."""
    context = Context(SPEC, torch.device("cpu"))
    trial: Any = SimpleNamespace(result=CaseResult(CASE), context=context, spec=SPEC)
    batches = Batches(trial, "rows", Spent())
    assert batches.admits(4097)
    batches.took(64, 0.1)
    assert batches.admits(4097)
    batches.took(129, 0.6)
    assert (batches.admits(129), batches.admits(257)) == (True, False)
    context.state(InvarianceState).outputs.seconds = 60.0
    late = Batches(trial, "rows", Spent())
    assert (late.admits(257), late.admits(513)) == (True, False)
    assert Batches(trial, "rows", Spent(found=True)).admits(4097)
