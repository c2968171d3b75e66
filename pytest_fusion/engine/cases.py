"""`Cases`: which cases of a spec are tried, in which order, as iterators over a plan and a budget.

The caller reports what each case launched and how long it took. Block sizes found in the first two cases become sizes
of later ones, and rows that would take longer than a case may are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import covering, large_offsets
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.case.plan import CONFIG, Limits, Plan, build, make_plan
from pytest_fusion.case.sizes import LONG
from pytest_fusion.case.stated import stated_case
from pytest_fusion.checks.configs import configs
from pytest_fusion.checks.context import CaseResult
from pytest_fusion.checks.verdict import IMPOSSIBLE, TOO_EXPENSIVE
from pytest_fusion.engine.pace import REFERENCE, Pace, longest
from pytest_fusion.engine.profiles import Profile
from pytest_fusion.engine.request import Request
from pytest_fusion.interpreter.launch import Launch, likely_blocks
from pytest_fusion.run.clock import Clock, processor_s
from pytest_fusion.run.pristine import perf_counter
from pytest_fusion.run.process.shared_cases import Shared
from pytest_fusion.spec.fusion_spec import FusionSpec

_PROBE_SIZES = (5, 40)
# Where each kind of case begins: every config, pairs, one long dim, two.
_CONFIGS_AT, _PAIRS_AT, _LONG_AT, _BROAD_AT = 500, 1000, 100_000, 200_000
# The sizes of a case for each config, the most configs that have one, and the seconds in which workers may compile it.
_POWER, _MOST_CONFIGS, _WAIT_S = 64, 64, 40.0

# A budget of seconds ends no test before so many cases had something to compare: fewer make a pass a thin one, and no
# comparison of two kernels. On a GPU every second one compiles nothing: 30 of these find what 20 others find (282 of
# 311 planted bugs), with a quarter less compiling.
_AT_LEAST, _AT_LEAST_ON_GPU = 20, 30
# In so many times the budget, though: 20 cases of mamba-ssm's chunked scan, whose reference goes step by step, took
# more than 200 s.
_LONGEST = 5
# Where the time may be up at any case: after so many others every so many-th is a long one. On the CPU lane it takes as
# long as four others, and most planted bugs are found before. On a GPU compiling takes the time: with an empty cache a
# test ended after some 20 cases, before any long one.
_LONG_AMONG, _LONG_AMONG_ON_GPU = (20, 10), (4, 4)
# Of the seconds of a test with autotuned kernels: the rest is for cases that follow from its configs.
_PAIRS_OF_TUNED = 0.6


@dataclass(slots=True)
class Budget:
    """How many cases may run, and how many have; ``compared`` of these had something to compare.

    ``seconds`` of the processor are for all of them, ``compiled`` without those that ``compiling`` took so far. Who
    does something else in between moves ``begun``.
    """

    limit: float = math.inf
    seconds: float = math.inf
    compiled: float = math.inf
    least: int = _AT_LEAST
    compiling: float = 0.0
    spent: int = 0
    compared: int = 0
    begun: float = field(default_factory=processor_s)

    @property
    def left(self) -> float:
        return self.limit - self.spent

    def used(self, share: float) -> bool:
        """Whether this share of the seconds, or the number of cases, is used up."""
        spent = processor_s() - self.begun
        late = spent >= share * self.seconds or spent - self.compiling >= share * self.compiled
        enough = self.compared >= self.least or (self.compared > 0 and spent >= _LONGEST * self.seconds)
        return (late and enough) or self.left <= 0

    def waited(self, seconds: float, share: float = 1.0) -> bool:
        """Count seconds in which other processes compiled; whether this share of the budget is left."""
        self.begun -= seconds
        self.compiling += seconds
        return not self.used(share)

    @property
    def allowed(self) -> float:
        """The seconds that end the test: those in all, or those without compiling where these are up."""
        return self.compiled if processor_s() - self.begun - self.compiling >= self.compiled else self.seconds

    @property
    def late(self) -> bool:
        """Whether the seconds are used up."""
        return self.left > 0 and self.used(1.0)

    @property
    def over(self) -> bool:
        return self.used(1.0)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A case to run with its chosen levels, or ``refused``: the kind of rejection and its reason."""

    case: Case | None
    choice: Mapping[str, Any] | None = None
    refused: tuple[str, str] = ("", "")


