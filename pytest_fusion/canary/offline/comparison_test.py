"""One test with two kernels, from spec to record: the duel in a child, what ends a process, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pytest_fusion.canary.offline.case_pairs import Pair, stands
from pytest_fusion.canary.offline.comparison import COSTS, Dead, Duel, Extra, Found, Lost
from pytest_fusion.canary.offline.comparison_verdict import Comparison, Evidence, conclude, without_evidence
from pytest_fusion.canary.offline.incumbent.incumbent_process import NoOpponentError
from pytest_fusion.canary.offline.incumbent.incumbents import Rival
from pytest_fusion.canary.offline.incumbent.wire import Gone
from pytest_fusion.canary.offline.kernel import Opponent
from pytest_fusion.canary.offline.paired_latency import Sized, sizes, timings
from pytest_fusion.canary.offline.ran import Ran, died
from pytest_fusion.canary.offline.recorded_cases import recorded
from pytest_fusion.canary.offline.taken import Spills
from pytest_fusion.canary.recording.recordings import Cases
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing.known_failures import Known
from pytest_fusion.case.describe import describe
from pytest_fusion.checks.context import Context
from pytest_fusion.engine import crash
from pytest_fusion.engine.examine import record_of, why_not_isolated
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.request import Request
from pytest_fusion.engine.tally import Tally
from pytest_fusion.errors import CanaryError
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.compiled import around_compilations
from pytest_fusion.run.fused import ContextLost
from pytest_fusion.run.process import preload
from pytest_fusion.run.process.fork import COMPILING, Channel, Crash, run_isolated, unwrap
from pytest_fusion.spec.fusion_spec import FusionSpec

# Each death starts all cases anew, in a fresh process.
_MOST_DEATHS = 4
# How much longer a case may take after one that was only slow.
_PATIENCE = 10
CHECK = "canary"
# Sizes at which both kernels are compiled to see what they spill: a minute at the most, of all cores.
_MOST_COMPILED = 8


def compared(spec: FusionSpec, request: Request, *, outer: Any, extra: Mapping[str, Any]) -> TestRecord:
    """The record of a test under ``--fusion-canary``. Only a rollback and an error fail it."""
    begun = time.perf_counter()
    rival = request.canary
    assert rival is not None
    job = Job(spec, replace(request, canary=None, known=Known(spec, outer, request.nodeid).cases), outer, extra)
    device = torch.device(request.device)
    profile = request.profile
    programs = profile.programs if device.type == "cpu" else 2**62
    bench = Context(spec, device, extra, programs=programs, deep=profile.name == "deep")
    tally: Tally | None = None
    try:
        opponent = rival.open(request.nodeid, spec, bench, profile.seconds)
        seen, tally = _Fight(job, rival, opponent).run()
        seen.notes += rival.close()
        comparison = conclude(seen, rival.about, rival.without)
    except NoOpponentError as error:
        comparison = without_evidence("nodata", f"it has no incumbent: {error}", rival.about)
    except CanaryError as error:
        comparison = without_evidence("error", str(error), rival.about)
    finally:
        rival.let_go()
    record = record_with(job, comparison, tally, rival)
    return replace(record, seconds=round(time.perf_counter() - begun, 3))


def record_with(job: Job, comparison: Comparison, tally: Tally | None, rival: Rival) -> TestRecord:
    """The record of what two kernels came to; with the replay file and the diagnosis of a rollback's case."""
    name, decision = job.spec.name, comparison.decision
    told = comparison.as_json()
    reasons = "\n".join(f"  {reason}" for reason in comparison.reasons)
    message = f"{name}: canary {decision}, against {rival.named}\n{reasons}"
    if decision == "rollback" and tally is not None and tally.failure is not None:
        record = record_of(job, tally, "")
        return replace(record, message=f"{message}\n{record.message}", canary=told)
    verdicts = {"promote": "pass", "hold": "pass", "rollback": "fail", "error": "fail", "nodata": "unknown"}
    record = TestRecord(job.request.nodeid, verdicts[decision], canary=told)  # type: ignore[arg-type]
    if tally is not None:
        record = replace(record_of(job, replace(tally, failure=None), ""), verdict=record.verdict, canary=told)
    if decision == "nodata":
        # One line: it is why the test is skipped.
        message = f"canary nodata, against {rival.named}: {'; '.join(comparison.reasons)}"
    failed = decision in ("rollback", "error")
    return replace(record, failed_check=CHECK if failed else None, message="" if record.verdict == "pass" else message)


