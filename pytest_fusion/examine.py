"""One test from spec to record, in a forked child where that is possible: a crash is a finding and not the end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pytest_fusion.campaign import Campaign, Failure, Tally
from pytest_fusion.case import search as searching
from pytest_fusion.case.describe import describe
from pytest_fusion.case.known import Known
from pytest_fusion.case.misfit import misfit
from pytest_fusion.case.model import Case
from pytest_fusion.case.plan import Limits, make_plan
from pytest_fusion.diagnosis import replay as replays
from pytest_fusion.diagnosis.causes import likely_cause
from pytest_fusion.diagnosis.message import compose, replay_command
from pytest_fusion.diagnosis.shrink import Shrinker
from pytest_fusion.diagnosis.stack import last_words
from pytest_fusion.errors import FusionError, FusionFailure, ReplayError, UnsupportedTritonError
from pytest_fusion.prefetch import cache_is_empty, compiling_ahead
from pytest_fusion.profiles import PROFILES, Profile
from pytest_fusion.report.phrases import plural
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run import interpreter, preload
from pytest_fusion.run.compiled import on_first_compilation
from pytest_fusion.run.fused import ContextLost
from pytest_fusion.run.isolate import Channel, Crash, can_fork, run_isolated, unwrap
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.verdict.model import CHECKS, Verdict, failed

# Shrinking a crash forks once a case, and a hang waits out its limit each time.
_CRASH_RUNS = 60
_HANG_RUNS = 4
_HANG_SECONDS = 4.0
# How much longer a case may take after the first that was only slow.
_PATIENCE = 10

_NOT_BUILT = {
    "invariance": "batch invariance is not checked by this version",
    "gradients": "gradients are not checked by this version",
    "configs": "autotune configs are not checked one by one by this version; the interpreter lane ran the first",
    "launches": "launch counts are not checked by this version",
    "compile": "torch.compile, opcheck and CUDA-graph capture are not checked by this version",
    "device": "streams and second devices are not checked by this version",
    "honesty": "timer patches and cached answers beyond `repeat` are not checked by this version",
}

# Seen in the traceback of a kernel that is compiled or sent to a driver, which no interpreted one is.
_COMPILED = ("/triton/compiler/", "active drivers")
_TOO_EARLY = (
    "Triton set out to compile this kernel for a GPU: the kernel was made before the CPU lane switched the interpreter "
    "on, by a script, a plugin or sitecustomize. Set TRITON_INTERPRET=1 in the environment, or import it later"
)


@dataclass(frozen=True, slots=True)
class Request:
    """How a test is to be run; resolved from options by the plugin.

    Replay files go below ``root``; commands name them, and the test by ``shown``, as seen from ``start``, the folder
    that pytest was started in. ``given`` describes the caller's own arguments where there is nothing to generate.
    """

    nodeid: str
    device: str = "cpu"
    profile: Profile = field(default_factory=lambda: PROFILES["dev"])
    isolate: str = "auto"
    root: Path = field(default_factory=Path.cwd)
    start: Path = field(default_factory=Path.cwd)
    seed: int | None = None
    max_cases: int | None = None
    replay: Case | None = None
    known: tuple[Case, ...] = ()
    shown: str = ""
    given: Mapping[str, Any] | None = None


def run(spec: FusionSpec, request: Request, *, outer: Any, extra: Mapping[str, Any]) -> TestRecord:
    """Judge a spec and tell what came of it. Errors of the spec itself are raised; failures are in the record."""
    begun = time.perf_counter()
    known = None
    if request.replay is None and request.seed is None:
        known = Known(spec, outer, request.nodeid)
        request = replace(request, known=known.cases)
    elif request.replay is not None and request.given is None:
        _must_fit(spec, request.replay)
    reason = _why_not_isolated(request)
    notes: list[str] = []
    if reason is None:
        preload.inherit()
        with _compiling_ahead(spec, request, outer, extra) as start:
            outcome = _in_child(spec, request, outer, extra, request.profile.seconds, on_compilation=start)
        if isinstance(outcome, Crash) and outcome.kind == "timeout" and not _hangs(spec, request, outcome, extra, outer):
            notes.append(f"a case took more than {request.profile.seconds:g} s but ended when it was given more time")
            outcome = _in_child(spec, request, outer, extra, request.profile.seconds * _PATIENCE)
        tally = outcome if isinstance(outcome, Tally) else _crashed(spec, request, outcome, extra, outer)
        preload.learn(tally.imported)
        crash_check: dict[str, Any] = {"verdict": "pass", "reason": "", "cases": tally.cases}
    else:
        tally = _campaign(spec, request, outer, extra, lambda _: None)
        crash_check = {"verdict": "unknown", "reason": f"not isolated: {reason}", "cases": 0}
        notes.append(f"ran in this process, so a crash would have ended it: {reason}")
    searching.publish_statistics(tally.statistics)
    tally.checks.setdefault("crash", crash_check)
    tally.notes.extend(notes)
    if known is not None:
        found = tally.failure.case if tally.failure is not None else None
        known.update(found, all_ran=found is None or found not in known.cases)
    return replace(_record(spec, request, tally), seconds=round(time.perf_counter() - begun, 3))


def _make_campaign(
    spec: FusionSpec,
    request: Request,
    outer: Any,
    extra: Mapping[str, Any],
    note: Callable[[dict[str, Any]], None],
    *,
    dry: bool = False,
) -> Campaign:
    return Campaign(
        spec,
        device=torch.device(request.device),
        profile=request.profile,
        outer=outer,
        nodeid=request.nodeid,
        extra=extra,
        seed=request.seed,
        max_cases=request.max_cases,
        note=note,
        dry=dry,
    )


def _campaign(
    spec: FusionSpec, request: Request, outer: Any, extra: Mapping[str, Any], note: Callable[[dict[str, Any]], None]
) -> Tally:
    tally = _all_cases(spec, request, outer, extra, note)
    if request.device != "cpu":
        return tally
    problem = interpreter.problem()
    failure = tally.failure
    if failure is not None and failure.verdict.check == "error":
        # No kernel could be launched, which is not the kernel's fault.
        if problem is not None and not interpreter.installed():
            raise UnsupportedTritonError(problem)
        if any(part in failure.trace for part in _COMPILED):
            raise UnsupportedTritonError(_TOO_EARLY)
    if problem is not None:
        tally.notes.append(problem)
    return tally


def _all_cases(
    spec: FusionSpec, request: Request, outer: Any, extra: Mapping[str, Any], note: Callable[[dict[str, Any]], None]
) -> Tally:
    """The one case asked for, else the failures of earlier runs and then all phases."""
    if request.replay is not None:
        return _make_campaign(spec, request, outer, extra, note).replay(request.replay)
    for case in request.known:
        tally = _make_campaign(spec, request, outer, extra, note).replay(case)
        if tally.failure is not None and tally.failure.case is not None:
            tally.notes.append("this case failed in an earlier run and was tried first")
            return tally
    return _make_campaign(spec, request, outer, extra, note).run()


def _must_fit(spec: FusionSpec, case: Case) -> None:
    wrong = misfit(spec, case)
    if wrong is not None:
        raise ReplayError(
            f"{spec.name}: the replay file was written for another spec than today's: {wrong}. Run the test without "
            "--fusion-replay to find its failing case again"
        )


@contextlib.contextmanager
def _compiling_ahead(
    spec: FusionSpec, request: Request, outer: Any, extra: Mapping[str, Any]
) -> Iterator[Callable[[], None] | None]:
    """On a GPU, fill Triton's compile cache beside the test."""
    if request.device == "cpu" or request.replay is not None or "triton" not in sys.modules:
        yield None
        return

    def work(worker: int, workers: int) -> None:
        _make_campaign(spec, request, outer, extra, lambda _: None, dry=True).compile_share(worker, workers)

    with compiling_ahead(work) as start:
        if cache_is_empty():
            start()
        yield start


