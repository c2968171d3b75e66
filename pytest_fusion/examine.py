"""One test from spec to record: in a forked child where that is possible, so that a crash is a finding and not the end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pytest_fusion.campaign import Campaign, Failure, Tally
from pytest_fusion.case import search as searching
from pytest_fusion.case.describe import describe
from pytest_fusion.case.model import Case
from pytest_fusion.case.plan import Limits, make_plan
from pytest_fusion.diagnosis import replay as replays
from pytest_fusion.diagnosis.causes import likely_cause
from pytest_fusion.diagnosis.message import compose, replay_command
from pytest_fusion.diagnosis.shrink import Shrinker
from pytest_fusion.errors import FusionFailure
from pytest_fusion.profiles import PROFILES, Profile
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.isolate import Channel, Crash, can_fork, run_isolated, unwrap
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.verdict.model import CHECKS, Verdict, failed

# Shrinking a crash forks once a case, and a hang waits out its limit each time.
_CRASH_RUNS = 60
_HANG_RUNS = 6
_HANG_SECONDS = 3.0

_NOT_BUILT = {
    "invariance": "batch invariance is not checked by this version",
    "gradients": "gradients are not checked by this version",
    "configs": "autotune configs are not checked one by one by this version; the interpreter lane ran the first",
    "launches": "launch counts are not checked by this version",
    "compile": "torch.compile, opcheck and CUDA-graph capture are not checked by this version",
    "device": "streams and second devices are not checked by this version",
    "honesty": "timer patches and cached answers beyond `repeat` are not checked by this version",
}


@dataclass(frozen=True, slots=True)
class Request:
    """How a test is to be run; resolved from options by the plugin."""

    nodeid: str
    device: str = "cpu"
    profile: Profile = field(default_factory=lambda: PROFILES["dev"])
    isolate: str = "auto"
    root: Path = field(default_factory=Path.cwd)
    seed: int | None = None
    max_cases: int | None = None
    replay: Case | None = None


def run(spec: FusionSpec, request: Request, *, outer: Any, extra: Mapping[str, Any]) -> TestRecord:
    """Judge a spec and tell what came of it. Errors of the spec itself are raised; failures are in the record."""
    begun = time.perf_counter()

    def campaign(note: Any) -> Tally:
        work = Campaign(
            spec,
            device=torch.device(request.device),
            profile=request.profile,
            outer=outer,
            nodeid=request.nodeid,
            extra=extra,
            seed=request.seed,
            max_cases=request.max_cases,
            note=note,
        )
        return work.run() if request.replay is None else work.replay(request.replay)

    reason = _why_not_isolated(request)
    notes: list[str] = []
    if reason is None:
        outcome = unwrap(run_isolated(lambda channel: campaign(channel.note), time_limit_s=request.profile.seconds))
        tally = outcome if isinstance(outcome, Tally) else _crashed(spec, request, outcome, extra, outer)
        crash_check: dict[str, Any] = {"verdict": "pass", "reason": "", "cases": tally.cases}
    else:
        tally = campaign(lambda _: None)
        crash_check = {"verdict": "unknown", "reason": f"not isolated: {reason}", "cases": 0}
        notes.append(f"ran in this process, so a crash would have ended it: {reason}")
    searching.publish_statistics(tally.statistics)
    tally.checks.setdefault("crash", crash_check)
    tally.notes.extend(notes)
    return replace(_record(spec, request, tally), seconds=round(time.perf_counter() - begun, 3))


def _why_not_isolated(request: Request) -> str | None:
    if request.isolate == "off":
        return "--fusion-isolate off"
    reason = can_fork()
    if reason is not None and request.isolate == "on":
        raise RuntimeError(f"--fusion-isolate on, but a child cannot be forked: {reason}")
    return reason


def _crashed(spec: FusionSpec, request: Request, crash: Crash, extra: Mapping[str, Any], outer: Any) -> Tally:
    """A crash as a failure, on the smallest case that still crashes the same way, each tried in a child of its own."""
    note = crash.last_note or {}
    tally = Tally(cases=int(note.get("cases", 0)))
    if "case" not in note:
        verdict = _crash_verdict(crash)
        tally.checks["crash"] = {"verdict": "fail", "reason": verdict.reason, "cases": 0}
        tally.failure = Failure(verdict, None, trace=crash.stderr_tail)
        return tally
    last = [crash]

    def dies(case: Case) -> bool:
        alone = replace(request, replay=case, isolate="on")
        seconds = min(request.profile.seconds, _HANG_SECONDS) if crash.kind == "timeout" else request.profile.seconds

        def work(channel: Channel) -> bool:
            Campaign(
                spec,
                device=torch.device(alone.device),
                profile=alone.profile,
                outer=outer,
                nodeid=alone.nodeid,
                extra=extra,
                seed=alone.seed,
                note=channel.note,
            ).replay(case)
            return True

        outcome = run_isolated(work, time_limit_s=seconds)
        if not isinstance(outcome, Crash) or outcome.kind != crash.kind:
            return False
        last[0] = outcome
        return True

    found = Case.from_json(note["case"])
    plan = make_plan(
        spec,
        pools=searching.pools(spec, 0),
        limits=Limits(request.profile.elements, request.profile.work, request.profile.programs),
    )
    runs = _HANG_RUNS if crash.kind == "timeout" else _CRASH_RUNS
    smallest, shrink_runs = found, 0
    if request.replay is None and dies(found):
        shrinker = Shrinker(plan, found, dies, max_runs=runs)
        smallest, shrink_runs = shrinker.run(), shrinker.runs
    verdict = _crash_verdict(last[0])
    tally.checks["crash"] = {"verdict": "fail", "reason": verdict.reason, "cases": tally.cases}
    tally.failure = Failure(
        verdict, smallest, describe(spec, smallest), trace=last[0].stderr_tail, shrink_runs=shrink_runs
    )
    return tally


def _crash_verdict(crash: Crash) -> Verdict:
    if crash.kind == "timeout":
        reason = f"the case did not end within its time limit ({crash.detail})"
    else:
        reason = f"the process running the case died ({crash.detail}), most often an access far outside a tensor"
    return failed("crash", reason, identity=f"crash:{crash.kind}", kind=crash.kind, detail=crash.detail)


def _record(spec: FusionSpec, request: Request, tally: Tally) -> TestRecord:
    checks = _all_checks(spec, tally)
    failure = tally.failure
    record = TestRecord(
        nodeid=request.nodeid,
        verdict="pass" if tally.judged else "unknown",
        cases=tally.cases,
        rejected=dict(tally.rejected),
        checks=checks,
        coverage=tally.coverage,
        worst=tally.worst,
        grade=tally.grade,
        off=dict(spec.without),
        phases=tally.phases,
        notes=list(tally.notes),
    )
    if failure is None:
        return record
    verdict = failure.verdict
    cause = likely_cause(verdict, failure.case)
    path = _write_replay(spec, request, failure, cause)
    entry = {"verdict": "fail", "reason": verdict.reason, "cases": checks.get(verdict.check, {}).get("cases", 0)}
    checks[verdict.check] = {**entry, **verdict.evidence, **({"error_map": failure.map} if failure.map else {})}
    trace = failure.trace if verdict.check in ("error", "crash") else ""
    message = compose(
        spec.name,
        verdict,
        failure.described,
        cause=cause,
        where=failure.map["where"] if failure.map else None,
        command=replay_command(request.nodeid, path) if path else None,
        trace="\n".join(trace.rstrip().splitlines()[-14:]),
        found_after=f"found after {tally.cases} case(s), shrunk in {failure.shrink_runs} run(s)" if failure.case else "",
    )
    return replace(
        record,
        verdict="fail",
        failed_check=verdict.check,
        cause=cause,
        case=failure.described,
        replay=path,
        checks=checks,
        message=message,
    )


def _all_checks(spec: FusionSpec, tally: Tally) -> dict[str, dict[str, Any]]:
    """Every check by name: what was seen, what was switched off, what this version cannot do."""
    found: dict[str, dict[str, Any]] = {}
    for name in CHECKS:
        if name in spec.without:
            found[name] = {"verdict": "unknown", "reason": f"switched off: {spec.without[name]}", "cases": 0}
        elif name in tally.checks:
            found[name] = tally.checks[name]
        else:
            reason = _NOT_BUILT.get(name, "not reached: an earlier failure ended the run")
            found[name] = {"verdict": "unknown", "reason": reason, "cases": 0}
    return found


def _write_replay(spec: FusionSpec, request: Request, failure: Failure, cause: str | None) -> str | None:
    if failure.case is None:
        return None
    replay = replays.Replay(request.nodeid, spec.name, failure.verdict.check, cause, failure.case)
    try:
        path = replays.write(replay, request.root)
    except OSError:
        return None  # a read-only checkout must not hide the failure itself
    return os.path.relpath(path, request.root)


def failure_of(record: TestRecord) -> FusionFailure:
    """The exception that a failing record stands for."""
    return FusionFailure(
        record.message,
        check=record.failed_check or "",
        case=record.case,
        cause=record.cause,
        replay=record.replay,
    )
