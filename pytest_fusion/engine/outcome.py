"""From the tally of a job to the record of its test: verdict, checks, the failure's message and files, its bench."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_fusion.bench.bench_request import BenchRequest
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import ImpossibleCase, InputFailed
from pytest_fusion.checks import registry
from pytest_fusion.checks.verdict import Verdict
from pytest_fusion.diagnosis.diagnose import UNEXPLAINED
from pytest_fusion.diagnosis.repro import replay_file as replays
from pytest_fusion.diagnosis.repro import script as scripts
from pytest_fusion.diagnosis.text.message import also_found, compose, larger_case, place, replay_command
from pytest_fusion.engine.isolated import why_not_isolated
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.tally import Failure, Tally
from pytest_fusion.engine.unjudged import NOTHING_JUDGED, lacking
from pytest_fusion.errors import FusionError, FusionFailure
from pytest_fusion.report import environment
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.process.atomic_file import replace_whole
from pytest_fusion.run.process.fork import Channel, ChildError, Crash, run_isolated
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import first_line, plural

if TYPE_CHECKING:
    from pytest_fusion.bench.measured import Measured

_CACHED_ANSWER = (
    "a cached answer may show only after other calls in one process: run the whole test to see whether it is gone"
)


def record_of(job: Job, tally: Tally, *, elsewhere: str = "", cause: str | None = None) -> TestRecord:
    """The record of a test; writes a failure's files. Of a replay: ``elsewhere``, where it failed; ``cause``, why."""
    record = _without_failure(job, tally)
    strict = job.request.strict if job.spec.strict is None else job.spec.strict
    found = tally.findings
    failing = [one for one in found if (one.verdict.failed or strict) and one.code not in job.spec.allow]
    record = replace(record, checks=_accepted(record.checks, found, failing))
    if not failing:
        record = replace(record, findings=_findings(job, tally, found))
        if tally.empty:
            message = f"{job.spec.name}: {tally.empty}; let dims= have sizes of 1 and more"
            return _unknown(record, "values", tally.empty, message)
        if job.only is not None and cause == "cached-answer":
            record.notes.append(_CACHED_ANSWER)
        return record
    failure = failing[0]
    if failure.verdict.identity == NOTHING_JUDGED:
        kinds = failure.verdict.facts["kinds"]
        if (want := lacking(tally.rejected)) is not None:
            message = f"{job.spec.name}: no case can be judged {want}: {kinds}"
            return _unknown(record, "error", message, message)
        if job.only is not None and job.given is None:
            message = f"the case cannot be judged here: {kinds}" + (f" ({elsewhere})" if elsewhere else "")
            return _unknown(record, "error", failure.verdict.reason, message)
    return _with_failure(job, tally, failure, [one for one in found if one is not failure], record, elsewhere)


def _accepted(
    checks: dict[str, dict[str, Any]], found: Sequence[Failure], failing: Sequence[Failure]
) -> dict[str, dict[str, Any]]:
    """The checks: one with accepted findings alone passes, one with a hazard that fails the test fails."""
    changed = dict(checks)
    for verdict in {one.verdict.check: one.verdict for one in reversed(found)}.values():
        fails = any(one.verdict.check == verdict.check for one in failing)
        if verdict.check in changed and (fails or changed[verdict.check]["verdict"] == "fail"):
            changed[verdict.check] = {**changed[verdict.check], "verdict": "fail" if fails else "pass"}
    return changed


def _findings(job: Job, tally: Tally, found: Sequence[Failure]) -> list[dict[str, Any]]:
    """Findings as the report has them, each with a replay file of its own."""
    return [_finding(job, one, write_replay(job, one, one.code, pinned=tally.pinned).replay) for one in found]


def _finding(job: Job, failure: Failure, replay: str | None) -> dict[str, Any]:
    """A finding as the report has it."""
    verdict, code = failure.verdict, failure.code
    return {
        "code": code,
        "check": verdict.check,
        "level": "wrong" if verdict.failed else "hazard",
        "message": verdict.reason,
        "case": failure.described if job.given is None else dict(job.given),
        "replay": replay,
        "accept": f'allow={{"{code}": "why"}}' if code != UNEXPLAINED else None,
        "allowed": job.spec.allow.get(code),
    }


def _without_failure(job: Job, tally: Tally) -> TestRecord:
    """The record of a tally without its failure."""
    return TestRecord(
        nodeid=job.request.nodeid,
        verdict="pass" if tally.judged else "unknown",
        cases=tally.cases,
        judged=tally.judged,
        rejected=dict(tally.rejected),
        checks=_all_checks(job.spec, tally),
        coverage=tally.coverage,
        worst=tally.worst,
        grade=tally.grade,
        off=dict(job.spec.without),
        phases=tally.phases,
        notes=list(tally.notes),
    )


