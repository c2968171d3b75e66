"""Modes of running one test: judge it, replay one case, judge one concrete call, or call it under a profiler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.choosing.search import Known
from pytest_fusion.case.stated import misfit
from pytest_fusion.checks import compile_check
from pytest_fusion.checks.malformed import malformed
from pytest_fusion.diagnosis.repro import replay_file as replays
from pytest_fusion.engine import sanitize
from pytest_fusion.engine.isolated import tally_in_child, why_not_isolated
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.outcome import benched, record_of
from pytest_fusion.engine.request import Request
from pytest_fusion.engine.tally import Tally
from pytest_fusion.errors import NeedsCudaError, ReplayError
from pytest_fusion.report import environment
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.measure.timing.alone import beside

# The limits of a GPU's case that is replayed in the interpreter.
_PROGRAMS, _SECONDS = 70_000, 120.0
# Checks that run in the profile `deep` where the spec does not request them.
_OPT_IN = (compile_check.NAME, malformed.NAME)


_PASSES = "the case passes now"


class Mode(Protocol):
    """One way to run a test."""

    def run(self, job: Job) -> TestRecord:
        """The record of the test. Errors of the spec itself are raised; failures are in the record."""


@dataclass(frozen=True, slots=True)
class Judge:
    """All cases: pinned, failures of earlier runs, boundaries, random search; then the bench of a test that passed."""

    def run(self, job: Job) -> TestRecord:
        begun = time.perf_counter()
        request = job.request
        known = Known(job.spec, job.outer, request.nodeid) if request.seed is None else None
        job = replace(job, known=known.cases if known is not None else ())
        tally = _tally(job)
        if isinstance(tally, TestRecord):
            return tally
        if known is not None and tally.pinned is None:
            found = tally.failure.case if tally.failure is not None else None
            known.update(found, all_ran=found is None or found not in known.cases)
        record = record_of(job, tally)
        record.coverage["few"] = request.profile.few
        if request.sanitize:
            record = sanitize.sanitized(job.spec, request, tally, record)
        if request.bench is not None and record.verdict == "pass":
            record = benched(job, record, request.bench)
        return _timed(record, begun)


@dataclass(frozen=True, slots=True)
class Replay:
    """One stored case. ``made``: the versions it was found on; ``check`` and ``cause``: what it showed there."""

    case: Case
    made: Mapping[str, Any] = field(default_factory=dict)
    check: str = ""
    cause: str | None = None

    def run(self, job: Job) -> TestRecord:
        begun = time.perf_counter()
        spec, request = job.spec, job.request
        wrong = misfit(spec, self.case)
        if wrong is not None:
            raise ReplayError(
                f"{spec.name}: the replay file was written for another spec than today's: {wrong}. Run the test "
                "without --fusion-replay to find its failing case again"
            )
        elsewhere = replays.elsewhere(self.made, environment.describe(request.device)) or ""
        job = replace(job, request=self._as_found(request), only=self.case)
        tally = _tally(job)
        if isinstance(tally, TestRecord):
            return tally
        tally.notes += [elsewhere] if elsewhere else []
        self._own_first(tally)
        record = record_of(job, tally, elsewhere=elsewhere, cause=self.cause)
        record.coverage["few"] = True
        if record.verdict == "pass" and not record.findings:
            record = replace(record, message=_PASSES)
        if request.sanitize:
            record = sanitize.sanitized(spec, request, tally, record)
        return _timed(record, begun)

    def _own_first(self, tally: Tally) -> None:
        """Put the stored finding first; add a note where it is gone and another shows."""
        found = tally.findings
        ranked = sorted(found, key=lambda one: (one.verdict.check != self.check, one.code != self.cause))
        if not ranked or not self.check:
            return
        own = ranked[0]
        if own.verdict.check != self.check:
            tally.notes.append(f"the case no longer fails {self.check}, as its file says; it shows another finding")
        elif own.verdict.failed and tally.failure is not None:
            tally.failure, tally.others = own, [one for one in found if one is not own]

    def _as_found(self, request: Request) -> Request:
        """The request with a check of `deep` alone, and with higher limits: a GPU's quick case may need minutes."""
        profile = replace(request.profile, name="deep") if self.check in _OPT_IN else request.profile
        if self.made.get("lane") == "cuda" and request.device == "cpu":
            more = max(profile.programs, _PROGRAMS), max(profile.seconds, _SECONDS)
            profile = replace(profile, programs=more[0], seconds=more[1])
        return replace(request, profile=profile)


@dataclass(frozen=True, slots=True)
class Concrete:
    """One call on the caller's own arguments, which ``given`` describes in the form of a case."""

    given: Mapping[str, Any]

    def run(self, job: Job) -> TestRecord:
        begun = time.perf_counter()
        job = replace(job, only=Case({}, "float32", {}), given=self.given)
        tally = _tally(job)
        return tally if isinstance(tally, TestRecord) else _timed(record_of(job, tally), begun)


@dataclass(frozen=True, slots=True)
class Profiled:
    """Calls what ``bench=`` names in ``file`` inside a process that ncu watches; judges nothing."""

    file: Path

    def run(self, job: Job) -> TestRecord:
        from pytest_fusion.bench.profiled import all_entries

        cases = all_entries(job.spec, self.file, torch.device(job.request.device), job.extra)
        return TestRecord(job.request.nodeid, "pass", cases=cases)


def _tally(job: Job) -> Tally | TestRecord:
    """The tally of a job, from a child where one can be forked; a record where the kernel needs a GPU."""
    request = job.request
    reason = why_not_isolated(request)
    # Waits while other workers time something on this GPU.
    with beside(torch.device(request.device)) if request.bench is not None else contextlib.nullcontext():
        try:
            tally = tally_in_child(job) if reason is None else job.here(lambda _: None)
        except NeedsCudaError as error:
            return TestRecord(request.nodeid, "unknown", message=str(error))
    if reason is None:
        tally.checks.setdefault("crash", {"verdict": "pass", "reason": "", "cases": tally.cases})
    else:
        tally.checks["crash"] = {"verdict": "unknown", "reason": f"not isolated: {reason}", "cases": 0}
        tally.notes.append(f"ran in this process, so a crash would have ended it: {reason}")
    searching.publish_statistics(tally.statistics)
    return tally


def _timed(record: TestRecord, begun: float) -> TestRecord:
    return replace(record, seconds=round(time.perf_counter() - begun, 3))