class Cases:
    """The cases of one test, in a ``share`` of its seconds.

    ``pairs`` counts pairs of levels that were judged; ``blocks`` are likely block sizes; ``seed`` is the request's, or
    that of ``@seed`` on ``outer``, the test function.
    """

    def __init__(self, spec: FusionSpec, request: Request, outer: Any, share: float = 1.0) -> None:
        device, profile = torch.device(request.device), request.profile
        self.spec, self.profile = spec, profile
        limit = request.max_cases if request.max_cases is not None else searching.max_examples(outer)
        seconds, compiled = profile.budget_on(device.type)
        self._on_gpu = device.type != "cpu"
        least = _AT_LEAST_ON_GPU if self._on_gpu else _AT_LEAST
        self.budget = Budget(math.inf if limit is None else limit, share * seconds, share * compiled, least)
        forced = searching.forced_seed(outer)
        self.seed = request.seed if request.seed is not None else forced if isinstance(forced, int) else None
        self.limits = limits_of(profile, device)
        self.base = counter_random.mix("campaign", request.nodeid, self.seed or 0)
        self._pools = searching.pools(spec, self.base)
        self.blocks: list[int] = []
        self._configs: dict[str, int] = {}
        self.plan: Plan = make_plan(spec, pools=self._pools, limits=self.limits)
        self.pairs = covering.PairCount(self.plan)
        self._pace = Pace(profile.seconds)
        # Launches of the cases that look for block sizes; ``None`` once they are known, or cannot be.
        self._probed: list[list[Launch]] | None = None

    def examples(self, outer: Any) -> Iterator[Chosen]:
        """The cases that the test pins with ``@example``."""
        if not searching.wants_phase(outer, "explicit"):
            return
        for position, example in enumerate(searching.explicit_examples(outer)):
            if self.budget.left <= 0:
                return
            seed = counter_random.mix(self.base, "pin", position) >> 33
            yield Chosen(stated_case(self.plan, example, seed, where="@example"))

    def boundary(self, ahead: Shared | None = None) -> Iterator[Chosen]:
        """Each config, every pair of levels, long rows among them; the probes come before. Those that ``ahead`` has,
        once ready: configs are waited for where the seconds for pairs are up, and no case for longer than `_WAIT_S`."""
        share = _PAIRS_OF_TUNED if self._configs else 1.0
        unmet, until = len(self._each_config()), perf_counter() + _WAIT_S

        def waits() -> bool:
            return ahead is not None and unmet > 0 and perf_counter() < until

        def waited(seconds: float) -> bool:
            return (self.budget.waited(seconds, share) and perf_counter() < until) or waits()

        choices = self.covering()
        if ahead is not None:
            limited = self.budget.seconds < math.inf
            choices = ahead.finished_first(
                choices, waited if limited else None, puts_off=limited and bool(self._configs)
            )
        for position, choice in choices:
            for values in self._kinds(choice):
                late = position >= _PAIRS_AT and self.budget.used(share)
                if self.budget.left <= 0 or (late and not waits()):
                    return
                if late:
                    break
                yield self._affordable({**choice, **values}, position)
                if ahead is not None and ahead.put_off:
                    break
                unmet -= position < _PAIRS_AT

    def _each_config(self) -> list[tuple[int, dict[str, Any]]]:
        """On a GPU under a budget: every config of the kernels on a plain case, whose sizes are powers of two.

        Config 24 of swiglu of fla-core takes 50 s to compile for 1000 columns, 13 s for 1024: it divides by them.
        """
        most = max(self._configs.values(), default=0)
        if not self._on_gpu or self.budget.seconds == math.inf or most > _MOST_CONFIGS:
            return []
        plain = {f"dim {name}": _POWER for name in self.spec.sized}
        return [
            (_CONFIGS_AT + turn, plain | {f"{CONFIG}{name}": turn % total for name, total in self._configs.items()})
            for turn in range(most)
        ]

    def _kinds(self, choice: Mapping[str, Any]) -> Iterator[dict[str, str]]:
        """The choice's own kind of values and, where compiling takes the time of the test, the next kind too: kernels
        do not depend on it. Tuned ones have another config to meet instead."""
        yield {}
        compiling = self._on_gpu and self.budget.seconds < math.inf == self.budget.limit and not self._configs
        kinds = self.plan.factors.get("values", ())
        if compiling and len(kinds) > 1 and choice.get("values") in kinds:
            yield {"values": kinds[(kinds.index(choice["values"]) + 1) % len(kinds)]}

    def _affordable(self, choice: Mapping[str, Any], position: int) -> Chosen:
        """The case of a choice; where cases like it took too long, the refusal."""
        forbidden = self._pace.forbids(choice)
        if forbidden:
            return Chosen(None, choice, (TOO_EXPENSIVE, forbidden))
        chosen = self.build(choice, position)
        if chosen.case is None:
            self._pace.note(choice, 0.0, REFERENCE)
        return chosen

    @property
    def probing(self) -> bool:
        """Whether a probe runs on a GPU, in which nothing is compiled that later cases do not share."""
        return self._on_gpu and self._probed is not None

    def probes(self) -> Iterator[Chosen]:
        """Two plain cases of different size; launch constants equal in both are block sizes worth testing around."""
        self._probed = []
        for size in _PROBE_SIZES:
            if self.budget.over:
                break
            chosen = self.build({f"dim {name}": size for name in self.spec.sized}, size)
            yield chosen
            if chosen.case is None:
                break
        self._probed = None

    def covering(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The choices of the covering phase with their positions, from which their seeds follow."""
        yield from self._each_config()
        pairs = enumerate(itertools.islice(covering.mixed_rows(self.plan), self.profile.covering), _PAIRS_AT)
        if not self.profile.long:
            yield from pairs
            return
        long = [
            *enumerate(covering.long_rows(self.plan), _LONG_AT),
            *enumerate(covering.broad_rows(self.plan), _BROAD_AT),
        ]
        mixed = None
        if self.budget.seconds < math.inf:
            mixed = _LONG_AMONG
            if self._on_gpu:
                mixed, long = _LONG_AMONG_ON_GPU, covering.spread(long)
            # In tiles of some hundred, rows past 2^16 took 11 % of the suite's time, and no planted bug needs them.
            long.sort(key=lambda one: longest(one[1])[1] >= LONG[-1])
        yield from covering.within(self.budget.left, pairs, long, mixed)

    def far(self) -> Iterator[Chosen]:
        """Cases whose offsets do not fit 32 bits, and no others."""
        for case in large_offsets.cases(self.plan, self.base, self.profile.covering):
            if self.budget.over:
                return
            yield Chosen(case)

    def build(self, choice: Mapping[str, Any], position: int) -> Chosen:
        """The case that a choice of levels gives at this position of the plan."""
        plan = self.plan
        if position < _LONG_AT and not self._on_gpu:
            plan = replace(plan, limits=replace(plan.limits, elements=self.profile.usual_elements))
        try:
            case = build(plan, choice, counter_random.mix(self.base, "cover", position) >> 33)
        except ImpossibleCase as error:
            return Chosen(None, choice, (IMPOSSIBLE, str(error)))
        return Chosen(case, choice)

    def judged(self, choice: Mapping[str, Any]) -> None:
        """Count the pairs of levels of a case that was judged."""
        self.pairs.add({**{name: levels[0] for name, levels in self.plan.factors.items()}, **choice})

    def ran(self, chosen: Chosen, result: CaseResult, clock: Clock) -> None:
        """Record the launches of ``chosen`` and, from ``clock.calls``, how long its calls took."""
        if self._probed is not None:
            self._probed.append(result.launches)
            if configs.NAME not in self.spec.without:
                self._configs |= {tuned.kernel: tuned.total for tuned in result.tuned.values()}
            if len(self._probed) == len(_PROBE_SIZES):
                self.blocks = likely_blocks(self._probed)
                if self._configs:
                    # Each config is to be met, and fetching some fifty kernels from Triton's cache takes seconds too.
                    self.budget.compiled = self.budget.seconds
                    self.budget.least += len(self._each_config())
                if self.blocks or self._configs:
                    blocks = tuple(self.blocks)
                    self.plan = make_plan(
                        self.spec, blocks=blocks, pools=self._pools, configs=self._configs, limits=self.limits
                    )
                    self.pairs = covering.PairCount(self.plan)
        elif chosen.choice is not None:
            if calls := clock.calls["fused"]:
                # On a GPU a first call includes compiling and tuning.
                took = min(calls) if self._on_gpu else sum(calls) / len(calls)
                self._pace.note(chosen.choice, took)
            # Reference runs without rounding take almost no time.
            self._pace.note(chosen.choice, max(clock.calls["reference"], default=0.0), REFERENCE)


def limits_of(profile: Profile, device: torch.device) -> Limits:
    """What a case may cost; a GPU takes float64 reference runs of 2^23 elements and products of 2^32 terms."""
    if device.type == "cpu":
        return Limits(profile.elements, profile.work, profile.programs)
    return Limits(max(profile.elements, 1 << 23), max(profile.work, 1 << 32), profile.programs)
