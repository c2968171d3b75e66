"""Runs a failing case again: as the first call of a new process and, from a GPU, in the interpreter."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from pytest_fusion.case.choosing import large_offsets
from pytest_fusion.diagnosis.diagnose import UNEXPLAINED
from pytest_fusion.diagnosis.diagnosis_model import Diagnosis
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.tally import Failure, Tally
from pytest_fusion.interpreter.bridge.hook import adopt
from pytest_fusion.run.process.fork import Channel, Crash, run_isolated
from pytest_fusion.spec.wording import first_line

# An experiment of the CPU lane takes 5 to 30 ms; one that takes longer than this is given up.
_SECONDS = 15.0
_OPEN = (UNEXPLAINED, "device-fault", "crash")
# Guard zones on a GPU show a write, but not the line that did it.
_WITHOUT_A_LINE = ("bounds",)
# What the lane may find in place of a wrong value or an illegal access. A kernel that it cannot run is no finding.
_TELLING = ("values", "gradients", "bounds", "unwritten", "repeat", "inputs", "invariance")

# Checks of numbers alone; errors of memory or launches are seen where they happen.
_NUMBERS = ("values", "gradients")


def with_first_call(job: Job, tally: Tally) -> Tally:
    """The tally; its cause is a cached answer where the failing case passes as the first call of a new process.

    An example is a cache by shape whose key lacks a scalar or the dtype. Experiments in the same process would name any
    cause, and the replay passes. Costs failing tests a child.
    """
    failure = tally.failure
    if failure is None or not _may_be_cached(job, tally, failure):
        return tally
    assert failure.case is not None
    alone = job.alone(failure.case, explained=False)
    seconds = job.request.profile.seconds
    try:
        found = run_isolated(lambda channel: alone.here(channel.note), time_limit_s=seconds, forward=False)
    except OSError:
        return tally
    if not isinstance(found, Tally) or found.failure is not None or not found.judged:
        return tally
    evidence = [
        "right as the first call of a new process, wrong after others",
        "its replay runs it alone, and passes: run the whole test to see it fail",
    ]
    tally.failure = replace(failure, diagnosis=Diagnosis("cached-answer", evidence, [], failure.explained.runs + 1))
    return tally


def _may_be_cached(job: Job, tally: Tally, failure: Failure) -> bool:
    return (
        job.given is None
        and job.only is None
        and tally.pinned is None
        and failure.case is not None
        and failure.verdict.check in _NUMBERS
        and (tally.cases > 1 or failure.shrink_runs > 0)
    )


def with_second_opinion(job: Job, tally: Tally) -> Tally:
    """The tally, with a diagnosis from the CPU lane where the GPU left the cause open and the kernel allows it."""
    # A child interprets the kernels on the same case, without compiling; on a GPU an empty cache takes the time.
    failure = tally.failure
    if failure is None or not _needed(job, failure):
        return tally
    diagnosis = failure.explained
    found = _in_cpu_lane(job, failure)
    if isinstance(found, Tally):
        diagnosis = _both(diagnosis, failure, found)
    else:
        left_out = f"not checked in the interpreter: {found}"
        diagnosis = replace(diagnosis, ruled_out=[*diagnosis.ruled_out, left_out])
    tally.failure = replace(failure, diagnosis=diagnosis)
    return tally


def _needed(job: Job, failure: Failure) -> bool:
    request, case = job.request, failure.case
    return (
        request.device != "cpu"
        and job.given is None
        and case is not None
        and not job.spec.requires
        and (failure.explained.cause in _OPEN or failure.verdict.check in _WITHOUT_A_LINE)
        and failure.verdict.check in (*_TELLING, "crash")
        and "triton" in sys.modules  # else there are no kernels to adopt
        and not large_offsets.goes_far(job.spec, case)
    )


def _in_cpu_lane(job: Job, failure: Failure) -> Tally | str:
    """The tally of the case in the interpreter, or why it could not run there."""
    assert failure.case is not None
    alone = job.alone(failure.case)
    there = replace(alone, request=replace(alone.request, device="cpu"))

    def work(channel: Channel) -> Tally:
        adopt()
        # The laboratory counts CPU time, and more threads take more of it for the same work.
        torch.set_num_threads(1)
        return there.here(channel.note)

    try:
        found = run_isolated(work, time_limit_s=_SECONDS, forward=False)
    except OSError as error:
        return first_line(error)
    if isinstance(found, Tally):
        return found
    message = f"{found.kind}: {found.detail}" if isinstance(found, Crash) else f"{found.type_name}: {found.message}"
    return message.splitlines()[0]


def _both(here: Diagnosis, failure: Failure, found: Tally) -> Diagnosis:
    """One diagnosis of what was learnt on the GPU and in the CPU lane."""
    there = found.failure
    if there is None:
        if not found.judged:
            return here
        seen = "in the CPU lane: interpreted, the same case is right; what only a GPU has is left (order, arithmetic)"
        return replace(here, ruled_out=[*here.ruled_out, seen])
    verdict = there.verdict
    second = there.explained
    if verdict.check not in _TELLING or second.cause == UNEXPLAINED:
        return here
    alike = "fails alike" if verdict.check == failure.verdict.check else f"fails {verdict.check}"
    seen = f"in the CPU lane, interpreted, the same case {alike}: {first_line(verdict.reason)}"
    return Diagnosis(second.cause, [seen, *second.evidence], [], here.runs + second.runs)
