"""All cases of one spec with two kernels, in one process: the test's own cases, each judged for both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_fusion.bench.baseline.facts import compare_names
from pytest_fusion.canary.offline import accuracy
from pytest_fusion.canary.offline.case_pairs import Pair, Source, Standing, stands
from pytest_fusion.canary.offline.comparison_verdict import Evidence
from pytest_fusion.canary.offline.incumbent.incumbent_process import Remote
from pytest_fusion.canary.offline.incumbent.wire import Gone
from pytest_fusion.canary.offline.kernel import Kernel, Measured, Opponent
from pytest_fusion.canary.offline.ran import FOREIGN, Ran, ran
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.describe import describe
from pytest_fusion.case.make import make_inputs
from pytest_fusion.checks.context import CaseResult, reference_of
from pytest_fusion.checks.outputs import Outputs
from pytest_fusion.checks.values_check import judge_one
from pytest_fusion.engine.campaign import Campaign
from pytest_fusion.engine.tally import Tally
from pytest_fusion.oracle.reference import ReferenceRun
from pytest_fusion.run.clock import Clock
from pytest_fusion.run.measure.launches import Counts
from pytest_fusion.run.process.fork import COMPILING

# Cases whose launches are counted though nothing differs, and all in all.
_COUNTED, _MOST_COUNTED = 8, 60
# Cases that the candidate alone fails and of which the incumbent is asked everything; and after which nothing is to be
# learned from more.
_CONFIRMED, _ENOUGH = 3, 20
# In place of a kernel: both are measured, and whose fault an end of the process is nobody knows.
COSTS = "costs"
# Cases that are told in full, of each standing that a reader must look at.
_TOLD: tuple[Standing, ...] = ("worse", "both-fail", "known-bad", "better", "refuses", "foreign", "unexcused")


@dataclass(frozen=True, slots=True)
class Dead:
    """A case in which a kernel's process ended: what is known of each without asking it again."""

    candidate: Ran | None
    incumbent: Ran | None


@dataclass(frozen=True, slots=True)
class Lost:
    """The incumbent's process went while it was asked about a case."""

    case: Mapping[str, Any]
    said: str
    late: bool


@dataclass(slots=True)
class Found:
    """What a duel leaves. ``tally`` has the smallest case of a rollback, and what the candidate's checks add up to."""

    evidence: Evidence
    tally: Tally


class _IncumbentLost(Exception):
    def __init__(self, case: Case, gone: Gone) -> None:
        super().__init__(str(gone))
        self.lost = Lost(case.as_json(), str(gone), gone.late)


@dataclass(slots=True)
class Extra:
    """Cases beyond those that are generated, and those that end a process."""

    known: Iterable[Case] = ()
    pinned: Iterable[Case] = ()
    recorded: Iterable[Case] = ()
    dead: Mapping[str, Dead] = field(default_factory=dict)


