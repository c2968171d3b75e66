"""The tally of a child that died or ran out of time: the crash confirmed and shrunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import large_offsets
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.describe import describe
from pytest_fusion.case.plan import make_plan
from pytest_fusion.checks.evidence import ProcessEnd
from pytest_fusion.checks.verdict import Verdict, failed
from pytest_fusion.diagnosis.diagnosis_model import Diagnosis
from pytest_fusion.diagnosis.shrink import Shrinker
from pytest_fusion.diagnosis.text.stack import last_words
from pytest_fusion.engine.cases import limits_of
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.tally import Failure, Tally
from pytest_fusion.errors import ReplayError
from pytest_fusion.run.process.fork import Crash

# Each step of shrinking a crash forks, and each hang waits out its limit.
_CRASH_RUNS = 60
_HANG_RUNS = 4
_HANG_SECONDS = 4.0


def was_only_slow(job: Job, outcome: object) -> bool:
    """Whether a case that timed out ends alone in twice its time; the test then gets `PATIENCE` times its limit."""
    if not isinstance(outcome, Crash) or outcome.kind != "timeout":
        return False
    note = outcome.last_note or {}
    case = _case_of(note)
    # With a finding noted, only its diagnosis was too slow.
    if "found" in note or case is None or job.only is not None:
        return False
    again = job.alone(case, explained=False).in_child(2 * job.request.profile.seconds, forward=False)
    return not (isinstance(again, Crash) and again.kind == "timeout")


def without_shrinking(job: Job, outcome: Tally | Crash) -> Tally | None:
    """The tally of the failing case alone, where shrinking ran out of time and no kernel call did."""
    note = outcome.last_note if isinstance(outcome, Crash) and outcome.kind == "timeout" else None
    case = _case_of(note or {})
    if note is None or case is None or not note.get("shrinking"):
        return None
    found = job.alone(case).in_child(2 * job.request.profile.seconds, forward=False)
    if not isinstance(found, Tally) or found.failure is None:
        return None
    found.cases = int(note.get("cases", found.cases))
    found.notes.append("the search for a smaller case did not come to an end; it is no call of the kernel that hangs")
    return found


def tally_of(job: Job, crash: Crash) -> Tally:
    """The crash as a failure on the smallest case that crashes alike; each try has its own child."""
    note = crash.last_note or {}
    tally = Tally(cases=int(note.get("cases", 0)), pinned=note.get("pinned"))
    cases, found = tally.cases, _case_of(note)
    if "found" in note:
        ended = f"an experiment on it ended the process ({crash.kind}: {crash.detail})"
        failure = _noted(job, note["found"], ended)
    elif found is None:
        cases, failure = 0, Failure(_verdict(crash), None, trace=last_words(crash.stderr_tail))
    else:
        smallest, last, runs = _smallest(job, crash, found)
        described = describe(job.spec, smallest)
        trace, diagnosis = last_words(last.stderr_tail), _of_offsets(job, smallest)
        failure = Failure(_verdict(last), smallest, described, trace=trace, shrink_runs=runs, diagnosis=diagnosis)
    tally.failure, verdict = failure, failure.verdict
    tally.others = [_noted(job, one, "the process ended before more was learned") for one in note.get("findings", ())]
    tally.checks[verdict.check] = {"verdict": "fail", "reason": verdict.reason, "cases": cases}
    return tally


def _of_offsets(job: Job, case: Case) -> Diagnosis | None:
    """The diagnosis of a crash on offsets beyond 2^31 that does not occur on compact copies of the same values."""
    if not large_offsets.goes_far(job.spec, case):
        return None
    compact = case.contiguous(large_offsets.far_tensors(job.spec, case))
    outcome = job.alone(compact, explained=False).in_child(job.request.profile.seconds, forward=False)
    if isinstance(outcome, Crash):
        return None
    return Diagnosis(
        "int32-overflow", ["an offset passes 2^31 elements, and a compact copy of the same values ends well"]
    )


def _noted(job: Job, found: Mapping[str, Any], ended: str) -> Failure:
    """A finding that the child had noted when it ended."""
    case = _case_of(found)
    described = describe(job.spec, case) if case is not None else None
    diagnosis = Diagnosis(found["cause"], [], [ended])
    return Failure(Verdict.from_json(found["verdict"]), case, described, diagnosis=diagnosis)


def _smallest(job: Job, crash: Crash, found: Case) -> tuple[Case, Crash, int]:
    """The smallest case that crashes alike, its crash, and how many were tried."""
    request = job.request
    seconds = min(request.profile.seconds, _HANG_SECONDS) if crash.kind == "timeout" else request.profile.seconds
    last = crash

    def dies(case: Case) -> bool:
        nonlocal last
        try:
            outcome = job.alone(case, explained=False).in_child(seconds, forward=False)
        except Exception:  # noqa: BLE001 - a case that raises is not the one that dies, and hides no crash that is found
            return False
        # A crash in the further checks, which make calls of other sizes, is not one of the case itself.
        if not isinstance(outcome, Crash) or (outcome.kind, _reached(outcome)) != (crash.kind, _reached(crash)):
            return False
        last = outcome
        return True

    if job.only is not None or "pinned" in (crash.last_note or {}) or not (crash.kind == "timeout" or dies(found)):
        return found, last, 0
    limits = limits_of(request.profile, torch.device(request.device))
    plan = make_plan(job.spec, pools=searching.pools(job.spec, 0), limits=limits)
    shrinker = Shrinker(plan, found, dies, max_runs=_HANG_RUNS if crash.kind == "timeout" else _CRASH_RUNS)
    return shrinker.run(), last, shrinker.runs


def _case_of(note: Mapping[str, Any]) -> Case | None:
    """The case that was running, unless a drawn value in it did not survive as JSON."""
    try:
        return Case.from_json(note["case"]) if "case" in note else None
    except ReplayError:
        return None


def _reached(crash: Crash) -> str:
    """The check in whose further calls it ended; empty for the case's own."""
    return str((crash.last_note or {}).get("reached", ""))


def _verdict(crash: Crash) -> Verdict:
    if crash.kind == "timeout":
        reason = f"a call did not end within the time limit ({crash.detail})"
    elif crash.kind == "signal":
        reason = f"the process running the case died ({crash.detail}), most often an access far outside a tensor"
    else:
        reason = f"the process running the case ended before the call returned ({crash.detail})"
    if _reached(crash):
        reason += f"; it was in the further calls of check `{_reached(crash)}`"
    return failed("crash", reason, identity=f"crash:{crash.kind}", evidence=ProcessEnd(crash.kind, crash.detail))
