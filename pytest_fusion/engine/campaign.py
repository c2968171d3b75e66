"""All cases of one test, in one process: pinned ones, boundaries, random search; then the minimum of what failed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import covering, large_offsets
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.case.plan import Limits, Plan, build, make_plan
from pytest_fusion.case.stated import stated_case
from pytest_fusion.checks import deterministic, multiprocessors, registry
from pytest_fusion.checks.case_judge import dry_run, judge_case
from pytest_fusion.checks.configs import configs
from pytest_fusion.checks.context import CaseResult, Context, Focus, Progress
from pytest_fusion.checks.rejections import IMPOSSIBLE, NOT_MODELLED, TOO_EXPENSIVE
from pytest_fusion.engine import unjudged
from pytest_fusion.engine.minimum import Minimum
from pytest_fusion.engine.pace import REFERENCE, SHARES, Pace
from pytest_fusion.engine.profiles import Profile
from pytest_fusion.engine.tally import Failure, Tally
from pytest_fusion.interpreter.bridge import observers
from pytest_fusion.interpreter.bridge.named_device import standing_in
from pytest_fusion.interpreter.control import executor
from pytest_fusion.interpreter.launch import Launch, likely_blocks
from pytest_fusion.run import compilers, pristine
from pytest_fusion.run.clock import Clock
from pytest_fusion.run.process import preload
from pytest_fusion.spec.fusion_spec import FusionSpec

# Changed values at the same addresses cost a second reference run: the first cases, then one in twelve.
_AGAIN_FIRST, _AGAIN_EVERY = 4, 12
_PROBE_SIZES = (5, 40)

_Noted = TypeVar("_Noted", str, tuple[str, str])


class Campaign:
    """Runs the cases of one spec. ``note`` is told each case before it runs, so that a crash has a name."""

    def __init__(
        self,
        spec: FusionSpec,
        *,
        device: torch.device,
        profile: Profile,
        outer: Any,
        nodeid: str,
        extra: Mapping[str, Any],
        seed: int | None = None,
        max_cases: int | None = None,
        note: Callable[[dict[str, Any]], None] = lambda _: None,
        dry: bool = False,
        drawn: int | None = None,
    ) -> None:
        self.spec, self.profile, self.outer, self.nodeid = spec, profile, outer, nodeid
        clock = Clock(lambda: note(self._last))
        programs = _programs(profile, device)
        deep = profile.name == "deep"
        self.bench = Context(
            spec,
            device,
            extra,
            programs=programs,
            reference_s=SHARES[REFERENCE] * profile.seconds,
            deep=deep,
            progress=Progress(clock),
            began=self._began,
        )
        # What earlier tests of this process left is theirs.
        pristine.take()
        self._noted, self._alone = observers.counted_notes(), executor.fallbacks()
        self._uncompiled = compilers.given_up()
        self.tally = Tally()
        self.limits = limits_of(profile, device)
        forced = searching.forced_seed(outer)
        self.seed = seed if seed is not None else forced if isinstance(forced, int) else None
        self.budget = max_cases if max_cases is not None else searching.max_examples(outer)
        self._note, self._last = note, dict[str, Any]()
        self.base = counter_random.mix("campaign", nodeid, self.seed or 0)
        self.pools = searching.pools(spec, self.base)
        self.plan: Plan = make_plan(spec, pools=self.pools, limits=self.limits)
        self.pairs = covering.PairCount(self.plan)
        self.launches: list[list[Launch]] = []
        self.failing: CaseResult | None = None
        # The first case that passed: what checks leave for the end is asked of it.
        self._usual: Case | None = None
        # A judged case had an element to compare.
        self._compared = False
        self.dry = dry
        # The seed of the search where none was asked for: one that is drawn anew each time, or Hypothesis's own.
        self._drawn = None if searching.user_settings(outer).derandomize else drawn

    def _began(self, check: str) -> None:
        self.note({**self._last, "reached": check})

    def note(self, data: dict[str, Any]) -> None:
        """Tell what runs now; told again while its calls come to an end."""
        self._last = data
        self._note(data)

    def run(self) -> Tally:
        """All phases until the first failure, and its minimum."""
        if searching.wants_phase(self.outer, "explicit"):
            self._pinned()
        generate = self.failing is None and searching.wants_phase(self.outer, "generate")
        if self.profile.large:
            if generate:
                self._far()
            return self.finish()
        if generate:
            self._probe()
            self._cover()
            self._past_blocks()
        if self.failing is None:
            self._search()
        if self.failing is None and self._usual is not None and registry.closes(self.spec, self.bench.device):
            self.bench = replace(self.bench, focus=Focus(closing=True))
            self._run(self._usual)
        return self.finish()

    def replay(self, case: Case, *, explained: bool = True) -> Tally:
        """One case alone, as it stands; not ``explained``, a failure has no diagnosis."""
        self.bench = replace(self.bench, complete=True)
        self._run_told(case, again=True)
        return self.finish(shrink=False, explained=explained)

    def asks_again(self) -> bool:
        """Whether the next case is one of those that more is asked of."""
        return self.tally.judged < _AGAIN_FIRST or self.tally.judged % _AGAIN_EVERY == 0

    def _left(self) -> float:
        return math.inf if self.budget is None else self.budget - self.tally.cases

    def _run(self, case: Case, choice: Mapping[str, Any] | None = None, *, again: bool | None = None) -> CaseResult:
        return self._run_told(multiprocessors.with_few(case), choice, again=again)

    def _run_told(self, case: Case, choice: Mapping[str, Any] | None = None, *, again: bool | None) -> CaseResult:
        tally = self.tally
        tally.cases += 1
        self.note({"case": case.as_json(), "cases": tally.cases})
        if again is None:
            again = self.asks_again()
        with self.bench.clock.phase("plugin"):
            result = judge_case(self.bench, case, again=again) if not self.dry else dry_run(self.bench, case)
        self.launches.append(result.launches)
        del self.launches[:-4]
        if self.profile.large:
            unjudged.unless_far(self.bench, result)
        if result.rejected is not None:
            tally.reject(result.rejected)
            return result
        tally.judge(self.spec, case, result.verdicts)
        self._compared = self._compared or result.compared
        if choice is not None and self._usual is None and result.failure is None:
            self._usual = case
        if choice is not None:
            self.pairs.add({**{name: levels[0] for name, levels in self.plan.factors.items()}, **choice})
        if result.failure is not None and self.failing is None:
            self.failing = result
        return result

    def _pinned(self) -> None:
        for position, example in enumerate(searching.explicit_examples(self.outer)):
            if self.failing is not None or self._left() <= 0:
                return
            self._run(
                stated_case(self.plan, example, counter_random.mix(self.base, "pin", position) >> 33, where="@example")
            )

    def _probe(self) -> None:
        """Two plain cases of different size: launch constants equal in both are block sizes worth going around."""
        seen: list[list[Launch]] = []
        for size in _PROBE_SIZES:
            choice = {f"dim {name}": size for name in self.spec.sized}
            if self._left() <= 0 or self.failing is not None or not self._attempt(choice, size):
                return
            seen.append(self.launches[-1])
        if len(seen) == len(_PROBE_SIZES):
            self.tally.blocks = likely_blocks(seen)
            if self.tally.blocks:
                blocks = tuple(self.tally.blocks)
                self.plan = make_plan(self.spec, blocks=blocks, pools=self.pools, limits=self.limits)
                self.pairs = covering.PairCount(self.plan)

    def _attempt(self, choice: Mapping[str, Any], position: int) -> bool:
        try:
            case = build(self.plan, choice, counter_random.mix(self.base, "cover", position) >> 33)
        except ImpossibleCase as error:
            self._reject(IMPOSSIBLE, str(error))
            return False
        self._run(case, choice)
        return True

    def _reject(self, kind: str, reason: str) -> None:
        """A case that never was."""
        self.bench.progress.refusals.setdefault(kind, reason)
        self.tally.reject(kind)

    def _cover(self) -> None:
        pace = Pace(self.profile.seconds)
        for position, choice in self._covering_choices():
            if self._left() <= 0 or self.failing is not None:
                return
            forbidden = pace.forbids(choice)
            if forbidden:
                self._reject(TOO_EXPENSIVE, forbidden)
                continue
            clock = self.bench.clock
            clock.forget()
            self._attempt(choice, position)
            if calls := clock.calls["fused"]:
                # On a GPU a first call tells what compiling takes, and tuning.
                pace.note(choice, sum(calls) / len(calls) if self.bench.device.type == "cpu" else min(calls))
            # Those without lanes take next to nothing.
            pace.note(choice, max(clock.calls["reference"], default=0.0), REFERENCE)

    def _past_blocks(self) -> None:
        """Sizes past the blocks of every config of an autotuned kernel: the covering phase knows those of one."""
        while self.profile.long and self._left() > 0 and self.failing is None:
            with configs.past_blocks(self.bench, self.plan, self.base) as case:
                if case is None:
                    return
                self._run(case, again=False)

    def _far(self) -> None:
        """Cases whose offsets do not fit 32 bits, and no others."""
        for case in large_offsets.cases(self.plan, self.base, self.profile.covering):
            if self._left() <= 0 or self.failing is not None:
                return
            self._run(case)

    def _covering_choices(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The choices of the covering phase with their positions, from which their seeds follow."""
        pairs = enumerate(itertools.islice(covering.mixed_rows(self.plan), self.profile.covering), 1000)
        if not self.profile.long:
            yield from pairs
            return
        long = [
            *enumerate(covering.long_rows(self.plan), 100_000),
            *enumerate(covering.broad_rows(self.plan), 200_000),
        ]
        yield from covering.within(self._left(), pairs, long)

    def compile_share(self, worker: int, workers: int) -> None:
        """Compile, without launching, what this worker's share of the cases will launch (see `prefetch`).

        Longest first: a row of 65,537 in one block of 4 warps takes 29 s for an rms_norm and 85 s for its backward. Of
        the search it is the first half: from there on Hypothesis aims at errors, which nobody knows here.
        """
        self._probe()
        longest = sorted(self._covering_choices(), key=lambda one: -_longest(one[1]))
        for count, (position, choice) in enumerate(longest):
            if count % workers == worker:
                self._attempt(choice, position)
        counted = itertools.count()
        self._search(lambda: next(counted) % workers == worker)

    def _search(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Random cases, of which those are run that are ``wanted`` when their turn comes."""
        cases = int(min(self.profile.search, self._left()))

        def run(case: Case, choice: Mapping[str, Any]) -> float | None:
            if not wanted():
                return None
            result = self._run(case, choice)
            if result.failure is not None:
                raise searching.SearchFailed
            ratio = result.ratio
            return math.log2(ratio) if ratio is not None and 0 < ratio < math.inf else None

        # Random sizes are met in all dims at once; an eighth of the covering phase's limits keeps such a case as cheap.
        limits = replace(self.limits, elements=self.limits.elements // 8, work=self.limits.work // 8)
        self.tally.statistics = searching.search(
            replace(self.plan, limits=limits),
            run,
            outer=self.outer,
            cases=cases,
            seed=self._drawn if self.seed is None else self.base >> 1,
            database_key=self.nodeid,
            kept=not self.dry,
        )

    def finish(self, *, shrink: bool = True, explained: bool = True) -> Tally:
        tally = self.tally
        tally.coverage = self.pairs.as_json()
        unpriced = sorted(self.bench.progress.fallbacks)
        tally.notes = [f"the lanes do not know {name}; it was priced in float32" for name in unpriced]
        noted = _new(self._noted, observers.counted_notes())
        tally.notes += [f"on a GPU this differs: {note}" for note in noted]
        for stopped in _new(self._uncompiled, compilers.given_up()):
            tally.notes.append(f"{stopped}; calls that fit none of them ran uncompiled")
        if standing_in():
            tally.notes.append("the kernel names a CUDA device; on this one without, the CPU stood in for it")
        reasons = dict(reversed(_new(self._alone, executor.fallbacks())))
        for kernel, reason in reasons.items():
            tally.notes.append(f"{kernel} ran one program after the other: {reason}")
        progress = self.bench.progress
        if progress.unrepeated:
            tally.notes.append(f"{progress.unrepeated} statistical suspicion(s) were not repeated by fresh values")
        tally.notes += registry.notes(self.bench)
        for name, reason in registry.missing(self.spec, self.bench.device).items():
            tally.checks.setdefault(name, {"verdict": "unknown", "reason": reason, "cases": 0})
        if tally.judged and NOT_MODELLED in tally.rejected and self.failing is None:
            said = unjudged.not_modelled(tally.cases, tally.rejected, progress.refusals)
            tally.checks["error"] = {"verdict": "unknown", "reason": said, "cases": tally.judged}
        if self.failing is None:
            for verdict in registry.summaries(self.bench):
                entry = tally.checks.setdefault(verdict.check, {"cases": 0})
                entry.update(verdict=verdict.status, reason=verdict.reason)
        if shrink:
            tally.notes += deterministic.notes(self.bench, 0 if self.failing is not None else tally.judged)
        if self.failing is not None:
            tally.failure = self._minimum(self.failing, shrink=shrink) if explained else _bare(self.failing)
        elif tally.judged == 0 and self.profile.large:
            tally.notes.append(unjudged.no_far_case(tally.cases, tally.rejected, progress.refusals))
        elif tally.judged == 0:
            if shrink:
                unjudged.must_be_made(self.spec, tally.rejected, progress.refusals)
            tally.failure = Failure(unjudged.nothing_judged(tally.rejected, progress.refusals), None)
        elif shrink and not self._compared and tally.rejected:
            tally.failure = Failure(unjudged.only_empty(tally.judged, tally.rejected, progress.refusals), None)
        elif shrink and not self._compared:
            tally.empty = unjudged.ONLY_EMPTY.format(tally.judged)
        elif shrink:
            for verdict in registry.conclusions(self.bench, tally.judged):
                tally.checks[verdict.check] = {
                    "verdict": verdict.status,
                    "reason": verdict.reason,
                    "cases": tally.judged,
                }
                if verdict.failed and tally.failure is None:
                    tally.failure = Failure(verdict, None)
        tally.imported = preload.needed()
        tally.phases = {name: round(seconds, 4) for name, seconds in self.bench.clock.seconds.items()}
        return tally

    def _minimum(self, found: CaseResult, *, shrink: bool) -> Failure:
        tally = self.tally
        minimum = Minimum(self.bench, self.plan, self.outer, tally.blocks, tally.cases, self.note)
        return minimum.of(found, shrink=shrink)


def _bare(found: CaseResult) -> Failure:
    assert found.failure is not None
    return Failure(found.failure, found.case)


def _longest(choice: Mapping[str, Any]) -> int:
    """The largest size that a choice states; a size by name ("one", a batch) is never a long one."""
    sizes = (size for name, size in choice.items() if name.startswith("dim "))
    return max((size for size in sizes if isinstance(size, int)), default=0)


def limits_of(profile: Profile, device: torch.device) -> Limits:
    """What a case may cost; a GPU bears float64 lanes of 2^23 elements and products of 2^32 terms."""
    if device.type == "cpu":
        return Limits(profile.elements, profile.work, profile.programs)
    return Limits(max(profile.elements, 1 << 23), max(profile.work, 1 << 32), profile.programs)


def _new(before: Mapping[_Noted, int], now: Mapping[_Noted, int]) -> list[_Noted]:
    """What was counted since."""
    return [key for key, count in now.items() if count > before.get(key, 0)]


def _programs(profile: Profile, device: torch.device) -> int:
    return profile.programs if device.type == "cpu" else 2**62