def _unknown(record: TestRecord, check: str, reason: str, message: str) -> TestRecord:
    """The record of a test that could not be judged, for the reason that ``check`` has."""
    checks = {**record.checks, check: {"verdict": "unknown", "reason": reason, "cases": 0}}
    return replace(record, verdict="unknown", message=message, checks=checks)


def _with_failure(
    job: Job, tally: Tally, failure: Failure, others: Sequence[Failure], record: TestRecord, elsewhere: str
) -> TestRecord:
    verdict, diagnosis = failure.verdict, failure.explained
    written = write_artefacts(job, failure, diagnosis.cause, pinned=tally.pinned)
    path = written.replay
    described = failure.described if job.given is None else dict(job.given)
    searched = failure.case is not None and job.only is None
    message = compose(
        job.spec.name,
        verdict,
        described,
        diagnosis=diagnosis if verdict.identity != NOTHING_JUDGED else None,
        where=place(failure.map),
        larger=larger_case(*failure.larger) if failure.larger else (),
        command=replay_command(job.request.shown or job.request.nodeid, path) if path else written.unwritten,
        script=written.script_line,
        trace=failure.trace.rstrip() if verdict.check in ("error", "crash") else "",
        found_after=_found(job, tally, failure) if searched else elsewhere,
    )
    findings = [_finding(job, failure, path), *_findings(job, tally, others)]
    message = "\n".join([message, *also_found(findings[1:], tally.behind)])
    count = record.checks.get(verdict.check, {}).get("cases", 0)
    entry = {"verdict": "fail", "reason": verdict.reason, "cases": count, **verdict.facts}
    if failure.map:
        entry["error_map"] = failure.map
    return replace(
        record,
        verdict="fail",
        failed_check=verdict.check,
        cause=diagnosis.cause,
        # The grade of the cases before would praise a wrong kernel.
        grade={"fail": "D", "hazard": "C"}[verdict.status] if verdict.check == "values" else None,
        diagnosis=diagnosis.as_json(),
        case=described,
        replay=path,
        script=written.script,
        checks={**record.checks, verdict.check: entry},
        message=message,
        findings=findings,
    )


def _found(job: Job, tally: Tally, failure: Failure) -> str:
    """Where the failing case comes from."""
    if tally.pinned is not None:
        pin = next((pin for pin in job.request.pinned if pin.path == tally.pinned), None)
        if pin is not None and pin.recorded:
            return f"a recorded call fails, pinned in {tally.pinned}"
        if pin is not None and pin.check not in ("", failure.verdict.check):
            return f"pinned replay {tally.pinned} fails another check than the one it was pinned for, {pin.check}"
        return f"pinned replay {tally.pinned} fails again: a bug that was fixed is back"
    if failure.case in job.known:
        return "failed in an earlier run too, and was tried first"
    more = f"; {tally.more_s:.1f} s more for other findings (--fusion-first skips that)" if tally.more_s >= 0.1 else ""
    return f"found in case {failure.position or tally.cases}, shrunk in {plural(failure.shrink_runs, 'run')}{more}"


def _all_checks(spec: FusionSpec, tally: Tally) -> dict[str, dict[str, Any]]:
    """Every check by name: what was seen, what was switched off, what this version cannot do."""
    ended = tally.failure is not None or not tally.judged
    unmet = "not reached: an earlier failure ended the run" if ended else "no case met the conditions of this check"
    if not ended and (seconds := tally.coverage.get("seconds")):
        unmet = f"not reached within the budget of {seconds:g} s"
    found = {name: {"verdict": "unknown", "reason": unmet, "cases": 0} for name in registry.names()}
    found |= {name: entry for name, entry in tally.checks.items() if name in found}
    for name in found.keys() & spec.without:
        found[name] = {"verdict": "unknown", "reason": f"switched off: {spec.without[name]}", "cases": 0}
    return found


def failure_of(record: TestRecord) -> FusionFailure:
    """The exception that a failing record stands for."""
    return FusionFailure(
        record.message,
        check=record.failed_check or "",
        case=record.case,
        cause=record.cause,
        replay=record.replay,
    )


# The script makes the inputs again, and an interpreted reference may take minutes.
_SCRIPT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Written:
    """Paths of a failure's files, relative to pytest's start folder; ``unwritten`` is why there is no replay file."""

    replay: str | None = None
    script: str | None = None
    script_line: str = ""
    unwritten: str | None = None