class _Fight:
    """The duel of one test, again and again without the cases in which a process ended."""

    def __init__(self, job: Job, rival: Rival, opponent: Opponent) -> None:
        self.job, self.rival, self.opponent = job, rival, opponent
        self.dead: dict[str, Dead] = {}
        self.seconds = job.request.profile.seconds

    def run(self) -> tuple[Evidence, Tally]:
        request = self.job.request
        for _ in range(_MOST_DEATHS):
            outcome = self._once()
            if isinstance(outcome, Found):
                return outcome.evidence, outcome.tally
            if isinstance(outcome, Lost):
                self._bury(Case.from_json(outcome.case), incumbent=died(outcome.said, late=outcome.late))
                self.rival.reopen()
                continue
            self.rival.reopen()  # the question that it was asked last may be half answered
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
            elif outcome.kind == "timeout" and not crash.hangs(self.job, outcome):
                self.seconds = _PATIENCE * request.profile.seconds
            else:
                pair = self._after_crash(case, outcome)
                if pair.standing == "worse":
                    return Evidence([pair]), crash.tally_of(self.job, outcome)
                self._bury(case, candidate=pair.candidate, incumbent=pair.incumbent)
        return Evidence(broken=f"a process ended {_MOST_DEATHS} times before all cases had run"), Tally()

    def _bury(self, case: Case, *, candidate: Ran | None = None, incumbent: Ran | None = None) -> None:
        before = self.dead.get(case.key(), Dead(None, None))
        self.dead[case.key()] = Dead(candidate or before.candidate, incumbent or before.incumbent)

    def _after_crash(self, case: Case, outcome: Crash) -> Pair:
        """The incumbent, asked about the case in which the candidate's process ended."""
        ours = died(outcome.detail)
        theirs = self._alone(case)
        standing, reason = stands(ours, theirs)
        text = str(describe(self.job.spec, case)["text"])
        return Pair(text, "fuzzed", ours, theirs, standing, reason, case.as_json())

    def _alone(self, case: Case) -> Ran:
        def work(_: Channel | None) -> Ran:
            return self.opponent.judge(case, again=True, alone=True)

        try:
            if self.rival.elsewhere or why_not_isolated(self.job.request) is not None:
                return work(None)
            outcome = unwrap(run_isolated(work, time_limit_s=self.seconds, forward=False))
        except Gone as gone:
            self.rival.reopen()
            return died(str(gone), late=gone.late)
        return died(outcome.detail) if isinstance(outcome, Crash) else outcome

    def _once(self) -> Found | Lost | Crash:
        request = self.job.request
        if why_not_isolated(request) is not None:
            return self._here(lambda _: None)

        noted: list[dict[str, Any]] = []

        def work(channel: Channel) -> Found | Lost | Crash:
            told = channel.note

            def note(data: dict[str, Any]) -> None:
                noted[:] = [data]
                told(data)

            def compiling(kernel: str) -> None:
                told({**(noted[-1] if noted else {}), COMPILING: kernel})

            def compiled() -> None:
                told(noted[-1] if noted else {})

            try:
                with around_compilations(compiling, compiled):
                    return self._here(note)
            except ContextLost as lost:
                return Crash("exit", str(lost), noted[-1] if noted else {}, "")

        preload.inherit(gradients=bool(self.job.spec.grad), compiles=request.device != "cpu")
        outcome: Found | Lost | Crash = unwrap(run_isolated(work, time_limit_s=self.seconds))
        if isinstance(outcome, Found):
            outcome.tally.checks.setdefault("crash", {"verdict": "pass", "reason": "", "cases": outcome.tally.cases})
            preload.learn(outcome.tally.imported)
        return outcome

    def _here(self, note: Any) -> Found | Lost:
        job, request = self.job, self.job.request
        spec, device = job.spec, torch.device(request.device)
        duel = Duel(
            spec,
            device=device,
            profile=request.profile,
            outer=job.outer,
            nodeid=request.nodeid,
            extra=job.extra,
            seed=request.seed,
            max_cases=request.max_cases,
            note=note,
        )
        recording = self.rival.recording
        traffic = recorded(recording, spec) if recording is not None else None
        duel.set_up(
            self.opponent,
            Extra(
                known=request.known,
                pinned=[pin.case for pin in request.pinned],
                recorded=[case for case, _ in traffic] if traffic is not None else (),
                dead=self.dead,
            ),
        )
        duel.evidence.notes += traffic.lines() if traffic is not None else []
        found = duel.fight()
        if isinstance(found, Found):
            self._costs(found, duel, traffic)
        return found

    def _costs(self, found: Found, duel: Duel, traffic: Cases | None) -> None:
        """Latency, recompilations and spills; of what is sent back anyway nobody asks."""
        seen, without, keys = found.evidence, self.rival.without, duel.passed
        if duel.beaten is not None:
            seen.compiled = seen.spills = seen.untimed = "a case that the candidate alone fails decides already"
            return
        try:
            if "recompiles" not in without:
                seen.compiled = duel.kernel.compiled(keys), self.opponent.compiled(keys)
            sized, lacking = sizes(self.job.spec, traffic)
            if "spills" not in without:
                seen.spills = self._spills(seen, duel, sized, lacking)
            self._time(seen, duel, sized, lacking)
        except (Gone, CanaryError) as error:
            seen.notes.append(f"the incumbent's process ended, or refused, when its costs were measured: {error}")

    def _spills(self, seen: Evidence, duel: Duel, sized: Sequence[Sized], lacking: str) -> tuple[Spills, Spills] | str:
        if not any(pair.candidate.triton or pair.incumbent.triton for pair in seen.pairs):
            return Spills({}, {}, ""), Spills({}, {}, "")
        if lacking:
            return lacking
        asked = [(one.text, one.case) for one in sized[:_MOST_COMPILED]]
        duel.compiling(asked[0][1])
        ours = duel.kernel.spills(asked)
        duel.compiling(asked[0][1])
        return ours, self.opponent.spills(asked)

    def _time(self, seen: Evidence, duel: Duel, sized: Sequence[Sized], lacking: str) -> None:
        if "latency" in self.rival.without:
            seen.untimed = "nobody asked for it"
        elif self.job.request.device == "cpu":
            seen.untimed = "interpreted kernels have none that is worth a number; run on a GPU"
        elif lacking:
            seen.untimed = lacking
        else:
            found = timings(duel.bench, self.opponent, sized, duel.compiling)
            seen.timings, seen.untimed = found.timings, found.problem
            seen.notes += found.notes
