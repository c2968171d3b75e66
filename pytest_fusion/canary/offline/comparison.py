"""`TwoKernels`: runs all cases of a spec with two kernels, and judges each case for both."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pytest_fusion.bench.baseline.facts import compare_names
from pytest_fusion.canary.offline import metric_finding
from pytest_fusion.canary.offline.case_pairs import FOREIGN, Pair, Ran, Source, Standing, classify, ran
from pytest_fusion.canary.offline.comparison_verdict import Evidence
from pytest_fusion.canary.offline.incumbent.incumbent_process import Opponent
from pytest_fusion.canary.offline.kernel import Kernel, Measured
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.describe import describe
from pytest_fusion.case.make import make_inputs
from pytest_fusion.checks.context import CaseResult, Outputs, reference_of
from pytest_fusion.checks.values_check import judge_one
from pytest_fusion.engine.cases import Chosen
from pytest_fusion.engine.judging import Judging
from pytest_fusion.engine.tally import Tally
from pytest_fusion.oracle.reference import ReferenceRun
from pytest_fusion.run.clock import Clock
from pytest_fusion.run.measure.launches import Counts
from pytest_fusion.run.process.fork import COMPILING
from pytest_fusion.run.process.worker import WorkerLost

# Cases whose launches are counted: where nothing seems to differ, and at most.
_COUNTED, _MOST_COUNTED = 8, 60
# Cases that only the candidate fails: all checks of the incumbent confirm so many; after so many the run ends.
_CONFIRMED, _ENOUGH = 3, 20
# Noted in place of a kernel while both are measured. If the process ends then, either may be the cause.
COSTS = "costs"
# Standings that a reader must look at: their cases are reported in full.
_IN_FULL: tuple[Standing, ...] = ("worse", "both-fail", "known-bad", "better", "refuses", "foreign", "unexcused")


@dataclass(frozen=True, slots=True)
class Dead:
    """A case in which a kernel's process ended. It does not run again for the known results."""

    candidate: Ran | None
    incumbent: Ran | None


@dataclass(frozen=True, slots=True)
class Lost:
    """The incumbent's process ended, or gave no answer in time (``late``), while it ran a case."""

    case: Mapping[str, Any]
    reason: str
    late: bool


@dataclass(slots=True)
class Found:
    """The result of a comparison. ``tally`` sums up the candidate's checks, with the smallest case of a rollback."""

    evidence: Evidence
    tally: Tally


