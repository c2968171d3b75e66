"""A failing case run again as the first call of a new process: where it passes, earlier calls made it fail."""

from __future__ import annotations

from dataclasses import replace

from pytest_fusion.diagnosis.diagnosis_model import Diagnosis
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.tally import Failure, Tally
from pytest_fusion.run.process.fork import run_isolated

# Wrong numbers alone: whatever is wrong about memory or a launch was seen where it happened.
_TELLING = ("values", "gradients")
# What an earlier call of an autotuned kernel leaves is its config, which experiments know.
_OF_CALLS = ("bad-config", "autotune-side-effect")


def with_first_call(job: Job, tally: Tally) -> Tally:
    """The tally; where its failing case passes as the first call of a new process, the cause is a cached answer.

    A cache by shape, say, whose key lacks a scalar or the dtype: its smallest case says nothing of it, experiments in
    the same process name any cause, and its replay passes. Costs failing tests a child.
    """
    failure = tally.failure
    if failure is None or not _needed(job, tally, failure):
        return tally
    assert failure.case is not None
    alone = job.alone(failure.case, explained=False)
    try:
        found = run_isolated(
            lambda channel: alone.here(channel.note), time_limit_s=job.request.profile.seconds, forward=False
        )
    except OSError:
        return tally
    if not isinstance(found, Tally) or found.failure is not None or not found.judged:
        return tally
    before = failure.explained
    evidence = [
        "right as the first call of a new process, wrong after others",
        "its replay runs it alone, and passes: run the whole test to see it fail",
    ]
    cause, seen = (before.cause, before.evidence) if before.cause in _OF_CALLS else ("cached-answer", [])
    tally.failure = replace(failure, diagnosis=Diagnosis(cause, [*seen, *evidence], [], before.runs + 1))
    return tally


def _needed(job: Job, tally: Tally, failure: Failure) -> bool:
    return (
        job.given is None
        and job.only is None
        and tally.pinned is None
        and failure.case is not None
        and failure.verdict.check in _TELLING
        and (tally.cases > 1 or failure.shrink_runs > 0)
    )
