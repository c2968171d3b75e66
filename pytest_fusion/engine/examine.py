"""One test from spec to record, in a forked child where that is possible: a crash is a finding and not the end."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_fusion.bench.bench_request import BenchRequest
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.choosing.known_failures import Known
from pytest_fusion.case.make import ImpossibleCase, InputFailed
from pytest_fusion.case.misfit import misfit
from pytest_fusion.checks.verdict import CHECKS, Verdict
from pytest_fusion.diagnosis.repro import replay_file as replays
from pytest_fusion.diagnosis.repro import script as scripts
from pytest_fusion.diagnosis.text.heat import drawing
from pytest_fusion.diagnosis.text.message import compose, replay_command
from pytest_fusion.engine import crash, sanitize
from pytest_fusion.engine.first_call import with_first_call
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.request import Request
from pytest_fusion.engine.second_opinion import with_second_opinion
from pytest_fusion.engine.tally import Failure, Tally
from pytest_fusion.engine.unjudged import NOTHING_JUDGED, lacking
from pytest_fusion.errors import FusionError, FusionFailure, NeedsCudaError, ReplayError
from pytest_fusion.report import environment
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.measure.timing.alone import beside
from pytest_fusion.run.process import preload
from pytest_fusion.run.process.atomic_file import replace_whole
from pytest_fusion.run.process.fork import Channel, ChildError, Crash, can_fork, run_isolated
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import first_line, plural

if TYPE_CHECKING:
    from pytest_fusion.bench.measured import Measured

# How much longer a case may take after the first that was only slow.
_PATIENCE = 10

# What one case of a GPU may cost when it is replayed on the CPU lane.
_PROGRAMS, _SECONDS = 70_000, 120.0


def run(spec: FusionSpec, request: Request, *, outer: Any, extra: Mapping[str, Any]) -> TestRecord:
    """Judge a spec and tell what came of it. Errors of the spec itself are raised; failures are in the record."""
    begun = time.perf_counter()
    if request.bare is not None and request.given is None:
        return sanitize.bare(spec, request, extra)
    if request.profiled is not None and request.given is None:
        return _profiled(spec, request, request.profiled, extra)
    if request.served and request.given is None:
        from pytest_fusion.canary.offline.incumbent.serving import serve

        return serve(spec, request, extra)
    if request.canary is not None and request.given is None:
        from pytest_fusion.canary.offline.comparison_test import compared

        return compared(spec, request, outer=outer, extra=extra)
    known, elsewhere = None, None
    if request.replay is None and request.seed is None:
        known = Known(spec, outer, request.nodeid)
        request = replace(request, known=known.cases)
    elif request.replay is not None and request.given is None:
        _must_fit(spec, request.replay)
        elsewhere = replays.elsewhere(request.made, environment.describe(request.device))
        request = _with_patience(request)
    job = Job(spec, request, outer, extra)
    reason = why_not_isolated(request)
    # Where other workers time something on this GPU, it waits for them.
    with beside(torch.device(request.device)) if request.bench is not None else contextlib.nullcontext():
        try:
            tally = _isolated(job) if reason is None else job.here(lambda _: None)
        except NeedsCudaError as error:
            return TestRecord(request.nodeid, "unknown", message=str(error))
    if reason is None:
        tally.checks.setdefault("crash", {"verdict": "pass", "reason": "", "cases": tally.cases})
    else:
        tally.checks["crash"] = {"verdict": "unknown", "reason": f"not isolated: {reason}", "cases": 0}
        tally.notes.append(f"ran in this process, so a crash would have ended it: {reason}")
    searching.publish_statistics(tally.statistics)
    if known is not None and tally.pinned is None:
        found = tally.failure.case if tally.failure is not None else None
        known.update(found, all_ran=found is None or found not in known.cases)
    tally.notes += [elsewhere] if elsewhere else []
    record = record_of(job, tally, elsewhere or "")
    if request.sanitize and request.given is None:
        record = sanitize.sanitized(spec, request, tally, record)
    if request.bench is not None and request.given is None and request.replay is None and record.verdict == "pass":
        record = _benched(job, record, request.bench)
    return replace(record, seconds=round(time.perf_counter() - begun, 3))


def _profiled(spec: FusionSpec, request: Request, file: Path, extra: Mapping[str, Any]) -> TestRecord:
    """Inside a process that ncu watches: the entries of ``bench=``, and no check."""
    from pytest_fusion.bench.profiled import all_entries

    return TestRecord(request.nodeid, "pass", cases=all_entries(spec, file, torch.device(request.device), extra))


def _benched(job: Job, record: TestRecord, asked: BenchRequest) -> TestRecord:
    """What ``bench=`` names, measured behind the green test; a regression fails it."""
    from pytest_fusion.bench.bench_run import bench

    spec, request = job.spec, job.request
    found = bench(
        spec,
        asked,
        nodeid=request.nodeid,
        environment=environment.describe(request.device),
        extra=job.extra,
        isolated=why_not_isolated(request) is None,
    )
    return with_bench(record, found, asked, spec.name)


def with_bench(record: TestRecord, found: Measured, asked: BenchRequest, name: str) -> TestRecord:
    """The record of a green test with what was measured behind it; a regression fails it."""
    from pytest_fusion.bench.measured import told

    record = replace(record, bench=found.as_json() if found.rows or found.notes else {})
    if found.wrong:
        listed = "\n".join(f"  {one}" for one in found.wrong)
        message = f"{name}: bench failed: it is wrong at sizes of bench=, and is not measured there\n{listed}"
        return replace(record, verdict="fail", failed_check="bench", cause=None, message=message)
    # A new baseline accepts what regressed; it is no answer to a limit.
    accepted = asked.update in ("regressed", "all")
    failures = [one for one in found.failures if not accepted or one in found.limits]
    if not failures:
        return record
    listed = "\n".join(f"  {told(one)}" for one in failures)
    only_limits = all(one in found.limits for one in failures)
    accept = "change bench_limits=" if only_limits else "accept it with --fusion-update regressed"
    # Where a baseline is missing, it says by itself how to make one.
    missing = all(getattr(one, "verdict", "") == "missing" for one in failures)
    advice = "" if missing else f"\n  {accept}, or mend the kernel"
    message = f"{name}: bench failed\n{listed}{advice}"
    return replace(record, verdict="fail", failed_check="bench", cause=None, message=message)


def _isolated(job: Job) -> Tally:
    seconds = job.request.profile.seconds
    slow = ""
    preload.inherit(
        gradients=bool(job.spec.grad),
        compiles=job.request.device != "cpu",
        searches=job.request.replay is None and job.request.profile.search > 0,
    )
    with job.compiling_ahead() as start:
        outcome = job.in_child(seconds, on_compilation=start)
    if isinstance(outcome, Crash) and outcome.kind == "timeout" and not crash.hangs(job, outcome):
        slow = f"a case took more than {seconds:g} s but ended when it was given more time"
        outcome = job.in_child(_PATIENCE * seconds)
        outcome = crash.without_shrinking(job, outcome) or outcome
    tally = with_first_call(job, outcome if isinstance(outcome, Tally) else crash.tally_of(job, outcome))
    tally = with_second_opinion(job, tally)
    preload.learn(tally.imported)
    tally.notes += [slow] if slow else []
    return tally


def _must_fit(spec: FusionSpec, case: Case) -> None:
    wrong = misfit(spec, case)
    if wrong is not None:
        raise ReplayError(
            f"{spec.name}: the replay file was written for another spec than today's: {wrong}. Run the test without "
            "--fusion-replay to find its failing case again"
        )


def _with_patience(request: Request) -> Request:
    """A case that a GPU ran in no time may need ten thousands of interpreted programs, and minutes for them."""
    if request.made.get("lane") != "cuda" or request.device != "cpu":
        return request
    profile = request.profile
    more = replace(profile, programs=max(profile.programs, _PROGRAMS), seconds=max(profile.seconds, _SECONDS))
    return replace(request, profile=more)


def why_not_isolated(request: Request) -> str | None:
    """Why the cases of a test run in this process; ``None`` where a child can be forked for them."""
    if request.isolate == "off":
        return "--fusion-isolate off"
    reason = can_fork()
    if reason is not None and request.isolate == "on":
        raise FusionError(
            f"--fusion-isolate on, but this process cannot fork a child: {reason}. Keep CUDA out of module level and "
            "fixtures, or use --fusion-isolate auto"
        )
    return reason


def record_of(job: Job, tally: Tally, elsewhere: str) -> TestRecord:
    """What a tally says of its test; writes the replay file of a failure. ``elsewhere``: found on other versions."""
    spec, request = job.spec, job.request
    checks = _all_checks(spec, tally)
    failure = tally.failure
    record = TestRecord(
        nodeid=request.nodeid,
        verdict="pass" if tally.judged else "unknown",
        cases=tally.cases,
        judged=tally.judged,
        rejected=dict(tally.rejected),
        checks=checks,
        coverage=tally.coverage,
        worst=tally.worst,
        grade=tally.grade,
        off=dict(spec.without),
        phases=tally.phases,
        notes=list(tally.notes),
    )
    if failure is None and tally.empty:
        checks["values"] = {"verdict": "unknown", "reason": tally.empty, "cases": 0}
        said = f"{spec.name}: {tally.empty}; let dims= have sizes of 1 and more"
        return replace(record, verdict="unknown", message=said, checks=checks)
    if failure is None:
        if request.replay is not None and request.cause == "cached-answer":
            record.notes.append(
                "a kept answer may show only after other calls in one process: "
                "run the whole test to see whether it is gone"
            )
        return record
    verdict = failure.verdict
    if verdict.identity == NOTHING_JUDGED and (want := lacking(tally.rejected)) is not None:
        said = f"{spec.name}: no case can be judged {want}: {verdict.evidence['kinds']}"
        checks["error"] = {"verdict": "unknown", "reason": said, "cases": 0}
        return replace(record, verdict="unknown", message=said, checks=checks)
    if verdict.identity == NOTHING_JUDGED and request.replay is not None and request.given is None:
        checks["error"] = {"verdict": "unknown", "reason": verdict.reason, "cases": 0}
        said = f"the case cannot be judged here: {verdict.evidence['kinds']}" + (f" ({elsewhere})" if elsewhere else "")
        return replace(record, message=said, checks=checks)
    diagnosis = failure.explained
    cause = diagnosis.cause
    written = _write_replay(job, failure, cause, pinned=tally.pinned)
    path = written.replay
    entry = {"verdict": "fail", "reason": verdict.reason, "cases": checks.get(verdict.check, {}).get("cases", 0)}
    checks[verdict.check] = {**entry, **verdict.evidence, **({"error_map": failure.map} if failure.map else {})}
    trace = failure.trace if verdict.check in ("error", "crash") else ""
    described = failure.described if request.given is None else dict(request.given)
    found = f"found in case {tally.cases}, shrunk in {plural(failure.shrink_runs, 'run')}"
    if failure.case in request.known and not failure.shrink_runs:
        found = "failed in an earlier run too, and was tried first"
    if tally.pinned is not None:
        found = _of_pinned(tally.pinned, request)
    searched = failure.case is not None and request.replay is None
    message = compose(
        spec.name,
        verdict,
        described,
        diagnosis=diagnosis if verdict.identity != NOTHING_JUDGED else None,
        where=failure.map["where"] if failure.map else None,
        drawn=drawing(failure.map) if failure.map else (),
        command=replay_command(request.shown or request.nodeid, path) if path else written.unwritten,
        script=written.said,
        trace=trace.rstrip(),
        found_after=found if searched else elsewhere,
    )
    return replace(
        record,
        verdict="fail",
        failed_check=verdict.check,
        cause=cause,
        # That of the cases before it would praise a kernel that is wrong.
        grade="C" if verdict.check == "values" else None,
        diagnosis=diagnosis.as_json(),
        case=described,
        replay=path,
        script=written.script,
        checks=checks,
        message=message,
    )


def _of_pinned(path: str, request: Request) -> str:
    """What a failure of the pinned case in that file says."""
    if any(pin.path == path and pin.recorded for pin in request.pinned):
        return f"a recorded call fails, pinned in {path}"
    return f"pinned replay {path} fails again: a bug that was mended is back"


def _all_checks(spec: FusionSpec, tally: Tally) -> dict[str, dict[str, Any]]:
    """Every check by name: what was seen, what was switched off, what this version cannot do."""
    found: dict[str, dict[str, Any]] = {}
    for name in CHECKS:
        if name in spec.without:
            found[name] = {"verdict": "unknown", "reason": f"switched off: {spec.without[name]}", "cases": 0}
        elif name in tally.checks:
            found[name] = tally.checks[name]
        else:
            ended = tally.failure is not None or not tally.judged
            reason = "not reached: an earlier failure ended the run" if ended else "no case had what it is asked of"
            found[name] = {"verdict": "unknown", "reason": reason, "cases": 0}
    return found


@dataclass(frozen=True, slots=True)
class _Written:
    """Paths of what was written for a failure, as seen from pytest's own folder.

    ``said`` is told of the script, ``unwritten`` says why there is no replay file.
    """

    replay: str | None = None
    script: str | None = None
    said: str = ""
    unwritten: str | None = None


def _write_replay(job: Job, failure: Failure, cause: str | None, *, pinned: str | None) -> _Written:
    """The replay file, unless the case comes from one that is pinned, and the stand-alone script."""
    request = job.request
    if failure.case is None or request.given is not None:
        return _Written()
    made = replays.made_here(environment.describe(request.device))
    replay = replays.Replay(request.nodeid, job.spec.name, failure.verdict.check, cause, failure.case, made)
    try:
        path = None if pinned else os.path.relpath(replays.write(replay, request.root), request.start)
        file = replays.folder(request.root) / Path(replays.file_name(replay)).with_suffix(".py")
        shown = os.path.relpath(file, request.start)
        script = _script(job, replay, failure.verdict, shown)
        if isinstance(script, str):
            return _Written(pinned or path, None, f"none could be written: {script}")
        replace_whole(file.with_suffix(".pt"), script.saved)
        replace_whole(file, script.text.encode())
    except OSError as error:  # a read-only checkout must not hide the failure itself
        return _Written(
            pinned, unwritten=f"none could be written ({first_line(error)}); run the test again for this case"
        )
    lacks = "; ".join(f"{what}: {why}" for what, why in script.missing.items())
    return _Written(pinned or path, shown, f"python {shlex.quote(shown)}{f' (not complete, {lacks})' if lacks else ''}")


def _script(job: Job, replay: replays.Replay, verdict: Verdict, shown: str) -> scripts.Script | str:
    """The script, or why there is none. Makes the inputs again, in a child where there was one."""
    request = job.request

    def work(_: Channel | None) -> scripts.Script:
        device = torch.device(request.device)
        return scripts.compose(
            job.spec, replay, verdict, device=device, extra=job.extra, root=request.root, shown=shown
        )

    if why_not_isolated(request) is None:
        outcome = run_isolated(work, time_limit_s=_SECONDS, forward=False)
        if isinstance(outcome, Crash):
            return f"making the inputs again ended the process ({outcome.detail})"
        return f"{outcome.type_name}: {outcome.message}" if isinstance(outcome, ChildError) else outcome
    try:
        return work(None)
    except (FusionError, InputFailed, ImpossibleCase, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def failure_of(record: TestRecord) -> FusionFailure:
    """The exception that a failing record stands for."""
    return FusionFailure(
        record.message,
        check=record.failed_check or "",
        case=record.case,
        cause=record.cause,
        replay=record.replay,
    )