class TwoKernels:
    """Judges the cases of one spec, and ``extra`` cases, for two kernels; it continues after failures. In the known
    cases in ``dead``, by their keys, a process ended."""

    def __init__(
        self,
        judging: Judging,
        opponent: Opponent,
        extra: Mapping[Source, Iterable[Case]],
        dead: Mapping[str, Dead],
    ) -> None:
        self.judging, self.cases, self.outer = judging, judging.cases, judging.outer
        self.spec, self.context, self.tally = judging.spec, judging.context, judging.tally
        self.opponent, self.extra, self.dead = opponent, extra, dead
        self.kernel = Kernel(self.context)
        if isinstance(opponent, Kernel):
            # The time limit applies to each call.
            opponent.context.progress.clock = Clock(judging.repeat_note)
        else:
            opponent.pulse = judging.repeat_note
        # The incumbent's process where it runs beside this one: on a GPU each would measure the other's memory.
        remote = None if isinstance(opponent, Kernel) else opponent
        self.beside = remote if self.context.device.type == "cpu" and (os.cpu_count() or 1) > 1 else None
        # The case that it judges, whether with changed values too, and what waits for the result.
        self._judging: tuple[str, bool, Callable[[], Ran]] | None = None
        self.evidence = Evidence()
        self.source: Source = "fuzzed"
        # The judged result of the first case that only the candidate fails.
        self.regression: CaseResult | None = None
        self.counted = self.worse = 0
        # Keys of the cases that both pass and were measured on.
        self.passed: list[str] = []
        self.old_reference = 0

    def run(self) -> Found | Lost:
        """Runs all cases, and shrinks the first that the candidate alone fails."""
        try:
            self._each("example", self.cases.examples(self.outer))
            for source, cases in self.extra.items():
                self._each(source, map(Chosen, cases), again=True)
            if searching.wants_phase(self.outer, "generate"):
                far, own = self.judging.profile.large, self.cases
                self._each("fuzzed", own.far() if far else itertools.chain(own.probes(), own.boundary()))
            if self.old_reference:
                self.evidence.notes.append(
                    f"in {self.old_reference} case(s) the incumbent's own reference gave other bits than today's; its "
                    "results were judged by today's"
                )
            return Found(self.evidence, self._tally())
        except WorkerLost as lost:
            return Lost(self.incumbent_case.as_json(), str(lost), lost.late)

    def _each(self, source: Source, cases: Iterable[Chosen], *, again: bool | None = None) -> None:
        """Runs these cases until enough of them are worse; cases that a user stated run in any case."""
        self.source = source
        for chosen in cases:
            if self.worse >= _ENOUGH and source in ("example", "fuzzed"):
                return
            self._run(chosen, again=again)

    def _run(self, chosen: Chosen, *, again: bool | None) -> None:
        case = chosen.case
        dead = self.dead.get(case.key()) if case is not None else None
        if case is not None and dead is not None and dead.candidate is not None:
            self.judging.count_case()
            ours = dead.candidate
            theirs = dead.incumbent or self._other(case, again=True)
            self._add(case, ours, theirs, *classify(ours, theirs))
            return
        if again is None:
            again = self.judging.costs_more()
        if case is not None and dead is None and self.beside is not None:
            self.incumbent_case = case
            self._judging = case.key(), again, self.beside.judging(case, again=again)
        result = self.judging.run(chosen, again=again)
        if result is not None:
            self._compare(result, again=again)

    def _compare(self, result: CaseResult, *, again: bool) -> None:
        """Runs the incumbent on the candidate's case, which after a failure may have other values than planned."""
        case, ours = result.case, ran(result, self.context.progress.refusals, self.spec.allow)
        dead = self.dead.get(case.key())
        theirs = dead.incumbent if dead is not None and dead.incumbent is not None else self._other(case, again=again)
        standing, reason = classify(ours, theirs)
        if standing == "worse" and theirs.verdict == "pass" and self.worse < _CONFIRMED:
            # The incumbent may have skipped costly checks here. A check that depends on chance gets three tries.
            for _ in range(3 if ours.check == "repeat" else 1):
                theirs = self._other(case, again=True, alone=True)
                if theirs.verdict != "pass":
                    break
            standing, reason = classify(ours, theirs)
        if "rejected" in (ours.verdict, theirs.verdict) or theirs.check == "crash":
            self._add(case, ours, theirs, standing, reason, result)
            return
        if ours.verdict == "pass" and theirs.seed is not None:
            case = case.with_(seed=theirs.seed)  # the incumbent failed at other values of this case
        self.judging.note({"case": case.as_json(), "cases": self.tally.cases})
        measuring = self.beside.measuring(case) if self.beside is not None else None
        mine = self.kernel.measure(case)
        self._note_incumbent(case)
        with self.context.clock.phase("incumbent"):
            other = self.opponent.measure(case) if measuring is None else measuring()
        if mine.inputs != other.inputs:
            why = other.problem or "the incumbent's spec makes other inputs of it"
            standing, reason = classify(ours, Ran("rejected", FOREIGN, why))
            self._add(case, ours, theirs, standing, reason, result)
            return
        errors: dict[str, tuple[float, float]] = {}
        if mine.outputs and other.outputs:
            logical = make_inputs(self.spec, case, self.context.device)
            reference, expected = reference_of(self.context, case, logical)
            if mine.reference != other.reference:
                theirs = self._by_reference_of_today(theirs, other, reference, expected)
                standing, reason = classify(ours, theirs)
            errors = self._errors(mine, other, reference, expected) if standing == "passes" else {}
        pair = self._add(case, ours, theirs, standing, reason, result)
        if standing == "passes":
            self.passed.append(case.key())
            unmeasured = mine.problem or other.problem
            memory = None if mine.memory is None or other.memory is None else (mine.memory, other.memory)
            pair = replace(pair, errors=errors, memory=memory, unmeasured=unmeasured)
            self.evidence.pairs[-1] = self._counted(case, pair)

    def _add(
        self, case: Case, ours: Ran, theirs: Ran, standing: Standing, reason: str, result: CaseResult | None = None
    ) -> Pair:
        described = describe(self.spec, case)
        full = case.as_json() if standing in _IN_FULL else None
        pair = Pair(str(described["text"]), self.source, ours, theirs, standing, reason, full)
        self.evidence.pairs.append(pair)
        self.worse += standing == "worse"
        if standing == "worse" and result is not None and self.regression is None:
            self.regression = result
        return pair

    def _by_reference_of_today(self, theirs: Ran, found: Measured, reference: ReferenceRun, expected: Outputs) -> Ran:
        """The incumbent's verdict by today's reference, if its own reference gave other results."""
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
                ours = metric_finding.error(mine.outputs[name], right, self.spec.tolerance)
                theirs = metric_finding.error(other.outputs[name], right, self.spec.tolerance)
                if ours is not None and theirs is not None:
                    found[name] = (ours, theirs)
        return found

    def _counted(self, case: Case, pair: Pair) -> Pair:
        """The pair with both launch counts if they are exact, for a few cases and those that seem to differ."""
        ours, theirs = pair.candidate, pair.incumbent
        if self.context.device.type != "cuda" and not (ours.triton and theirs.triton):
            return pair  # what runs may be a path for the CPU
        if self.counted >= (_COUNTED if ours.work == theirs.work else _MOST_COUNTED):
            return pair
        self.counted += 1
        self.judging.note({"case": case.as_json(), "cases": self.tally.cases})
        mine = self.kernel.count(case)
        self._note_incumbent(case)
        other = self.opponent.count(case)
        if not isinstance(mine, Counts) or not isinstance(other, Counts) or mine.doubts or other.doubts:
            return pair
        if mine.method != other.method:
            return pair
        more = compare_names(dict(other.names), dict(mine.names))
        return replace(pair, launches=(mine.kernels, other.kernels), more=more)

    def _other(self, case: Case, *, again: bool, alone: bool = False) -> Ran:
        begun, self._judging = self._judging, None
        self._note_incumbent(case)
        with self.context.clock.phase("incumbent"):
            if begun is not None and begun[:2] == (case.key(), again) and not alone:
                return begun[2]()
            return self.opponent.judge(case, again=again, alone=alone)

    def compiling(self, case: Case) -> None:
        """Notes for the supervising process that something is compiled or timed."""
        self.judging.note({"case": case.as_json(), "cases": self.tally.cases, "arm": COSTS, COMPILING: "both kernels"})

    def _note_incumbent(self, case: Case) -> None:
        """Notes for the supervising process that the incumbent runs a case and may compile."""
        self.incumbent_case = case
        compiling = {COMPILING: "the incumbent"} if self.context.device.type == "cuda" else {}
        self.judging.note({"case": case.as_json(), "cases": self.tally.cases, "arm": "incumbent", **compiling})

    def _tally(self) -> Tally:
        """The tally of the candidate's cases, with the smallest case that only the candidate fails."""
        if self.regression is not None:
            self.judging.find(self.regression)
        tally = self.judging.conclude()
        failure = tally.failure
        if self.regression is None:
            if failure is not None and failure.verdict.check == "vacuity":
                self.evidence.broken = f"the test could not have failed: {failure.verdict.reason}"
            tally.failure = None
            return tally
        if failure is not None and failure.case is not None and failure.case != self.regression.case:
            theirs = self._other(failure.case, again=True, alone=True)
            if theirs.verdict == "fail":
                failed = self.regression.failure
                assert failed is not None
                tally.failure = self.judging.minimum(self.regression, failed, shrink=False)
        return tally