def _in_child(
    spec: FusionSpec,
    request: Request,
    outer: Any,
    extra: Mapping[str, Any],
    seconds: float,
    *,
    forward: bool = True,
    on_compilation: Callable[[], None] | None = None,
) -> Tally | Crash:
    """The campaign in a child of its own; a lost CUDA context ends the child as a crash would.

    ``forward=False`` drops what the child prints. ``on_compilation`` is called when the compile cache proves cold.
    """

    def work(channel: Channel) -> Tally | Crash:
        last: dict[str, Any] = {}

        def note(data: dict[str, Any]) -> None:
            last.clear()
            last.update(data)
            channel.note(data)

        listening = on_first_compilation(on_compilation) if on_compilation else contextlib.nullcontext()
        try:
            with listening:
                return _campaign(spec, request, outer, extra, note)
        except ContextLost as lost:
            return Crash("exit", str(lost), dict(last), "")

    return unwrap(run_isolated(work, time_limit_s=seconds, forward=forward))


def _why_not_isolated(request: Request) -> str | None:
    if request.isolate == "off":
        return "--fusion-isolate off"
    reason = can_fork()
    if reason is not None and request.isolate == "on":
        raise FusionError(
            f"--fusion-isolate on, but this process cannot fork a child: {reason}. Keep CUDA out of module level and "
            "fixtures, or use --fusion-isolate auto"
        )
    return reason