def write_artefacts(job: Job, failure: Failure, cause: str | None, *, pinned: str | None) -> Written:
    """Write the stand-alone script and, unless the case comes from a pinned one, the replay file."""
    request = job.request
    written = write_replay(job, failure, cause, pinned=pinned)
    if failure.case is None or written.replay is None:
        return written
    path, replay = written.replay, _replay(job, failure, failure.case, cause)
    try:
        file = replays.folder(request.root) / Path(replays.file_name(replay)).with_suffix(".py")
        shown = os.path.relpath(file, request.start)
        script = _script(job, replay, failure.verdict, shown)
        if isinstance(script, str):
            return Written(path, None, f"none could be written: {script}")
        replace_whole(file.with_suffix(".pt"), script.saved)
        replace_whole(file, script.text.encode())
    except OSError as error:
        return Written(path, None, f"none could be written: {first_line(error)}")
    lacks = "; ".join(f"{what}: {why}" for what, why in script.missing.items())
    return Written(path, shown, f"python {shlex.quote(shown)}{f' (not complete, {lacks})' if lacks else ''}")


def write_replay(job: Job, failure: Failure, cause: str | None, *, pinned: str | None) -> Written:
    """Write the replay file of one finding; ``pinned`` is the file that its case comes from."""
    request = job.request
    if failure.case is None or job.given is not None or pinned:
        return Written(pinned if failure.case is not None and job.given is None else None)
    try:
        path = replays.write(_replay(job, failure, failure.case, cause), request.root)
    except OSError as error:  # a read-only checkout must not hide the failure itself
        return Written(unwritten=f"none could be written ({first_line(error)}); run the test again for this case")
    return Written(os.path.relpath(path, request.start))


def _replay(job: Job, failure: Failure, case: Case, cause: str | None) -> replays.Replay:
    made = replays.made_here(environment.describe(job.request.device))
    return replays.Replay(job.request.nodeid, job.spec.name, failure.verdict.check, cause, case, made)


def _script(job: Job, replay: replays.Replay, verdict: Verdict, shown: str) -> scripts.Script | str:
    """The script, or why there is none. Makes the inputs again, in a child where the test had one."""
    request = job.request

    def work(_: Channel | None) -> scripts.Script:
        device = torch.device(request.device)
        return scripts.compose(
            job.spec, replay, verdict, device=device, extra=job.extra, root=request.root, shown=shown
        )

    if why_not_isolated(request) is None:
        outcome = run_isolated(work, time_limit_s=_SCRIPT_SECONDS, forward=False)
        if isinstance(outcome, Crash):
            return f"making the inputs again ended the process ({outcome.detail})"
        return f"{outcome.type_name}: {outcome.message}" if isinstance(outcome, ChildError) else outcome
    try:
        return work(None)
    except (FusionError, InputFailed, ImpossibleCase, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def benched(job: Job, record: TestRecord, wanted: BenchRequest) -> TestRecord:
    """The record of a green test with what ``bench=`` names, measured; a regression fails it."""
    from pytest_fusion.bench.bench_run import bench

    request = job.request
    found = bench(
        job.spec,
        wanted,
        nodeid=request.nodeid,
        environment=environment.describe(request.device),
        extra=job.extra,
        isolated=why_not_isolated(request) is None,
    )
    return with_bench(record, found, wanted, job.spec.name)


def with_bench(record: TestRecord, found: Measured, wanted: BenchRequest, name: str) -> TestRecord:
    """The record of a green test with what was measured behind it; a regression fails it."""
    from pytest_fusion.bench.measured import failure_line

    # A new baseline accepts a regression, but not a broken limit.
    accepted = wanted.update in ("regressed", "all")
    record = replace(record, bench=found.as_json(accepted=accepted) if found.rows or found.notes else {})
    if found.wrong:
        return _failed(record, name, found.wrong, why=": it is wrong at sizes of bench=, and is not measured there")
    if found.refused:
        return _failed(record, name, found.refused, why=": it does not compile", cause="does-not-compile")
    failures = [one for one in found.failures if not accepted or one in found.limits]
    if not failures:
        return record
    only_limits = all(one in found.limits for one in failures)
    accept = "change bench_limits=" if only_limits else "accept it with --fusion-update regressed"
    # The message of a missing baseline says how to make one.
    missing = all(getattr(one, "verdict", "") == "missing" for one in failures)
    advice = "" if missing else f"\n  {accept}, or fix the kernel"
    return _failed(record, name, [failure_line(one) for one in failures], advice=advice)


def _failed(
    record: TestRecord, name: str, lines: Sequence[str], *, why: str = "", advice: str = "", cause: str | None = None
) -> TestRecord:
    message = "\n".join([f"{name}: bench failed{why}", *(f"  {line}" for line in lines)]) + advice
    checks = {**record.checks, "bench": {"verdict": "fail", "reason": "; ".join(lines), "cases": len(lines)}}
    return replace(record, verdict="fail", failed_check="bench", cause=cause, message=message, checks=checks)
