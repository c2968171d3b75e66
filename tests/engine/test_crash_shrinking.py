"""What is tried besides a case that died or ran out of time: no word on the kernel is its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.verdict import failed
from pytest_fusion.engine.crash import tally_of, without_shrinking
from pytest_fusion.engine.tally import Failure, Tally
from pytest_fusion.run.process.fork import Crash
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

CASE = Case({"n": 3}, "float32", {"x": TensorCase("float32")})
LATE = Crash("timeout", "no end after 150 s", {"case": CASE.as_json(), "cases": 7, "shrinking": True}, "")
WRONG = Tally(cases=1, failure=Failure(failed("values", "off"), CASE))


def job_that_tells(outcome: Any) -> Any:
    """A job whose case, run alone, ends so."""
    alone = SimpleNamespace(in_child=lambda seconds, forward: outcome)
    return SimpleNamespace(
        alone=lambda case, explained=True: alone, request=SimpleNamespace(profile=SimpleNamespace(seconds=1.0))
    )


def test_the_failure_is_told_where_only_the_search_does_not_end() -> None:
    """The case that fails and ends by itself keeps its failure, with the number of cases and a note."""
    told = without_shrinking(job_that_tells(WRONG), LATE)
    assert told is not None
    assert told.failure is not None
    assert told.failure.verdict.check == "values"
    assert told.cases == 7
    assert "search for a smaller case" in told.notes[-1]


@pytest.mark.parametrize("outcome", [replace(LATE, last_note=None), Tally(cases=1)], ids=["hangs", "passes"])
def test_a_call_that_hangs_alone_stays_a_hang(outcome: Any) -> None:
    """What does not end alone either, or shows no failure, is not excused."""
    assert without_shrinking(job_that_tells(outcome), LATE) is None


@pytest.mark.parametrize(
    "outcome",
    [
        WRONG,
        replace(LATE, last_note={"case": CASE.as_json()}),
        replace(LATE, kind="signal"),
        replace(LATE, last_note=None),
    ],
    ids=["ended", "before the search", "a signal", "no note"],
)
def test_nothing_else_is_asked_again(outcome: Any) -> None:
    """Other ends are told as they are: no further run of the case."""
    assert without_shrinking(job_that_tells(WRONG), outcome) is None


def test_a_case_that_raises_where_it_died_hides_no_crash() -> None:
    """A full card was met so: the case that had died was tried again and could not make its inputs."""

    def full(seconds: float, forward: bool) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    spec = FusionSpec(name="f", fused=lambda x: x, reference=lambda x: x, inputs={"x": tensor("n")})
    request = SimpleNamespace(profile=SimpleNamespace(seconds=1.0))
    job: Any = SimpleNamespace(
        alone=lambda case, explained: SimpleNamespace(in_child=full), request=request, only=None, spec=spec
    )
    told = tally_of(job, Crash("signal", "SIGSEGV", {"case": CASE.as_json(), "cases": 7}, ""))
    assert told.failure is not None
    assert (told.failure.verdict.check, told.failure.case, told.failure.shrink_runs) == ("crash", CASE, 0)
