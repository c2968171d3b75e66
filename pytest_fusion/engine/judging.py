"""`Judging`: judges the cases of one kernel in one process and adds up the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.describe import describe
from pytest_fusion.checks import deterministic, multiprocessors, registry
from pytest_fusion.checks.case_judge import dry_run, judge_case
from pytest_fusion.checks.configs import configs
from pytest_fusion.checks.context import CaseResult, Context, Progress
from pytest_fusion.checks.verdict import HAZARDS, NOT_MODELLED, Verdict
from pytest_fusion.diagnosis.diagnose import UNEXPLAINED
from pytest_fusion.engine import unjudged
from pytest_fusion.engine.cases import Cases, Chosen
from pytest_fusion.engine.minimum import Minimum
from pytest_fusion.engine.pace import REFERENCE, SHARES
from pytest_fusion.engine.profiles import Profile
from pytest_fusion.engine.request import Request
from pytest_fusion.engine.tally import Failure, Tally
from pytest_fusion.interpreter.bridge import lane_state
from pytest_fusion.interpreter.bridge.named_device import standing_in
from pytest_fusion.interpreter.control import executor
from pytest_fusion.run import compilers, pristine
from pytest_fusion.run.clock import Clock, processor_s
from pytest_fusion.run.process import preload
from pytest_fusion.run.process.shared_cases import Uncompiled
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import plural

# So many findings are shrunk and explained, in so many times the seconds for cases; the rest are listed. A failure gets
# two seconds however late it is: enough for what most are, strides that are not taken (FlagGems' topk).
_SHRUNK, _TIMES, _HAZARD, _LATE_S = 8, 2, 0.25, 2.0
# Checks whose verdicts a wrong result does not explain.
_UNSPOILED = ("inputs", "launches", "device")
# Changed values at the same addresses cost a second reference run: the first cases get one, then one in twelve.
_AGAIN_FIRST, _AGAIN_EVERY = 4, 12

_Noted = TypeVar("_Noted", str, tuple[str, str])
Note = Callable[[dict[str, Any]], None]


class Judging:
    """Judges cases of ``spec``. ``note`` gets each before it runs, to name a crash; ``dry`` only compiles kernels."""

    def __init__(
        self,
        spec: FusionSpec,
        request: Request,
        outer: Any,
        extra: Mapping[str, Any],
        note: Note,
        *,
        share: float = 1.0,
        dry: bool = False,
    ) -> None:
        device, profile = torch.device(request.device), request.profile
        self.spec, self.profile, self.outer, self.dry = spec, profile, outer, dry
        if device.type != "cpu" and not dry:
            # Starting CUDA takes one second, and nine beside 46 other processes (an H200): not out of the budget.
            torch.zeros(1, device=device)
        self.cases = Cases(spec, request, outer, share)
        self.budget = self.cases.budget
        self._note, self._last = note, dict[str, Any]()
        self.context = Context(
            spec,
            device,
            extra,
            programs=programs_of(profile, device),
            reference_s=SHARES[REFERENCE] * profile.seconds,
            deep=profile.name == "deep",
            timed=self.budget.seconds < math.inf,
            progress=Progress(Clock(self.repeat_note)),
            began=self._began,
        )
        # What earlier tests of this process changed is not charged to this one.
        pristine.take()
        self._noted, self._alone = lane_state.counted_notes(), executor.fallbacks()
        self._uncompiled = compilers.given_up()
        self.tally = Tally()
        # Findings, each on its smallest case, in the order of discovery.
        self.found: list[Failure] = []
        # Seconds of the processor that are left to shrink and explain.
        self._left_s = _TIMES * self.budget.seconds
        self._took_s = 0.0
        # Failures by identity, met only in cases that an earlier failure had spoiled.
        self._behind: dict[str, Verdict] = {}

    def _began(self, check: str) -> None:
        self.note({**self._last, "reached": check})

    def note(self, data: dict[str, Any]) -> None:
        """Report what runs now, with what was found."""
        found = [
            {"verdict": one.verdict.as_json(), "cause": one.explained.cause, "case": one.case.as_json()}
            for one in self.found
            if one.case is not None
        ]
        self._last = {**data, "findings": found} if found else data
        self._note(self._last)

    def repeat_note(self) -> None:
        """Report again what runs; called while its calls end."""
        self.note(self._last)

    def costs_more(self) -> bool:
        """Whether the costlier checks run on the next case."""
        return self.tally.judged < _AGAIN_FIRST or self.tally.judged % _AGAIN_EVERY == 0

    def run(self, chosen: Chosen, *, again: bool | None = None) -> CaseResult | None:
        """Judge a chosen case and report it to the ``cases``; ``None`` where there is no case to judge."""
        if chosen.case is None:
            self.reject(*chosen.refused)
            return None
        clock = self.context.clock
        clock.forget()
        case = multiprocessors.with_few(chosen.case)
        self.context.progress.probing = self.cases.probing
        if chosen.choice is not None and not self.cases.probing:
            case = configs.assigned(self.context, case, self.cases.plan.factors)
        result = self.judge(case, again=again)
        if result.rejected is None and chosen.choice is not None:
            self.cases.judged(chosen.choice)
        self.cases.ran(chosen, result, clock)
        return result

    def judge(self, case: Case, *, again: bool | None) -> CaseResult:
        """Judge one case as it stands and add it up."""
        tally = self.tally
        self.count_case()
        self.note({"case": case.as_json(), "cases": tally.cases})
        if again is None:
            again = self.costs_more()
        begun = processor_s()
        try:
            with self.context.clock.phase("plugin"):
                result = judge_case(self.context, case, again=again) if not self.dry else dry_run(self.context, case)
        except Uncompiled:
            tally.cases -= 1
            self.budget.spent -= 1
            raise
        self._took_s = processor_s() - begun
        configs.note(self.context, result)
        if self.profile.large:
            unjudged.unless_far(self.context, result)
        if result.rejected is not None:
            tally.reject(result.rejected)
        else:
            tally.judge(self.spec, case, result.verdicts)
            self.budget.compared += result.compared
        return result

    def count_case(self) -> None:
        """Count a case that runs, or that another process has run."""
        self.tally.cases += 1
        self.budget.spent += 1

    def reject(self, kind: str, reason: str) -> None:
        """Count a case that could not be built, or was left out."""
        self.context.progress.refusals.setdefault(kind, reason)
        self.tally.reject(kind)

    def find(self, result: CaseResult, *, shrink: bool = True, explained: bool = True) -> None:
        """Enter the new findings of a case, each on its smallest case; ``explained`` adds the cause."""
        # Where a known failure has spoiled the result, a verdict without a cause may only follow from it and does not
        # count.
        spoiled = result.spoiled_by()
        for verdict in result.findings:
            if spoiled is not None and verdict.check not in _UNSPOILED and not verdict.cause:
                self._behind.setdefault(verdict.identity, verdict)
                continue
            late = self._left_s <= 0 and not verdict.failed
            if len(self.found) >= _SHRUNK or not explained or late:
                failure = Failure(verdict, result.case, describe(self.spec, result.case))
            else:
                begun = processor_s()
                failure = self.minimum(result, verdict, shrink=shrink)
                self._left_s -= processor_s() - begun
            self._behind.pop(verdict.identity, None)
            if not self._same(failure):
                self.found.append(failure)
            if failure.verdict.check == verdict.check:  # one config's bug hides no others
                focus = self.context.focus
                self.context = replace(self.context, focus=replace(focus, known=focus.known | {verdict.identity}))

    def _same(self, failure: Failure) -> bool:
        """Whether it was found before with other values or in another dtype."""

        def key(found: Failure) -> tuple[Any, ...]:
            return found.code, found.verdict.check, found.verdict.output, found.case.sizes if found.case else None

        return failure.code != UNEXPLAINED and any(key(other) == key(failure) for other in self.found)

    def fails(self, failure: Failure) -> bool:
        """Whether a finding is a failure that the spec does not allow."""
        return failure.verdict.failed and failure.code not in self.spec.allow

    @property
    def failing(self) -> bool:
        """Whether something was found that fails the test."""
        return any(map(self.fails, self.found))

    def conclude(self, *, whole: bool = True) -> Tally:
        """The tally of all cases; not ``whole``: one case was replayed, so there is no conclusion on the test."""
        tally, cases, failing = self.tally, self.cases, self.failing
        tally.blocks = list(cases.blocks)
        tally.coverage = cases.pairs.as_json()
        tally.notes = self._notes()
        if whole and self.budget.late:
            tally.coverage |= {"seconds": self.budget.allowed, "unmet": cases.pairs.unmet()}
            tally.notes.append(_cut(tally))
        self._conclude_checks(failing)
        if whole:
            tally.notes += deterministic.notes(self.context, 0 if failing else tally.judged)
        if tally.judged == 0:
            self._nothing_judged(whole=whole)
        elif whole and not failing:
            self._sufficient()
        elif whole:
            self._conclude_all()
        codes = list(HAZARDS)
        ordered = sorted(
            self.found,
            key=lambda one: (not self.fails(one), codes.index(one.verdict.code) if one.verdict.code in codes else -1),
        )
        if tally.failure is None and failing:
            tally.failure = ordered.pop(0)
        tally.others = ordered
        tally.behind = [f"{one.check}: {one.reason}" for one in self._behind.values()]
        tally.imported = preload.needed()
        tally.phases = {name: round(seconds, 4) for name, seconds in self.context.clock.seconds.items()}
        return tally

    def minimum(self, found: CaseResult, verdict: Verdict, *, shrink: bool) -> Failure:
        """The finding ``verdict`` of ``found`` on the smallest case."""
        plan, blocks = self.cases.plan, self.cases.blocks
        # A hazard fails no test, and smaller cases cost too: on a GPU each may have a kernel to compile, and those of
        # mamba-ssm's chunked scan took 8 s.
        few = min(self._left_s, _HAZARD * self.budget.seconds)
        seconds = max(self._left_s, _LATE_S) if verdict.failed else few
        shrink = shrink and (verdict.failed or self._took_s < seconds)
        minimum = Minimum(self.context, plan, self.outer, blocks, self.tally.cases, self.note, seconds)
        return minimum.of(found, verdict, shrink=shrink)

    def _notes(self) -> list[str]:
        """Notes for the reader on how the cases were run."""
        progress = self.context.progress
        notes = [f"the lanes do not know {name}; it was priced in float32" for name in sorted(progress.fallbacks)]
        notes += [f"on a GPU this differs: {note}" for note in _new(self._noted, lane_state.counted_notes())]
        uncompiled = _new(self._uncompiled, compilers.given_up())
        notes += [f"{stopped}; calls that fit none of them ran uncompiled" for stopped in uncompiled]
        if standing_in():
            notes.append("the kernel names a CUDA device; on this one without, the CPU stood in for it")
        reasons = dict(reversed(_new(self._alone, executor.fallbacks())))
        notes += [f"{kernel} ran one program after the other: {reason}" for kernel, reason in reasons.items()]
        if progress.unrepeated:
            notes.append(f"{progress.unrepeated} statistical suspicion(s) were not repeated by fresh values")
        return notes + registry.notes(self.context)

    def _conclude_checks(self, failing: bool) -> None:
        """Enter the checks that could not run here, and those that conclude from all cases together."""
        tally = self.tally
        for name, reason in registry.missing(self.spec, self.context.device).items():
            tally.checks.setdefault(name, {"verdict": "unknown", "reason": reason, "cases": 0})
        if failing:
            return
        if tally.judged and NOT_MODELLED in tally.rejected:
            reason = unjudged.not_modelled(tally.cases, tally.rejected, self.context.progress.refusals)
            tally.checks["error"] = {"verdict": "unknown", "reason": reason, "cases": tally.judged}
        for verdict in registry.summaries(self.context):
            entry = tally.checks.setdefault(verdict.check, {"verdict": "pass", "reason": "", "cases": 0})
            # A pass without a reason adds evidence, and is no verdict on what the cases left unknown.
            concludes = verdict.status != "pass" or verdict.reason
            judged = {"verdict": verdict.status, "reason": verdict.reason} if concludes else {}
            entry.update(**judged, **verdict.facts)

    def _nothing_judged(self, *, whole: bool) -> None:
        tally, refusals = self.tally, self.context.progress.refusals
        if self.profile.large:
            tally.notes.append(unjudged.no_far_case(tally.cases, tally.rejected, refusals))
            return
        if whole:
            unjudged.must_be_made(self.spec, tally.rejected, refusals)
        tally.failure = Failure(unjudged.nothing_judged(tally.rejected, refusals), None)

    def _sufficient(self) -> None:
        """Fail the test, or make it `unknown`, where its cases could not have shown a wrong kernel."""
        tally, refusals = self.tally, self.context.progress.refusals
        only_empty = f"{tally.judged} case(s) were judged, of empty outputs alone"
        if not self.budget.compared and tally.rejected:
            # Any kernel gets empty outputs right: the same as no case at all.
            verdict = unjudged.nothing_judged(tally.rejected, refusals, beside=f"; {only_empty}")
            tally.failure = Failure(verdict, None)
        elif not self.budget.compared:
            tally.empty = only_empty
        else:
            self._conclude_all()

    def _conclude_all(self) -> None:
        """Enter the verdicts on all cases together; after a failure only of checks that do not depend on it."""
        tally = self.tally
        for verdict in registry.conclusions(self.context, tally.judged, failing=self.failing):
            if tally.checks.get(verdict.check, {}).get("verdict") != "fail":
                status = "pass" if verdict.status == "hazard" else verdict.status
                entry = {"verdict": status, "reason": verdict.reason, "cases": tally.judged}
                tally.checks[verdict.check] = entry
            if verdict.status in ("fail", "hazard"):
                self.found.append(Failure(verdict, None))


def _new(before: Mapping[_Noted, int], now: Mapping[_Noted, int]) -> list[_Noted]:
    """What was counted since."""
    return [key for key, count in now.items() if count > before.get(key, 0)]


def _cut(tally: Tally) -> str:
    """What a reader should know of a test whose budget is used up."""
    seconds, unmet = tally.coverage["seconds"], tally.coverage["pairs"] - tally.coverage["covered"]
    example = tally.coverage["unmet"][0].partition(" | ")[0] if unmet else ""
    pairs = f"{plural(unmet, 'pair')} did not meet, such as {example}" if unmet else "all pairs met"
    return f"the budget of {seconds:g} s (--fusion-seconds) ended the test after {plural(tally.cases, 'case')}: {pairs}"


def programs_of(profile: Profile, device: torch.device) -> int:
    """How many programs a launch may have: interpreted ones cost time."""
    return profile.programs if device.type == "cpu" else 2**62
