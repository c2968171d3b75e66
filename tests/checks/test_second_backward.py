"""The part ``gradients:second`` of `gradients`: a second backward through a retained graph, and how to leave it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion import FusionSpec, SpecError, fused_equivalent, tensor
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import Context, Focus
from pytest_fusion.checks.verdict import SECOND
from pytest_fusion.report.record import TestRecord
from tests.checks.judged import concluded, hazards, plain_cases

T = torch.Tensor
ONCE = {SECOND: "each graph is for one backward"}


def using_up(scale: float = 1.0) -> Callable[[T], T]:
    """tanh whose backward overwrites what it had saved, and whose gradients are off by ``scale``."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            y = torch.tanh(x)
            ctx.save_for_backward(y.clone())
            return y

        @staticmethod
        def backward(ctx: Any, *gradients: T) -> T:
            (saved,) = ctx.saved_tensors
            dx = (1 - saved * saved) * gradients[0] * scale
            saved.data.mul_(0.5)
            return dx

    def fused(x: T) -> T:
        result: T = Fused.apply(x)
        return result

    return fused


def test_a_second_backward_that_is_wrong_says_how_to_leave_it_out(judge_one: Any) -> None:
    """A hazard, with the line for who means each graph for one backward."""
    result = judge_one(using_up(), torch.tanh, grad=True)
    (hazard,) = hazards(result, "second-backward")
    assert "a second backward through the retained graph gives another dx" in hazard.reason
    assert "without={'gradients:second': 'reason'}" in hazard.reason
    assert concluded(result, "gradients").status == "pass"
    assert not hazards(judge_one(using_up(), torch.tanh, grad=True, without=ONCE), "second-backward")


@pytest.mark.parametrize(("sought", "found"), [(None, 0), ("gradients:again:dx", 1), ("gradients:second:x", 0)])
def test_a_second_backward_is_asked_until_it_is_wrong(sought: str | None, found: int) -> None:
    """Once a test has the hazard, a case looks for it where it is shrunk, alone."""
    inputs = {"x": tensor("rows hidden")}
    spec = FusionSpec(fused=using_up(), reference=torch.tanh, inputs=inputs, dtypes="float32", grad=True)
    focus = Focus(known=frozenset({"gradients:again:dx"}), sought=sought)
    result = judge_case(Context(spec, torch.device("cpu"), complete=True, focus=focus), plain_cases(1)[0])
    assert len(hazards(result, "second-backward")) == found
    assert concluded(result, "gradients").status == "pass"


@pytest.mark.slow
def test_without_it_the_rest_of_gradients_is_judged(examine: Any) -> None:
    """What the first backward returns is judged as for any kernel, and the reason is in the record."""
    record: TestRecord = examine(using_up(), torch.tanh, grad=True, cases=60, without=ONCE)
    assert record.verdict == "pass", record.message
    assert record.checks["gradients"]["verdict"] == "pass"
    assert record.off == ONCE
    wrong: TestRecord = examine(using_up(1.01), torch.tanh, grad=True, cases=30, without=ONCE)
    assert wrong.failed_check == "gradients"


def test_the_other_fill_is_still_asked(examine: Any) -> None:
    """Cases that would have asked for a second backward compare the first one's gradients under both fills."""

    class Fresh(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: T) -> T:
            return x * 2

        @staticmethod
        def backward(_: Any, *gradients: T) -> T:
            dx = torch.empty_like(gradients[0])
            stale = dx.view(-1)[:1].nan_to_num(0.0, 0.0, 0.0).sign() * 1e-8 if dx.numel() else 0.0
            return dx.copy_(gradients[0] * 2 + stale)

    def fused(x: T) -> T:
        result: T = Fresh.apply(x)
        return result

    record: TestRecord = examine(fused, lambda x: x * 2, grad=True, cases=40, without=ONCE)
    assert record.failed_check == "bounds", record.message


def test_a_decorated_test_may_name_it() -> None:
    """``without=`` takes it, and a wrong one is corrected to it."""

    def declared(part: str) -> Any:
        def test_it(x: T) -> T:
            return using_up()(x)

        inputs = {"x": tensor("rows hidden")}
        return fused_equivalent(torch.tanh, inputs=inputs, grad=True, without={part: "a reason"})(test_it)

    declared(SECOND)
    with pytest.raises(SpecError, match="did you mean 'gradients:second'"):
        declared("gradients:secnd")
