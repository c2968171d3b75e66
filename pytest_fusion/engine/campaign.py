"""`Campaign`: all cases of one test in one process: pinned, boundaries, random search; then the smallest failure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.plan import in_dtype
from pytest_fusion.checks import registry
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.configs import configs
from pytest_fusion.checks.context import CaseResult
from pytest_fusion.checks.verdict import TOO_EXPENSIVE
from pytest_fusion.engine.cases import Chosen
from pytest_fusion.engine.judging import Judging, Note
from pytest_fusion.engine.pace import longest
from pytest_fusion.engine.request import Request
from pytest_fusion.engine.tally import Tally
from pytest_fusion.errors import SpecError
from pytest_fusion.run.clock import processor_s
from pytest_fusion.run.compiled import timed_compilations
from pytest_fusion.run.process.shared_cases import PATIENCE_S, Shared, Uncompiled
from pytest_fusion.spec.dtypes import NARROW
from pytest_fusion.spec.fusion_spec import FusionSpec

# The least time of the search for more failures: some fifty small cases of the CPU lane. Load changes no CPU seconds.
_MORE_SECONDS = 2.0
# The most findings of one replayed case.
_MOST = 8


class Campaign:
    """Runs the cases of one spec as ``request`` wants them.

    ``known`` cases failed in earlier runs. ``ahead``: cases that other processes compile.
    """

    def __init__(
        self,
        spec: FusionSpec,
        request: Request,
        outer: Any,
        extra: Mapping[str, Any],
        note: Note = lambda _: None,
        *,
        dry: bool = False,
        drawn: int | None = None,
        known: Sequence[Case] = (),
        ahead: Shared | None = None,
    ) -> None:
        self.spec, self.profile, self.outer, self.nodeid = spec, request.profile, outer, request.nodeid
        self.ahead = ahead or Shared()
        self.judging = Judging(spec, request, outer, extra, note, dry=dry)
        self.cases, self.budget = self.judging.cases, self.judging.budget
        self.first, self.known = request.first, known
        # In seconds of the processor: when it began, when the first failure was found, when the search for more ends.
        self._begun, self._found_at, self._until = processor_s(), math.inf, math.inf
        # The most ordinary case that passed: checks that wait for the end run on it.
        self._usual: Case | None = None
        # The seed of the search where none was given: one that is drawn anew each time, or Hypothesis's own.
        self._drawn = None if searching.user_settings(outer).derandomize else drawn

    @property
    def ended(self) -> bool:
        """Whether a failure was found, and the time to find others is up."""
        return processor_s() >= self._until

    def run(self) -> Tally:
        """The tally of all phases. Raises ``SpecError`` where the spec does not hold, unless a failure came first."""
        try:
            with timed_compilations(processor_s, self._add_compiling):
                self._phases()
        except SpecError:
            if not self.judging.failing:
                raise
        return self._conclude()

    def _add_compiling(self, seconds: float) -> None:
        self.budget.compiling += seconds

    def _phases(self) -> None:
        for case in self.known:
            self._known(case)
        self._each(self.cases.examples(self.outer))
        generate = not self.ended and searching.wants_phase(self.outer, "generate")
        if self.profile.large:
            if generate:
                self._each(self.cases.far())
            return
        if generate:
            self._each(self.cases.probes())
            self._follow(configs.first_calls(self.judging.context))
            self._each(self.cases.boundary(self.ahead))
            self._follow(configs.further(self.judging.context, self.cases.plan, self.cases.base))
        if not self.ended:
            self._search()
        context = self.judging.context
        if not self.judging.failing and self._usual is not None and registry.closes(context):
            self.judging.context = replace(context, focus=replace(context.focus, closing=True))
            self._run(Chosen(self._usual))

    def _known(self, case: Case) -> None:
        """A case that failed in an earlier run, judged by every check."""
        if self.ended:
            return
        self.judging.context = replace(self.judging.context, complete=True)
        result = self.judging.judge(case, again=True)
        if result.rejected is None:
            self._find(result)
        self.judging.context = replace(self.judging.context, complete=False)

    def replay(self, case: Case, *, explained: bool = True, every_config: bool = False) -> Tally:
        """The tally of one case; ``every_config`` judges a case that passes with the other autotune configs too."""
        judging = self.judging
        judging.context = replace(judging.context, complete=True)
        result = judging.judge(case, again=True)
        # A failure ends the case: once it is known, judging again shows the others.
        for _ in range(_MOST):
            ended, known = result.failure, judging.context.focus.known
            if result.rejected is None:
                judging.find(result, shrink=False, explained=explained)
            if ended is None or self.first or not explained or judging.context.focus.known == known:
                break
            result = judge_case(judging.context, case, again=True)
        for other in configs.every(judging.context, case) if every_config and not judging.failing else ():
            result = judging.judge(other, again=False)
            judging.find(result, shrink=False, explained=explained)
        return self._conclude(whole=False)

    def compile_share(self, turns: Iterator[int]) -> None:
        """Compile, without launching, the launches of those cases whose turn it is here (see `compile_ahead`).

        Longest first where all are run: a row of 65,537 in one block of 4 warps takes 29 s for an rms_norm and 85 s for
        its backward. A test with a budget may not reach these. The search contributes its first half; the second
        depends on errors that Hypothesis has seen.
        """
        turn = next(turns)
        self._each(self.cases.probes())
        ordered = list(enumerate(self.cases.covering()))
        if self.budget.seconds == math.inf:
            ordered.sort(key=lambda one: -longest(one[1][1])[1])
        # A second time for those that the test had begun when their turn was, and put off.
        while turn < 2 * len(ordered):
            number, (position, choice) = ordered[turn % len(ordered)]
            if self.ahead.take(number):
                self._run(self.cases.build(choice, position))
                self.ahead.finish(number)
            turn = next(turns)
        drawn = itertools.count(2 * len(ordered))

        def wanted() -> bool:
            nonlocal turn
            now = next(drawn)
            while turn < now:
                turn = next(turns)
            return turn == now

        self._search(wanted)

    def _conclude(self, *, whole: bool = True) -> Tally:
        tally = self.judging.conclude(whole=whole)
        if self._until < math.inf:
            tally.more_s = processor_s() - self._found_at
        return tally

    def _each(self, chosen: Iterable[Chosen]) -> None:
        for one in chosen:
            if self.ended:
                return
            self._run(one)

    def _run(self, chosen: Chosen, *, again: bool | None = None, further: bool = False) -> CaseResult | None:
        try:
            with self.ahead.leaving(further=further):
                result = self.judging.run(chosen, again=again)
        except Uncompiled:
            if not self.ahead.put_off:
                self.judging.reject(TOO_EXPENSIVE, f"a kernel takes more than {PATIENCE_S:g} s to compile")
            return None
        if result is None or result.rejected is not None:
            return result
        if result.findings:
            self._find(result)
            self._in_float32(result)
        elif chosen.choice is not None and (self._usual is None or _rank(result.case) > _rank(self._usual)):
            self._usual = result.case
        return result

    def _in_float32(self, result: CaseResult) -> None:
        """Run a case that is less accurate in 16 bits again: in float32 rounding excuses no term that was left out."""
        if result.case.dtype not in NARROW or "float32" not in self.spec.dtypes or self.ended:
            return
        if any(verdict.code == "less-accurate" for verdict in result.findings):
            self._run(Chosen(in_dtype(self.spec, result.case, "float32")), again=False)

    def _find(self, result: CaseResult) -> None:
        """Enter what a case shows; the first that fails the test sets the time of the search for others."""
        failing, begun, compiling = self.judging.failing, processor_s(), self.budget.compiling
        self.judging.find(result)
        now = processor_s()
        self.budget.begun += now - begun
        self.budget.compiling = compiling
        if self.judging.failing and not failing:
            self._found_at, self._until = now, now + (0.0 if self.first else max(_MORE_SECONDS, now - self._begun))
        elif failing:
            self._until += now - begun  # the search gets back the time that shrinking and explaining others takes

    def _follow(self, cases: Iterator[Case]) -> None:
        """Run cases that follow from the configs with which autotuned kernels were launched."""
        if not self.profile.long or not self.judging.context.on(configs.NAME):
            return
        for case in cases:
            if self.budget.over or self.ended:
                return
            self._run(Chosen(case), again=False, further=True)

    def _search(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Run random cases, only those for which ``wanted()`` is true."""

        def run(case: Case, choice: Mapping[str, Any]) -> float | None:
            if not wanted():
                return None
            result = self._run(Chosen(case, choice), further=True)
            if self.ended or self.budget.late:
                raise searching.SearchFailed
            ratio = None if result is None else result.ratio
            return math.log2(ratio) if ratio is not None and 0 < ratio < math.inf else None

        # Random sizes occur in all dims at once; an eighth of the covering phase's limits keeps the cases as cheap.
        limits = self.cases.limits
        limits = replace(limits, elements=limits.elements // 8, work=limits.work // 8)
        self.judging.tally.statistics = searching.search(
            replace(self.cases.plan, limits=limits),
            run,
            outer=self.outer,
            cases=0 if self.budget.over else int(min(self.profile.search, self.budget.left)),
            seed=self._drawn if self.cases.seed is None else self.cases.base >> 1,
            database_key=self.nodeid,
            save=not self.judging.dry,
        )


def _rank(case: Case) -> tuple[bool, bool, int]:
    """How much a case shows: sizes above 1, ordinary values, and how few inputs are absent."""
    sizes = [n for size in case.sizes.values() for n in (size if isinstance(size, tuple) else (size,))]
    return min(sizes, default=0) > 1, all(tensor.ordinary for tensor in case.tensors.values()), -len(case.absent)
