"""One test with two kernels, from spec to record: a comparison in a child, deaths of processes, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_fusion.canary.offline.case_pairs import Pair, Ran, Source, classify, died
from pytest_fusion.canary.offline.comparison import COSTS, Dead, Found, Lost, TwoKernels
from pytest_fusion.canary.offline.comparison_verdict import Comparison, Evidence, conclude
from pytest_fusion.canary.offline.incumbent.incumbent_process import NoOpponentError, Opponent
from pytest_fusion.canary.offline.incumbent.incumbents import Incumbent
from pytest_fusion.canary.offline.paired_latency import Sized, sizes, timings
from pytest_fusion.canary.offline.taken import Spills
from pytest_fusion.canary.recording.recordings import Cases as RecordedCases
from pytest_fusion.canary.recording.recordings import recorded
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing.search import Known
from pytest_fusion.case.describe import describe
from pytest_fusion.checks.context import Context
from pytest_fusion.engine import crash
from pytest_fusion.engine.isolated import why_not_isolated
from pytest_fusion.engine.job import Job, with_notes
from pytest_fusion.engine.judging import Judging, programs_of
from pytest_fusion.engine.outcome import record_of
from pytest_fusion.engine.tally import Tally
from pytest_fusion.errors import CanaryError
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.process import preload
from pytest_fusion.run.process.fork import Channel, Crash, run_isolated, unwrap
from pytest_fusion.run.process.worker import WorkerLost

# After each death all cases run again, in a fresh process.
_MOST_DEATHS = 4
CHECK = "canary"
# Sizes at which both kernels are compiled for their spills: at most a minute of all cores.
_MOST_COMPILED = 8


@dataclass(frozen=True, slots=True)
class Compare:
    """The mode of ``--fusion-canary``: both kernels on the same cases. Only a rollback and an error fail the test."""

    incumbent: Incumbent

    def run(self, job: Job) -> TestRecord:
        """The record of the comparison, with the verdict in ``canary``."""
        begun = time.perf_counter()
        spec, request, rival = job.spec, job.request, self.incumbent
        profile = request.profile
        job = replace(job, known=Known(spec, job.outer, request.nodeid).cases)
        device = torch.device(request.device)
        programs = programs_of(profile, device)
        context = Context(spec, device, job.extra, programs=programs, deep=profile.name == "deep")
        tally: Tally | None = None
        try:
            opponent = rival.open(request.nodeid, spec, context, profile.seconds)
            seen, tally = _InChildren(job, rival, opponent).run()
            seen.notes += rival.close()
            comparison = conclude(seen, rival.about, rival.without)
        except NoOpponentError as error:
            comparison = Comparison("nodata", (f"it has no incumbent: {error}",), rival.about)
        except CanaryError as error:
            comparison = Comparison("error", (str(error),), rival.about)
        finally:
            rival.let_go()
        record = record_with(job, comparison, tally, rival)
        return replace(record, seconds=round(time.perf_counter() - begun, 3))


def record_with(job: Job, comparison: Comparison, tally: Tally | None, rival: Incumbent) -> TestRecord:
    """The record of a comparison; a rollback has the replay file and the diagnosis of its case."""
    name, decision = job.spec.name, comparison.decision
    as_json = comparison.as_json()
    reasons = "\n".join(f"  {reason}" for reason in comparison.reasons)
    message = f"{name}: canary {decision}, against {rival.named}\n{reasons}"
    if decision == "rollback" and tally is not None and tally.failure is not None:
        record = record_of(job, tally)
        return replace(record, message=f"{message}\n{record.message}", canary=as_json)
    verdicts = {"promote": "pass", "hold": "pass", "rollback": "fail", "error": "fail", "nodata": "unknown"}
    record = TestRecord(job.request.nodeid, verdicts[decision], canary=as_json)  # type: ignore[arg-type]
    if tally is not None:
        record = replace(record_of(job, replace(tally, failure=None)), verdict=record.verdict, canary=as_json)
    if decision == "nodata":
        # One line, because it is the reason of a skip.
        message = f"canary nodata, against {rival.named}: {'; '.join(comparison.reasons)}"
    failed = decision in ("rollback", "error")
    return replace(record, failed_check=CHECK if failed else None, message="" if record.verdict == "pass" else message)


class _InChildren:
    """The comparison of one test in a child, repeated without the cases in which a process ended."""

    def __init__(self, job: Job, rival: Incumbent, opponent: Opponent) -> None:
        self.job, self.rival, self.opponent = job, rival, opponent
        self.dead: dict[str, Dead] = {}
        self.late = crash.Late(job)

    def run(self) -> tuple[Evidence, Tally]:
        for _ in range(_MOST_DEATHS):
            outcome = self._once()
            if isinstance(outcome, Found):
                return outcome.evidence, outcome.tally
            if isinstance(outcome, Lost):
                self._bury(Case.from_json(outcome.case), incumbent=died(outcome.reason, late=outcome.late))
                self.rival.reopen()
                continue
            self.rival.reopen()  # a compile request may be half answered
            note = outcome.last_note or {}
            if "case" not in note:
                raise CanaryError(f"the process of the two kernels ended before any case ran ({outcome.detail})")
            if note.get("arm") == COSTS:
                raise CanaryError(
                    f"the process ended while both kernels were measured ({outcome.detail}), after all cases were "
                    "judged: leave out latency,spills to see the verdict without"
                )
            case = Case.from_json(note["case"])
            if note.get("arm") == "incumbent":
                self._bury(case, incumbent=died(outcome.detail, late=outcome.kind == "timeout"))
            else:
                pair = self._after_crash(case, outcome)
                if pair.standing == "worse":
                    return Evidence([pair]), crash.tally_of(self.job, outcome, self.late.found)
                self._bury(case, candidate=pair.candidate, incumbent=pair.incumbent)
        return Evidence(broken=f"a process ended {_MOST_DEATHS} times before all cases had run"), Tally()

    def _bury(self, case: Case, *, candidate: Ran | None = None, incumbent: Ran | None = None) -> None:
        before = self.dead.get(case.key(), Dead(None, None))
        self.dead[case.key()] = Dead(candidate or before.candidate, incumbent or before.incumbent)

    def _after_crash(self, case: Case, outcome: Crash) -> Pair:
        """The pair of a case in which the candidate's process ended; the incumbent runs alone."""
        ours = died(outcome.detail)
        theirs = self._alone(case)
        standing, reason = classify(ours, theirs)
        text = str(describe(self.job.spec, case)["text"])
        return Pair(text, "fuzzed", ours, theirs, standing, reason, case.as_json())

    def _alone(self, case: Case) -> Ran:
        def work(_: Channel | None) -> Ran:
            return self.opponent.judge(case, again=True, alone=True)

        try:
            if self.rival.elsewhere or why_not_isolated(self.job.request) is not None:
                return work(None)
            outcome = unwrap(run_isolated(work, time_limit_s=self.job.request.profile.seconds, forward=False))
        except WorkerLost as lost:
            self.rival.reopen()
            return died(str(lost), late=lost.late)
        return died(outcome.detail) if isinstance(outcome, Crash) else outcome

    def _once(self) -> Found | Lost | Crash:
        request = self.job.request
        if why_not_isolated(request) is not None:
            return self._here(lambda _: None)

        def work(channel: Channel) -> Found | Lost | Crash:
            return with_notes(channel, {}, self._here)

        preload.inherit(gradients=bool(self.job.spec.grad), compiles=request.device != "cpu")
        self.late = crash.Late(self.job)
        outcome: Found | Lost | Crash = unwrap(run_isolated(work, time_limit_s=self.late.first_s, on_late=self.late))
        if isinstance(outcome, Found):
            outcome.tally.checks.setdefault("crash", {"verdict": "pass", "reason": "", "cases": outcome.tally.cases})
            preload.learn(outcome.tally.imported)
        return outcome

    def _here(self, note: Any) -> Found | Lost:
        job = self.job
        # The incumbent in another process takes as long again, which is not seen here.
        share = 0.5 if self.rival.elsewhere else 1.0
        judging = Judging(job.spec, job.request, job.outer, job.extra, note, share=share)
        recording = self.rival.recording
        traffic = recorded(recording, job.spec) if recording is not None else None
        extra: dict[Source, Iterable[Case]] = {
            "pinned": [pin.case for pin in job.request.pinned],
            "known": job.known,
            "recorded": [case for case, _ in traffic] if traffic is not None else (),
        }
        both = TwoKernels(judging, self.opponent, extra, self.dead)
        both.evidence.notes += traffic.lines() if traffic is not None else []
        found = both.run()
        if isinstance(found, Found):
            self._costs(found, both, traffic)
        return found

    def _costs(self, found: Found, both: TwoKernels, traffic: RecordedCases | None) -> None:
        """Measures latency, recompilations and spills, unless a case already decides for a rollback."""
        seen, without, keys = found.evidence, self.rival.without, both.passed
        if both.regression is not None:
            seen.compiled = seen.spills = seen.untimed = "a case that the candidate alone fails decides already"
            return
        try:
            if "recompiles" not in without:
                seen.compiled = both.kernel.compiled(keys), self.opponent.compiled(keys)
            sized, lacking = sizes(self.job.spec, traffic)
            if "spills" not in without:
                seen.spills = self._spills(seen, both, sized, lacking)
            self._time(seen, both, sized, lacking)
        except (WorkerLost, CanaryError) as error:
            seen.notes.append(f"the incumbent's process ended, or refused, when its costs were measured: {error}")

    def _spills(
        self, seen: Evidence, both: TwoKernels, sized: Sequence[Sized], lacking: str
    ) -> tuple[Spills, Spills] | str:
        if not any(pair.candidate.triton or pair.incumbent.triton for pair in seen.pairs):
            return Spills({}, {}, ""), Spills({}, {}, "")
        if lacking:
            return lacking
        compiled = [(one.text, one.case) for one in sized[:_MOST_COMPILED]]
        both.compiling(compiled[0][1])
        spilling = both.beside.spilling(compiled) if both.beside is not None else None
        ours = both.kernel.spills(compiled)
        both.compiling(compiled[0][1])
        return ours, self.opponent.spills(compiled) if spilling is None else spilling()

    def _time(self, seen: Evidence, both: TwoKernels, sized: Sequence[Sized], lacking: str) -> None:
        if "latency" in self.rival.without:
            seen.untimed = "not requested"
        elif self.job.request.device == "cpu":
            seen.untimed = "interpreted kernels have none that is worth a number; run on a GPU"
        elif lacking:
            seen.untimed = lacking
        else:
            found = timings(both.context, self.opponent, sized, both.compiling)
            seen.timings, seen.untimed = found.timings, found.problem
            seen.notes += found.notes
