"""Check ``honesty`` on a GPU: work on streams that nobody waits for, and honest kernels with streams of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import CaseResult, Context
from pytest_fusion.run import pristine
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

pytestmark = pytest.mark.gpu

T = torch.Tensor


def judge(fused: Callable[..., Any], reference: Callable[..., Any] = lambda x: x * 2) -> CaseResult:
    pristine.take()
    spec = FusionSpec(fused=fused, reference=reference, inputs={"x": tensor("rows hidden")}, dtypes="float32")
    case = Case({"rows": 33, "hidden": 65}, "float32", {"x": TensorCase("float32")}, seed=1)
    return judge_case(Context(spec, torch.device("cuda:0")), case, again=True)


def side_stream(*, joins: bool) -> Callable[[T], T]:
    """The work on another stream, which waits for the inputs; ``joins``: the caller's stream waits for it."""
    side = torch.cuda.Stream()

    def fused(x: T) -> T:
        out = torch.empty_like(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.add(x, x, out=out)
        if joins:
            torch.cuda.current_stream().wait_stream(side)
        return out

    return fused


def test_work_on_a_stream_that_nobody_waits_for_is_late() -> None:
    """A result written on another stream, which the caller's does not wait for, is found."""
    failure = judge(side_stream(joins=False)).failure
    assert failure is not None
    assert failure.check == "honesty", failure
    assert failure.facts["cause"] == "late-work"


def test_a_stream_that_is_waited_for_is_honest() -> None:
    """The same kernel with the missing wait passes, streams included."""
    result = judge(side_stream(joins=True))
    assert result.failure is None, result.failure
    (verdict,) = [v for v in result.verdicts if v.check == "honesty"]
    assert verdict.status == "pass"
    assert "streams" not in verdict.facts["not_run"]
    assert "caller" in verdict.facts["ran"]


def test_a_stream_that_stays_the_current_one_is_put_back_and_named() -> None:
    """What the caller launches next would be on it, and wait for nothing that came before; one that is left is fine."""
    side, home = torch.cuda.Stream(), torch.cuda.current_stream()

    def fused(x: T) -> T:
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(side)
        return x + x

    failure = judge(fused).failure
    assert failure is not None
    assert failure.identity == "honesty:tampers"
    assert failure.facts["replaced"] == ["the current CUDA stream"]
    assert torch.cuda.current_stream() == home


@pytest.mark.parametrize(
    ("key", "identity"),
    [
        (lambda x: (x.data_ptr(), x._version), "honesty:recycled"),
        (lambda x: (x.shape, float(x.double().sum())), "honesty:remembered"),
    ],
    ids=["address and version", "content"],
)
def test_a_kept_answer_is_found(key: Callable[[T], Any], identity: str) -> None:
    """Caches by address and version, and by content, are found on a GPU as on a CPU."""
    kept: dict[Any, T] = {}

    def fused(x: T) -> T:
        at = key(x)
        if at not in kept:
            kept[at] = x + x
        return kept[at].clone()

    failure = judge(fused).failure
    assert failure is not None
    assert failure.identity == identity


def test_timers_and_synchronisation_are_put_back() -> None:
    """A call that replaces torch.cuda.synchronize and an event's clock is found, and both are back."""
    before = torch.cuda.synchronize, torch.cuda.Event.elapsed_time

    def fused(x: T) -> T:
        torch.cuda.synchronize = lambda *a: None  # type: ignore[assignment]
        torch.cuda.Event.elapsed_time = lambda self, other: 0.001  # type: ignore[method-assign, assignment]
        return x + x

    failure = judge(fused).failure
    assert failure is not None
    assert failure.identity == "honesty:tampers"
    assert (torch.cuda.synchronize, torch.cuda.Event.elapsed_time) == before