def _hangs(spec: FusionSpec, request: Request, crash: Crash, extra: Mapping[str, Any], outer: Any) -> bool:
    """Whether the case that ran out of time does so again alone, with twice as much: a loaded machine is not a hang."""
    case = _case_of(crash.last_note or {})
    if case is None or request.replay is not None:
        return True
    alone = replace(request, replay=case, isolate="on")
    outcome = _in_child(spec, alone, outer, extra, 2 * request.profile.seconds, forward=False)
    return isinstance(outcome, Crash) and outcome.kind == "timeout"


def _crashed(spec: FusionSpec, request: Request, crash: Crash, extra: Mapping[str, Any], outer: Any) -> Tally:
    """A crash as a failure, on the smallest case that still crashes the same way, each tried in a child of its own."""
    note = crash.last_note or {}
    tally = Tally(cases=int(note.get("cases", 0)))
    found = _case_of(note)
    if found is None:
        verdict = _crash_verdict(crash)
        tally.checks["crash"] = {"verdict": "fail", "reason": verdict.reason, "cases": 0}
        tally.failure = Failure(verdict, None, trace=last_words(crash.stderr_tail))
        return tally
    last = [crash]

    def dies(case: Case) -> bool:
        alone = replace(request, replay=case, isolate="on")
        seconds = min(request.profile.seconds, _HANG_SECONDS) if crash.kind == "timeout" else request.profile.seconds

        outcome = _in_child(spec, alone, outer, extra, seconds, forward=False)
        if not isinstance(outcome, Crash) or outcome.kind != crash.kind:
            return False
        last[0] = outcome
        return True

    plan = make_plan(
        spec,
        pools=searching.pools(spec, 0),
        limits=Limits(request.profile.elements, request.profile.work, request.profile.programs),
    )
    runs = _HANG_RUNS if crash.kind == "timeout" else _CRASH_RUNS
    smallest, shrink_runs = found, 0
    if request.replay is None and (crash.kind == "timeout" or dies(found)):
        shrinker = Shrinker(plan, found, dies, max_runs=runs)
        smallest, shrink_runs = shrinker.run(), shrinker.runs
    verdict = _crash_verdict(last[0])
    tally.checks["crash"] = {"verdict": "fail", "reason": verdict.reason, "cases": tally.cases}
    tally.failure = Failure(
        verdict, smallest, describe(spec, smallest), trace=last_words(last[0].stderr_tail), shrink_runs=shrink_runs
    )
    return tally


def _case_of(note: Mapping[str, Any]) -> Case | None:
    """The case that was running, unless a drawn value in it did not survive as JSON."""
    try:
        return Case.from_json(note["case"]) if "case" in note else None
    except ReplayError:
        return None


def _crash_verdict(crash: Crash) -> Verdict:
    if crash.kind == "timeout":
        reason = f"the case did not end within its time limit ({crash.detail})"
    elif crash.kind == "signal":
        reason = f"the process running the case died ({crash.detail}), most often an access far outside a tensor"
    else:
        reason = f"the process running the case ended before the call returned ({crash.detail})"
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
    cause = failure.cause or likely_cause(verdict, failure.case)
    path = _write_replay(spec, request, failure, cause)
    entry = {"verdict": "fail", "reason": verdict.reason, "cases": checks.get(verdict.check, {}).get("cases", 0)}
    checks[verdict.check] = {**entry, **verdict.evidence, **({"error_map": failure.map} if failure.map else {})}
    trace = failure.trace if verdict.check in ("error", "crash") else ""
    described = failure.described if request.given is None else dict(request.given)
    found = f"found in case {tally.cases}, shrunk in {plural(failure.shrink_runs, 'run')}"
    if failure.case in request.known and not failure.shrink_runs:
        found = "failed in an earlier run too, and was tried first"
    searched = failure.case is not None and request.replay is None
    message = compose(
        spec.name,
        verdict,
        described,
        cause=cause,
        where=failure.map["where"] if failure.map else None,
        command=replay_command(request.shown or request.nodeid, path) if path else None,
        trace=trace.rstrip(),
        found_after=found if searched else "",
    )
    return replace(
        record,
        verdict="fail",
        failed_check=verdict.check,
        cause=cause,
        case=described,
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
    if failure.case is None or request.given is not None:
        return None
    replay = replays.Replay(request.nodeid, spec.name, failure.verdict.check, cause, failure.case)
    try:
        path = replays.write(replay, request.root)
    except OSError:
        return None  # a read-only checkout must not hide the failure itself
    return os.path.relpath(path, request.start)


def failure_of(record: TestRecord) -> FusionFailure:
    """The exception that a failing record stands for."""
    return FusionFailure(
        record.message,
        check=record.failed_check or "",
        case=record.case,
        cause=record.cause,
        replay=record.replay,
    )