class Duel(Campaign):
    """A campaign that goes on after failures, and asks the incumbent about every case that it runs."""

    def set_up(self, opponent: Opponent, extra: Extra) -> None:
        """Who is asked, and about what besides the generated cases; before :meth:`fight`."""
        self.opponent, self.more = opponent, extra
        self.kernel = Kernel(self.bench)
        if isinstance(opponent, Kernel):
            # The time limit is one of each call.
            opponent.bench.progress.clock = Clock(lambda: self.note(self._last))
        elif isinstance(opponent, Remote):
            opponent.pulse = lambda: self.note(self._last)
        self.evidence = Evidence()
        self.source: Source = "fuzzed"
        # The first case that only the candidate fails, as the judge left it.
        self.beaten: CaseResult | None = None
        self.counted = self.worse = 0
        # Keys of the cases that both pass, which both were measured on.
        self.passed: list[str] = []
        self.old_reference = 0

    def fight(self) -> Found | Lost:
        """All cases, and the smallest that the candidate alone fails."""
        try:
            self._every_case()
            self._tell_of_reference()
            return Found(self.evidence, self._tally())
        except _IncumbentLost as error:
            return error.lost

    def _every_case(self) -> None:
        sources: tuple[tuple[Source, Iterable[Case]], ...] = (
            ("pinned", self.more.pinned),
            ("known", self.more.known),
            ("recorded", self.more.recorded),
        )
        self.source = "example"
        if searching.wants_phase(self.outer, "explicit"):
            self._pinned()
        for source, cases in sources:
            self.source = source
            for case in cases:
                self._run(case, again=True)
        self.source = "fuzzed"
        if not searching.wants_phase(self.outer, "generate"):
            return
        if self.profile.large:
            self._far()
            return
        self._probe()
        self._cover()

    def _run(self, case: Case, choice: Mapping[str, Any] | None = None, *, again: bool | None = None) -> CaseResult:
        dead = self.more.dead.get(case.key())
        if dead is not None and dead.candidate is not None:
            self.tally.cases += 1
            ours = dead.candidate
            theirs = dead.incumbent or self._ask(case, again=True)
            self._keep(case, ours, theirs, *stands(ours, theirs))
            return CaseResult(case, rejected="crash")
        if again is None:
            again = self.asks_again()
        result = super()._run(case, choice, again=again)
        self.failing = None  # it goes on
        self._against(result, again=again)
        if self.worse >= _ENOUGH:
            self.failing = self.beaten
        return result

    def _against(self, result: CaseResult, *, again: bool) -> None:
        """The incumbent on the case as the candidate met it: a failure may be one of other values than asked for."""
        case, ours = result.case, ran(result, self.bench.progress.refusals)
        dead = self.more.dead.get(case.key())
        theirs = dead.incumbent if dead is not None and dead.incumbent is not None else self._ask(case, again=again)
        standing, reason = stands(ours, theirs)
        if standing == "worse" and theirs.verdict == "pass" and self.worse < _CONFIRMED:
            # It may have been asked less of this case, having spent its costly checks on others; and chance, which only
            # one of them had so far, gets three tries.
            for _ in range(3 if ours.check == "repeat" else 1):
                theirs = self._ask(case, again=True, alone=True)
                if theirs.verdict != "pass":
                    break
            standing, reason = stands(ours, theirs)
        if "rejected" in (ours.verdict, theirs.verdict) or theirs.check == "crash":
            self._keep(case, ours, theirs, standing, reason, result)
            return
        self.note({"case": case.as_json(), "cases": self.tally.cases})
        mine = self.kernel.measure(case)
        other = self._measured(case)
        if mine.inputs != other.inputs:
            said = other.problem or "the incumbent's spec makes other inputs of it"
            standing, reason = stands(ours, Ran("rejected", FOREIGN, said))
            self._keep(case, ours, theirs, standing, reason, result)
            return
        errors: dict[str, tuple[float, float]] = {}
        if mine.outputs and other.outputs:
            logical = make_inputs(self.spec, case, self.bench.device)
            reference, expected = reference_of(self.bench, case, logical)
            if mine.reference != other.reference:
                theirs = self._by_reference_of_today(theirs, other, reference, expected)
                standing, reason = stands(ours, theirs)
            errors = self._errors(mine, other, reference, expected) if standing == "passes" else {}
        pair = self._keep(case, ours, theirs, standing, reason, result)
        if standing == "passes":
            self.passed.append(case.key())
            unmeasured = mine.problem or other.problem
            pair = replace(pair, errors=errors, memory=_both(mine.memory, other.memory), unmeasured=unmeasured)
            self.evidence.pairs[-1] = self._counted(case, pair)

    def _keep(
        self, case: Case, ours: Ran, theirs: Ran, standing: Standing, reason: str, result: CaseResult | None = None
    ) -> Pair:
        described = describe(self.spec, case)
        told = case.as_json() if standing in _TOLD else None
        pair = Pair(str(described["text"]), self.source, ours, theirs, standing, reason, told)
        self.evidence.pairs.append(pair)
        self.worse += standing == "worse"
        if standing == "worse" and result is not None and self.beaten is None:
            self.beaten = result
        return pair

    def _by_reference_of_today(self, theirs: Ran, found: Measured, reference: ReferenceRun, expected: Outputs) -> Ran:
        """The incumbent's verdict where it was judged by another reference: its results beside the one of today."""
        self.old_reference += 1
        if theirs.verdict == "fail" and theirs.check != "values":
            return theirs
        for i, (name, native) in enumerate(zip(expected.tensors, reference.native, strict=True)):
            if name not in found.outputs:
                return replace(theirs, verdict="fail", check="structure", reason=f"it returns no {name}")
            lanes = reference.lanes[i] if reference.lanes else None
            verdict = judge_one(found.outputs[name], native, lanes, lambda: lanes, self.spec.tolerance)  # type: ignore[arg-type,return-value]  # noqa: B023
            if not verdict.ok:
                return replace(theirs, verdict="fail", check="values", reason=f"{name}: {verdict.reason}")
        return replace(theirs, verdict="pass", check="", reason="")

    def _errors(
        self, mine: Measured, other: Measured, reference: ReferenceRun, expected: Outputs
    ) -> dict[str, tuple[float, float]]:
        found = {}
        for i, (name, native) in enumerate(zip(expected.tensors, reference.native, strict=True)):
            right = reference.lanes[i] if reference.lanes else native
            if name in mine.outputs and name in other.outputs:
                ours = accuracy.error(mine.outputs[name], right, self.spec.tolerance)
                theirs = accuracy.error(other.outputs[name], right, self.spec.tolerance)
                if ours is not None and theirs is not None:
                    found[name] = (ours, theirs)
        return found

    def _counted(self, case: Case, pair: Pair) -> Pair:
        """Launches of both, of a few cases and of those that look different; exactly, or not at all."""
        ours, theirs = pair.candidate, pair.incumbent
        if self.bench.device.type != "cuda" and not (ours.triton and theirs.triton):
            return pair  # what runs may be a path for the CPU
        if self.counted >= (_COUNTED if ours.work == theirs.work else _MOST_COUNTED):
            return pair
        self.counted += 1
        self.note({"case": case.as_json(), "cases": self.tally.cases})
        mine = self.kernel.count(case)
        self._note_incumbent(case)
        try:
            other = self.opponent.count(case)
        except Gone as gone:
            raise _IncumbentLost(case, gone) from None
        if not isinstance(mine, Counts) or not isinstance(other, Counts) or mine.doubts or other.doubts:
            return pair
        if mine.method != other.method:
            return pair
        more = compare_names(dict(other.names), dict(mine.names))
        return replace(pair, launches=(mine.kernels, other.kernels), more=more)

    def _ask(self, case: Case, *, again: bool, alone: bool = False) -> Ran:
        self._note_incumbent(case)
        try:
            with self.bench.clock.phase("incumbent"):
                return self.opponent.judge(case, again=again, alone=alone)
        except Gone as gone:
            raise _IncumbentLost(case, gone) from None

    def compiling(self, case: Case) -> None:
        """Whoever watches this process is told that compilers are at work, or that something is timed."""
        self.note({"case": case.as_json(), "cases": self.tally.cases, "arm": COSTS, COMPILING: "both kernels"})

    def _note_incumbent(self, case: Case) -> None:
        """Whoever watches this process is told who runs; on a GPU the incumbent may have kernels to compile."""
        compiling = {COMPILING: "the incumbent"} if self.bench.device.type == "cuda" else {}
        self.note({"case": case.as_json(), "cases": self.tally.cases, "arm": "incumbent", **compiling})

    def _measured(self, case: Case) -> Measured:
        self._note_incumbent(case)
        try:
            with self.bench.clock.phase("incumbent"):
                return self.opponent.measure(case)
        except Gone as gone:
            raise _IncumbentLost(case, gone) from None

    def _tell_of_reference(self) -> None:
        if self.old_reference:
            self.evidence.notes.append(
                f"in {self.old_reference} case(s) the incumbent's own reference gave other bits than today's; its "
                "results were judged by today's"
            )

    def _tally(self) -> Tally:
        """What the candidate's cases add up to; with the smallest case of a rollback, on which the incumbent passes."""
        self.failing = self.beaten
        tally = self.finish()
        failure = tally.failure
        if self.beaten is None:
            if failure is not None and failure.verdict.check == "vacuity":
                self.evidence.broken = f"the test could not have failed: {failure.verdict.reason}"
            tally.failure = None
            return tally
        if failure is not None and failure.case is not None and failure.case != self.beaten.case:
            theirs = self._ask(failure.case, again=True, alone=True)
            if theirs.verdict == "fail":
                tally.failure = self._minimum(self.beaten, shrink=False)
        return tally


def _both(ours: int | None, theirs: int | None) -> tuple[int, int] | None:
    return None if ours is None or theirs is None else (ours, theirs)
