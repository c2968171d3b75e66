"""Finds the smallest case with the same bug by running simpler ones, in a fixed order (docs/internals/shrinking.md)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

from pytest_fusion.case import layouts, regimes, sizes
from pytest_fusion.case.case_model import Case, Config, Layout
from pytest_fusion.case.make import ImpossibleCase, shape_of
from pytest_fusion.case.plan import Plan, allowed_layouts, in_dtype, refit, regimes_of
from pytest_fusion.run.autotuned import TRIED
from pytest_fusion.spec.dims import Size
from pytest_fusion.spec.dtypes import simplicity
from pytest_fusion.spec.inputs import OptionalSpec, TensorSpec
from pytest_fusion.spec.values import ValueProfile

# Enough for four dims of a dozen boundaries each, twice over; at some 20 ms a case this is a few seconds.
MAX_RUNS = 300
_CANONICAL_SEEDS = (0, 1, 2)
# A small case shows a bug of values with some probability only: seeds to try before a size counts as right.
_SIZE_SEEDS = 16
_SIZE_SEEDS_LONG = 6
# A trade tries every boundary up to half of the longest dim, or a quarter if it is longer than this, where runs cost
# more. Below twice so many elements it gains nothing: the short dim grows to three.
_SHORT = 64
_WORTH_A_TRADE = 4
_SMALL = 16  # up to this product of all sizes a run costs next to nothing


@dataclass(eq=False)
class Shrinker:
    """Greedy passes over one case. ``fails`` runs a case and returns whether it shows the same bug.

    ``by_values`` says that the bug depends on values, so that a size is tried with several seeds; ``seeds`` is how many
    are enough where it is no matter of luck. ``tries`` is how often ``fails`` is asked of a case whose bug shows by
    chance; where a size has as many seeds, another seed is another try. ``late`` says that there is no time for more.
    """

    plan: Plan
    case: Case
    fails: Callable[[Case], bool]
    _: KW_ONLY
    max_runs: int = MAX_RUNS
    by_values: bool = False
    seeds: int | None = None
    tries: int = 1
    late: Callable[[], bool] = lambda: False
    runs: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._known = {self.case.key(): True}

    @property
    def _spent(self) -> bool:
        return self.runs >= self.max_runs or self.late()

    def run(self) -> Case:
        """The minimum found; the original if nothing simpler fails."""
        if self.case.multiprocessors is not None:
            self._try(self.case.with_(multiprocessors=None))
        if self.case.configs:
            self._try(self.case.with_(configs={}))
        self._try_plainest()
        for _ in range(4):
            before = self.case.key()
            for candidates in (self._seeds, self._values, self._layouts, self._optionals, self._drawn, self._configs):
                self._improve(candidates)
            self._sizes()
            for candidates in (self._layouts, self._dtypes, self._values, self._seeds):
                self._improve(candidates)
            if self.case.key() == before or self._spent:
                break
        return self.case

    def _try_plainest(self) -> None:
        """Try sizes of 1, contiguous, ordinary values at once: many bugs need no more, and a hang costs its limit."""
        case = next(self._values(), self.case)
        case = case.contiguous(name for name, inner in self._tensors() if "contiguous" in inner.layouts)
        ones = {name: () if isinstance(size, tuple) else min(size, 1) for name, size in case.sizes.items()}
        with contextlib.suppress(ImpossibleCase):
            candidate = case.with_(sizes=refit(self.plan.spec, ones))
            if candidate.key() != self.case.key():
                self._try(candidate)

    def _try(self, candidate: Case, *, tries: int | None = None) -> bool:
        key = candidate.key()
        if key not in self._known:
            if self._spent:
                return False
            self.runs += 1
            self._known[key] = any(self.fails(candidate) for _ in range(tries or self.tries))
        if self._known[key]:
            self.case = candidate
        return self._known[key]

    def _improve(self, candidates: Callable[[], Iterator[Case]]) -> None:
        """Repeatedly take the first simpler case that fails, none twice: candidates that disagree would alternate."""
        left = {self.case.key()}
        progress = True
        while progress and not self._spent:
            progress = False
            for candidate in candidates():
                key = candidate.key()
                if key not in left and self._try(candidate):
                    left.add(key)
                    progress = True
                    break

    def _seeds(self) -> Iterator[Case]:
        for seed in _CANONICAL_SEEDS:
            if seed >= self.case.seed:
                return
            yield self.case.with_(seed=seed)

    def _tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        for name in self.case.tensors:
            yield name, self.plan.spec.tensors[name]

    def _values(self) -> Iterator[Case]:
        case = self.case
        for name, inner in self._tensors():
            case = case.with_tensor(name, regime=inner.plainest)
        yield case
        for name, inner in self._tensors():
            current = self.case.tensors[name].regime
            ladder = regimes_of(inner, covered=False)
            if current not in ladder:
                yield self.case.with_tensor(name, regime=inner.plainest)
                if isinstance(inner.values, ValueProfile):
                    yield from (self.case.with_tensor(name, regime=one) for one in inner.values.plainer(current))
                continue
            for regime in ladder[: ladder.index(current)]:
                # Special values hide what ordinary ones show, so a plainer special one is no simplification.
                if not regimes.is_special(regime) or regimes.is_special(current):
                    yield self.case.with_tensor(name, regime=regime)

    def _layouts(self) -> Iterator[Case]:
        yield self.case.contiguous(name for name, inner in self._tensors() if "contiguous" in inner.layouts)
        for name, inner in self._tensors():
            layout = self.case.tensors[name].layout
            if "contiguous" in inner.layouts:
                yield self.case.with_tensor(name, layout=Layout())
            for offset in (0, 1):
                if offset < layout.offset:
                    yield self.case.with_tensor(name, layout=Layout(layout.kind, offset, layout.variant))
            ndim = len(shape_of(inner, self.case.sizes))
            for kind, variant in allowed_layouts(self.plan.spec, name, inner):
                if (kind, variant) == (layout.kind, layout.variant):
                    break
                if layouts.variants(kind, ndim) > variant or kind == "contiguous":
                    yield self.case.with_tensor(name, layout=Layout(kind, layout.offset, variant))

    def _optionals(self) -> Iterator[Case]:
        for name, declared in self.plan.spec.inputs.items():
            if isinstance(declared, OptionalSpec) and name not in self.case.absent:
                yield self.case.with_(absent=tuple(sorted((*self.case.absent, name))))

    def _drawn(self) -> Iterator[Case]:
        for name, pool in self.plan.pools.items():
            for value in pool:
                if repr(value) == repr(self.case.drawn[name]):
                    break
                yield self.case.with_(drawn={**self.case.drawn, name: value})

    def _configs(self) -> Iterator[Case]:
        """The first config of all autotuned kernels, of each one; lower numbers; one that a tuning call runs."""
        configs = self.case.configs
        if configs:
            yield self.case.with_(configs={})
        for name, config in configs.items():
            yield self.case.with_(configs={other: one for other, one in configs.items() if other != name})
            tunes = config.launch == "tuning"
            for number in range(1, TRIED if tunes else config.number):
                launch = "chosen" if tunes else config.launch
                yield self.case.with_(configs={**configs, name: Config(number, launch)})

    def _dtypes(self) -> Iterator[Case]:
        spec = self.plan.spec
        if spec.uses_case_dtype:
            for dtype in sorted(spec.dtypes, key=simplicity):
                if simplicity(dtype) >= simplicity(self.case.dtype):
                    break
                yield in_dtype(spec, self.case, dtype)
        for name, inner in self._tensors():
            for dtype in sorted(inner.dtypes, key=simplicity):
                if simplicity(dtype) >= simplicity(self.case.tensors[name].dtype):
                    break
                yield self.case.with_tensor(name, dtype=dtype)

    def _sizes(self) -> None:
        for name in self.plan.spec.batch_names:
            for batch in ((), (1,), (2,), (1, 2), (2, 1)):
                current = self.case.sizes[name]
                assert isinstance(current, tuple)
                if (len(batch), batch) < (len(current), current) and self._try_size(name, batch):
                    break
            current = self.case.sizes[name]
            if isinstance(current, tuple) and len(current) > 1 and not self._try_size(name, sizes.count(current)):
                for axis in range(len(current)):
                    self._shorten(name, axis)
        # Boundaries for all dims before the sizes between them, short dims first: a long row has more luck, but a row
        # cut to the last element that shows the bug would have to be one of many.
        plain = sorted(filter(self._is_plain, self.case.sizes), key=self._size)
        below = {name: self._to_boundary(name) for name in plain}
        for name in plain:
            self._between(name, below[name])
        if self.by_values:
            self._trade(plain)

    def _shorten(self, name: str, axis: int) -> None:
        """Take the first non-zero boundary of one of a batch's several dims that fails."""
        for boundary in filter(None, sizes.LADDER):
            batch = self.case.sizes[name]
            assert isinstance(batch, tuple)
            if boundary >= batch[axis] or self._try_size(name, (*batch[:axis], boundary, *batch[axis + 1 :])):
                break

    def _is_plain(self, name: str) -> bool:
        """Whether this is a dim or a batch of one dimension; batches of several keep their length."""
        size = self.case.sizes[name]
        return isinstance(size, int) or len(size) == 1

    def _size(self, name: str) -> int:
        return sizes.count(self.case.sizes[name])

    def _trade(self, plain: list[str]) -> None:
        """Grow a short dim to three for half of the longest one or less, if chance needed length."""
        longest = max(plain, key=self._size, default="")
        for name in plain:
            limit = self._size(longest) // (2 if self._size(longest) <= _SHORT else 4)
            if name == longest or self._size(name) > 2 or limit < _WORTH_A_TRADE:
                continue
            for boundary in (b for b in sizes.LADDER if 0 < b <= limit):
                if self._try_sizes({name: 3, longest: boundary}):
                    self._to_boundary(name)
                    break

    def _to_boundary(self, name: str) -> int:
        """Take the first boundary that fails; returns the one below it."""
        below = -1
        for boundary in sizes.LADDER:
            if boundary >= self._size(name) or self._try_size(name, boundary):
                break
            below = boundary
        return below

    def _between(self, name: str, below: int) -> None:
        """The smallest size above ``below`` that fails, by halving."""
        high = self._size(name)
        while high - below > 1 and not self._spent:
            middle = (below + high) // 2
            if self._try_size(name, middle) and self._size(name) < high:
                high = self._size(name)
            else:
                below = middle

    def _try_size(self, name: str, size: int | tuple[int, ...]) -> bool:
        return self._try_sizes({name: size})

    def _try_sizes(self, wanted: dict[str, int | tuple[int, ...]]) -> bool:
        try:
            fitted = refit(self.plan.spec, {**self.case.sizes, **wanted})
        except ImpossibleCase:
            return False
        if all(fitted[name] == self.case.sizes[name] for name in wanted):
            return False
        smaller = self.case.with_(sizes=fitted)
        seeds = list(self._size_seeds(fitted))
        tries = 1 if len(seeds) >= self.tries else self.tries
        return any(self._try(smaller.with_(seed=seed), tries=tries) for seed in seeds)

    def _size_seeds(self, fitted: Mapping[str, Size]) -> Iterable[int]:
        if not self.by_values:
            return dict.fromkeys((self.case.seed, *range((self.seeds or 1) - 1)))
        work = math.prod(map(sizes.count, fitted.values()))
        return dict.fromkeys((self.case.seed, *range(_SIZE_SEEDS if work <= _SMALL else _SIZE_SEEDS_LONG)))
