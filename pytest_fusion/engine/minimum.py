"""The smallest case that still fails, and its likely cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.describe import describe, unseen_values
from pytest_fusion.case.plan import Plan
from pytest_fusion.checks import registry
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.configs import configs
from pytest_fusion.checks.context import CaseResult, Context
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.repeat.repeat import Variance
from pytest_fusion.checks.verdict import Verdict, WrongAccess
from pytest_fusion.diagnosis.causes import likely_cause
from pytest_fusion.diagnosis.diagnose import UNEXPLAINED, diagnose
from pytest_fusion.diagnosis.experiments import MAX_SECONDS, Lab
from pytest_fusion.diagnosis.shrink import MAX_RUNS, Shrinker
from pytest_fusion.diagnosis.text.error_map import marked, picture
from pytest_fusion.engine.tally import Failure
from pytest_fusion.errors import SpecError
from pytest_fusion.interpreter.launch import likely_blocks
from pytest_fusion.run.clock import processor_s
from pytest_fusion.spec.inputs import may_index

# A hazard fails no test, so its smallest case is worth less time.
_HAZARD_RUNS = 60
# Sizes, in the order of the dims, and seeds of a larger case, which shows more than the smallest.
_LARGER = ((3, 4, 5, 2), (5, 3, 2, 4))
_SEEDS = (0, 1)
# With so many seeds two or three give an upstream gradient a layout.
_FEW_SEEDS = 7

_Shown = tuple[CaseResult, Verdict] | None


@dataclass(frozen=True, slots=True)
class Minimum:
    """Finds it among the cases of ``plan``, after ``cases`` have run.

    ``blocks`` are likely block sizes, none where there was no time to learn them. ``note`` gets each case before it
    runs, so that a crash has a name. ``seconds`` of the processor are to shrink and explain, each half of them.
    """

    context: Context
    plan: Plan
    outer: Any
    blocks: Sequence[int]
    cases: int
    note: Callable[[dict[str, Any]], None]
    seconds: float

    def of(self, found: CaseResult, first: Verdict, *, shrink: bool) -> Failure:
        """The finding ``first`` of ``found`` on the smallest case; on its own case if not ``shrink``."""
        result, verdict = found, first
        # Checks after the failing one show nothing about it, and cost most where the failure is gone.
        focus = replace(self.context.focus, until=self._reached(found, first), sought=first.identity)
        context = replace(self.context, focus=focus)
        # A failure by chance gets three tries: a race may come out right. A race that the interpreter saw at its
        # accesses, or in an order that it chose, occurs each time.
        ordered = isinstance(first.evidence, Variance) and first.evidence.order is not None
        chance = first.check == "repeat" and not _seen(first) and not ordered

        show = partial(self._showing, context, first=first, noted=_noted(found, first))

        def fails(case: Case) -> bool:
            nonlocal result, verdict
            shown = show(case)
            if shown is not None:
                result, verdict = shown
            return shown is not None

        by_values = (first.inner or first.check) in ("values", "repeat", "invariance", configs.NAME) or (
            first.identity.endswith("bounds:surroundings")
        )
        # Other values make no smaller case of wrong random bits, which are wrong in many or in none, and of an access
        # seen to be wrong, unless addresses depend on values. An upstream gradient's layout may.
        by_values = by_values and ":rng-" not in first.identity
        if by_values and _seen(first) and not any(map(may_index, self.context.spec.inputs.values())):
            by_values, seeds = False, _FEW_SEEDS if found.reached == gradients.NAME else 1
        else:
            seeds = None
        until = processor_s() + self.seconds / 2
        shrinker = Shrinker(
            self.plan,
            found.case,
            fails,
            late=lambda: processor_s() >= until,
            max_runs=MAX_RUNS if first.failed else _HAZARD_RUNS,
            by_values=by_values,
            seeds=seeds,
            tries=3 if chance else 1,
        )
        if shrink and searching.wants_phase(self.outer, "shrink"):
            shrinker.run()
        if verdict.failed and result.case.configs and show(result.case.with_(configs={})) is None:
            verdict = configs.blamed(self.context, result, verdict)
        lab = self._lab(result, verdict) if verdict.failed else None
        where = self._map(result, verdict)
        larger = self._larger(show, lab) if lab is not None and where is not None and shrink else None
        diagnosis = diagnose(lab) if lab is not None else None
        return Failure(
            verdict,
            result.case,
            self._described(result.case),
            where,
            result.trace,
            shrinker.runs,
            larger=larger,
            position=self.cases,
            diagnosis=diagnosis,
        )

    def _described(self, case: Case) -> dict[str, Any]:
        spec = self.context.spec
        return describe(spec, case) | unseen_values(spec, case, self.context.device)

    def _map(self, result: CaseResult, verdict: Verdict) -> dict[str, Any] | None:
        """Where the errors are; a case has only the picture of what ended it."""
        if not (verdict.failed or result.failure is None):
            return None
        if result.evidence is not None:
            return picture(result.evidence, self.context.spec.tolerance)
        return marked(*result.differs) if result.differs is not None else None

    def _larger(self, show: Callable[[Case], _Shown], lab: Lab) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """A case with every size from 2 to 5 that shows the same, where a size of the smallest is below 2."""
        if all(size > 1 for size in lab.base.sizes.values() if isinstance(size, int)):
            return None
        for sizes in _LARGER:
            case = lab.grown(None, sizes)
            for seed in _SEEDS:
                shown = show(case.with_(seed=seed))
                found = self._map(*shown) if shown is not None else None
                if shown is not None and found is not None:
                    return self._described(shown[0].case), found
        return None

    @staticmethod
    def _reached(found: CaseResult, first: Verdict) -> str:
        """The last check in the registry that must run to show a finding; empty where the case's own calls show it."""
        if first.failed:
            return found.reached
        own = registry.of(first)
        return own.name if own is not None and own.run is not None and first.check != "repeat" else ""

    def _lab(self, result: CaseResult, verdict: Verdict) -> Lab:
        # A failure in the very first case leaves no time to learn block sizes; its own launches suggest some.
        blocks = self.blocks or likely_blocks([result.launches])
        found = _noted(result, verdict)

        def note(case: Case) -> None:
            self.note({"case": case.as_json(), "cases": self.cases, "found": found})

        seconds = min(MAX_SECONDS, self.seconds / 2)
        return Lab(self.context, self.plan, result.case, verdict, blocks=blocks, note=note, max_seconds=seconds)

    def _showing(self, context: Context, case: Case, first: Verdict, noted: dict[str, Any]) -> _Shown:
        """The result of a case that shows the same bug, and its verdict."""
        self.note({"case": case.as_json(), "cases": self.cases, "shrinking": True, "found": noted})
        try:
            with self.context.clock.phase("shrink"):
                result = judge_case(context, case, again=first.identity == "repeat:stale")
        except SpecError:
            return None  # the reference or a values function cannot take this case; the finding stands
        if result.rejected is not None or result.spoiled_by() is not None:
            return None
        return next(((result, verdict) for verdict in result.findings if verdict.identity == first.identity), None)


def _noted(result: CaseResult, verdict: Verdict) -> dict[str, Any]:
    """A finding as notes have it, so that it is not lost with the process."""
    cause = likely_cause(verdict) or UNEXPLAINED
    return {"verdict": verdict.as_json(), "cause": cause, "case": result.case.as_json()}


def _seen(verdict: Verdict) -> bool:
    """Whether the interpreter saw the access that is wrong."""
    return isinstance(verdict.evidence, WrongAccess)
