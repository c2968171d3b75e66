"""The tally of a child that died or ran out of time: the crash confirmed and shrunk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from pytest_fusion.case.case_model import Case, Layout
from pytest_fusion.case.choosing import large_offsets
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.describe import describe
from pytest_fusion.case.plan import make_plan
from pytest_fusion.case.sizes import count
from pytest_fusion.checks.malformed import malformed
from pytest_fusion.checks.verdict import ProcessEnd, Verdict, failed
from pytest_fusion.diagnosis.diagnosis_model import Diagnosis
from pytest_fusion.diagnosis.shrink import Shrinker
from pytest_fusion.diagnosis.text.stack import died_in_reference, last_words
from pytest_fusion.engine.cases import limits_of
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.tally import Failure, Tally
from pytest_fusion.errors import ReplayError
from pytest_fusion.oracle.reference import ReferenceCrashed
from pytest_fusion.run.clock import processor_s
from pytest_fusion.run.process.fork import Crash

# Shrinking a crash forks once a case, and a hang waits out its limit each time: on a GPU a context is made within it.
_CRASH_RUNS, _HANG_RUNS = 60, 12
_HANG_SECONDS, _GPU_HANG_SECONDS = 2.0, 6.0
# In so many seconds of the processor smaller cases are looked for.
_HANGS_S = 6.0
# After so many seconds a case is looked into. It may take so many times its limit where that shows no hang.
_SUSPECT_S, _SLOW = 6.0, 3.0
# A call of so few elements takes milliseconds.
_FEW = 256


class Late:
    """Called for a case that takes long, while it runs on: the limit that it has from now on; ``None`` for a hang.

    Time alone does not distinguish a hang from a slow case. Other cases do: one of few elements takes long too, or
    contiguous copies of the same values do not. ``found`` is the smallest case that hangs.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._seconds = job, job.request.profile.seconds
        self.first_s = min(_SUSPECT_S, self._seconds) if job.only is None else self._seconds
        self.found: Failure | None = None
        self.notes: list[str] = []

    def __call__(self, note: Any) -> float | None:
        case = _case_of(note or {})
        if self.notes or self._job.only is not None:
            return None
        self.notes = [f"a case took more than {self.first_s:g} s but ended when it was given more time"]
        if case is None or "arm" in note or ("found" in note and "shrinking" not in note):
            return self._seconds  # the diagnosis of a finding, or another kernel than the one under test
        found = _smallest(self._job, Crash("timeout", "", note, ""), case)
        few = math.prod(map(count, (found.case or case).sizes.values())) <= _FEW
        if found.shrink_runs and (few or found.diagnosis is not None):
            self.found = found
            return None
        return _SLOW * self._seconds


def tally_of(job: Job, crash: Crash, smallest: Failure | None = None) -> Tally:
    """The crash as a failure, on the smallest case that still crashes alike, each tried in a child of its own.

    ``smallest`` is that failure where it is known.
    """
    note = crash.last_note or {}
    if crash.kind == "signal" and not note.get("findings") and died_in_reference(crash.stderr_tail):
        _raise_if_reference_dies(job, crash, _case_of(note))
    tally = Tally(cases=int(note.get("cases", 0)), pinned=note.get("pinned"))
    cases, found, others = tally.cases, _case_of(note), list(note.get("findings", ()))
    dies = "shrinking" in note and (smallest is not None or crash.kind != "timeout")
    if "found" in note and dies:
        others.append(note["found"])
    if "found" in note and not dies:
        ended = f"an experiment on it ended the process ({crash.kind}: {crash.detail})"
        failure = _noted(job, note["found"], ended)
    elif found is None:
        cases, failure = 0, Failure(_verdict(crash), None, trace=last_words(crash.stderr_tail))
    else:
        failure = smallest or _smallest(job, crash, found)
    tally.failure, verdict = failure, failure.verdict
    tally.others = [_noted(job, one, "the process ended before more was learned") for one in others]
    tally.checks[verdict.check] = {"verdict": "fail", "reason": verdict.reason, "cases": cases}
    return tally


def _raise_if_reference_dies(job: Job, crash: Crash, case: Case | None) -> None:
    """Raise ``ReferenceCrashed`` where it dies in place of the kernel too: a kernel may spoil memory that it reads."""
    if case is None:
        return
    alone = job.alone(case, explained=False, spec=job.spec.with_(fused=job.spec.reference))
    if isinstance(alone.in_child(job.request.profile.seconds, forward=False), Crash):
        raise ReferenceCrashed(
            f"{job.spec.name}: the reference itself killed its process ({crash.detail}); the case was "
            f"{describe(job.spec, case)['text']}; bound the sizes in dims=, or the values (values.finite()), to those "
            "that it can compute, or fix it"
        )


def _of_layout(job: Job, case: Case, seconds: float, *, hangs: bool) -> Diagnosis | None:
    """The diagnosis of a hang on strides, or a crash on offsets past 2^31, that compact copies of the same values lack.

    Where a strided access dies, it may be luck that a dense one beside it does not.
    """
    far = large_offsets.goes_far(job.spec, case)
    compact = case.contiguous(large_offsets.far_tensors(job.spec, case)) if far else case
    for name, inner in case.tensors.items() if hangs and not far else ():
        compact = compact.with_tensor(name, layout=Layout(offset=inner.layout.offset))
    if compact.key() == case.key():
        return None
    if isinstance(job.alone(compact, explained=False).in_child(seconds, forward=False), Crash):
        return None
    ends = "a compact copy of the same values ends well"
    if far:
        return Diagnosis("int32-overflow", [f"an offset passes 2^31 elements, and {ends}"])
    return Diagnosis("ignores-strides", [f"{ends}, without its strides"])


def _noted(job: Job, found: Mapping[str, Any], ended: str) -> Failure:
    """A finding that the child had noted when it ended."""
    case = _case_of(found)
    described = describe(job.spec, case) if case is not None else None
    diagnosis = Diagnosis(found["cause"], [], [ended])
    return Failure(Verdict.from_json(found["verdict"]), case, described, diagnosis=diagnosis)


def _smallest(job: Job, crash: Crash, found: Case) -> Failure:
    """The crash on the smallest case that crashes alike; each is tried in a child of its own."""
    request, last, hangs = job.request, crash, crash.kind == "timeout"
    seconds, until, runs = request.profile.seconds, math.inf, _CRASH_RUNS
    if hangs:
        runs, seconds = _HANG_RUNS, min(seconds, _HANG_SECONDS if request.device == "cpu" else _GPU_HANG_SECONDS)
        until = processor_s() + _HANGS_S

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

    case, tried = found, 0
    if job.only is None and "pinned" not in (crash.last_note or {}) and (hangs or dies(found)):
        limits = limits_of(request.profile, torch.device(request.device))
        plan = make_plan(job.spec, pools=searching.pools(job.spec, 0), limits=limits)
        shrinker = Shrinker(plan, found, dies, max_runs=runs, late=lambda: processor_s() >= until)
        case, tried = shrinker.run(), shrinker.runs
        if hangs and case == found and not dies(found):
            tried = 0
    return Failure(
        _verdict(last),
        case,
        describe(job.spec, case),
        trace=last_words(last.stderr_tail),
        shrink_runs=tried,
        diagnosis=_of_layout(job, case, seconds, hangs=hangs),
    )


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
    if _reached(crash).startswith(malformed.NAME):
        return failed(malformed.NAME, reason, identity=f"{malformed.NAME}:process", cause=malformed.CODE)
    return failed("crash", reason, identity=f"crash:{crash.kind}", evidence=ProcessEnd(crash.kind, crash.detail))
