"""Boundary combinations: every pair of levels of two factors, in few cases (a covering array).

Order and choice of pairs are those of covertable 3.2, so that a test keeps its cases. covertable counts all pairs of
each candidate row anew: 12 s for 31 factors. Updating the counts takes 0.4 s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pytest_fusion.case import counter_random, regimes
from pytest_fusion.case.plan import Plan
from pytest_fusion.case.sizes import LONG
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.values import ValueProfile
from pytest_fusion.spec.wording import grouped

Pair = tuple[str, str, str, str]
# A kernel's fast path (vectors, descriptors) needs all inputs contiguous and aligned at once, as they are in
# production. Of 130 rows over three tensors none was: only the two probes met a fast path. With whole vectors, one
# dtype and a flag, as many paths need, it is rare for a single tensor too.
_ALIKE_EVERY = 4
# Innermost sizes in two of three of these cases.
_VECTORS = (16, 32, 48, 96, 160, 256)
# One in four of these cases has rows that begin at multiples of 16 elements with gaps between: chunks of one
# projection, which fast paths take as well.
_PITCHED_EVERY = 4
_PITCHED = ("pitched", 16)
# One in eight has whole vectors in rows with a pitch that no vector divides: a kernel that checks the width alone
# promises a wrong alignment.
_ODD_EVERY, _ODD_TURN = 8, 4
_ODD, _INTERIOR = ("padded", 0), ("padded", 1)  # without a pitch or interior, a padded vector begins elsewhere
_LAYOUTS = "layout ", "offset "
# The most combinations of dtypes and flags that are all tried.
_MOST_COMBINATIONS = 32
# Sizes that special values such as NaN avoid: with a single element every order and every mask gives the same.
_DEGENERATE = "zero", "one", (), (0,), (1,)
_SEVERAL = "power+1"
# One of six of these cases has a single row, as a decoding step does.
_ONE_ROW = 5
# Even sizes of the second time, where fewer pass any block: whole vectors, with half a block or one of 1024 left over.
_EVEN = {1025: 1536, 4097: 6144, 65537: 66560}
# Even sizes below a dim's bound are whole blocks up to this.
_WHOLE = 256
# Few cases pass most blocks. Their values saturate nothing (`unit`), or make a later block matter (`outlier`).
_BLOCKS = 4000
_PAST_BLOCKS = "unit", "outlier"
# A case whose longest row has nothing finite in its first block: a cross entropy with blocks of 32768 gave NaN.
_MASKED = "masked"
# Two dims of many and of several blocks at once: launchers group tiles by eight (Triton's matmul tutorial), and sums by
# chunks of rows have several for each program from some hundred rows on. Whole vectors, and one past a block.
_BROAD = (640, 160), (577, 129)
_MOST_BROAD = 4
# Where large cases are cheap (a GPU, the deep profile): past 2^18 elements, where launchers choose another kernel, and
# past one turn of 132 programs with tiles of 2048.
_VAST = 1537, 257
# Of fewer cases than there are one in so many is a long one.
_LONG_OF = 6
_GOLDEN = (math.sqrt(5) - 1) / 2

T = TypeVar("T")


def rows(plan: Plan) -> Iterator[dict[str, Any]]:
    """Choices that together contain every pair of levels, the plainest first, in a fixed order."""
    # The array is made over positions, because levels may be unhashable, and equal between factors.
    names = list(plan.factors)
    counts = [len(plan.factors[name]) for name in names]
    if len(names) == 1:
        table: Iterable[list[int]] = ([i] for i in range(counts[0]))
    else:
        table = covering_array(counts) if names else [[]]
    for row in table:
        yield {name: plan.factors[name][position] for name, position in zip(names, row, strict=True)}


def mixed_rows(plan: Plan) -> Iterator[dict[str, Any]]:
    """``rows`` with one of ``alike_rows`` at every fourth place, until both end."""
    every, alike = rows(plan), alike_rows(plan)
    for turn in itertools.count(1):
        first, second = (every, alike) if turn % _ALIKE_EVERY else (alike, every)
        row = next(first, None) or next(second, None)
        if row is None:
            return
        yield row


def alike_rows(plan: Plan) -> Iterator[dict[str, Any]]:
    """Choices in which all tensors are contiguous or, where they may be padded, have rows with a gap.

    They contain every pair of sizes and kinds of values, special ones with several elements in each dim, and all
    combinations of dtypes and flags where those are few. Two in three have whole vectors, some a single row.
    """
    laid_out = [name for name, levels in plan.factors.items() if name.startswith(_LAYOUTS[0]) and len(levels) > 1]
    if not laid_out:
        return
    flags = _flags(plan)
    others = {n: levels for n, levels in plan.factors.items() if n not in flags and not n.startswith(_LAYOUTS)}
    padded = [name for name in laid_out if _ODD in plan.factors[name]]
    inner = _innermost(plan.spec)
    combinations = [dict(zip(flags, levels, strict=True)) for levels in itertools.product(*flags.values())]
    combinations.sort(key=lambda one: counter_random.mix(*map(repr, one.values())))
    every = list(rows(replace(plan, factors=others)))
    sized = [f"dim {name}" for name in plan.spec.sized]
    for turn in range(max(len(every), len(combinations))):
        # Shifted by one each round, so that no combination always meets the choices of one remainder of three or six.
        combination = combinations[(turn + turn // len(combinations)) % len(combinations)]
        row = {**every[turn % len(every)], **combination}
        if special := "values" in row and regimes.is_special(row["values"]):
            row |= {name: _SEVERAL for name in sized if row[name] in _DEGENERATE and _SEVERAL in plan.factors[name]}
        if turn % 3:
            row |= {f"dim {name}": _VECTORS[counter_random.mix(turn, name) % len(_VECTORS)] for name in inner}
        if turn % 6 == _ONE_ROW and not special:
            row |= {f"dim {name}": 1 for name in plan.spec.sized if name not in inner}
        if turn % _PITCHED_EVERY == _PITCHED_EVERY - 1:
            row |= dict.fromkeys(padded, _PITCHED)
        elif turn % _ODD_EVERY == _ODD_TURN:
            row |= {name: _ODD for name in padded if _INTERIOR in plan.factors[name]}
        yield row


def _flags(plan: Plan) -> dict[str, tuple[Any, ...]]:
    """The factors of dtypes, optional inputs and drawn values that have few combinations, in the plan's order."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, levels in plan.factors.items():
        size = math.prod(map(len, found.values()))
        if name.startswith(("dtype", "present ", "drawn ")) and size * len(levels) <= _MOST_COMBINATIONS:
            found[name] = levels
    return found


def _innermost(spec: FusionSpec) -> list[str]:
    """The dims of the last axes of tensors."""
    last = [tensor.shape.terms[-1] for tensor in spec.tensors.values() if tensor.shape.terms]
    names = {name for term in last if not term.batch for name in term.names}
    return [name for name in spec.dim_order if name in names]


def long_rows(plan: Plan) -> Iterator[dict[str, Any]]:
    """Each dim long in turn, the others small: past one block, past a grid axis of 65535.

    Where a block follows the size, only these cases pass it. Each therefore draws flags, layouts and ordinary values
    anew, so that a loop that forgets one fails in some. The second time sizes are even, as hidden sizes are (1536,
    6144), and all tensors contiguous.
    """
    dims = plan.spec.sized
    dtypes = plan.factors.get("dtype", ("float32",))
    ordinary = _ordinary_values(plan)
    masked = _innermost(plan.spec) if "inf" in plan.factors.get("values", ()) else []
    turn = 0
    for even, (step, size), (place, name) in itertools.product((False, True), enumerate(LONG), enumerate(dims)):
        long = _long_size(size, plan.spec.bound(name).max, even=even)
        if long is None:
            continue
        choice: dict[str, Any] = {f"dim {other}": 1 if size > 5000 else 3 for other in dims if other != name}
        # Not by `turn`: of three dims each would be long in one of three dtypes alone.
        choice |= {f"dim {name}": long, "dtype": dtypes[(step + place + even) % len(dtypes)]}
        choice.update(_beside_long(plan, size, name, even))
        if ordinary:
            past = [kind for kind in _PAST_BLOCKS if kind in ordinary] if size > _BLOCKS else []
            choice["values"] = past[(step + even) % len(past)] if past else ordinary[turn % len(ordinary)]
        turn += 1
        yield choice
        if even and size == LONG[-1] and long == _EVEN[size] and name in masked:
            # Two rows: ignoring the label of a single one would leave nothing.
            two = {f"dim {other}": 2 for other in dims if other != name}
            more = dict(itertools.islice(two.items(), 1)) | _at_ends(plan)
            yield {**choice, **more, f"dim {name}": long - 1024, "values": _MASKED}


def _at_ends(plan: Plan) -> dict[str, int]:
    """Levels by which indices are the first and the last one: the last label is past the block that is masked."""
    return {
        f"choice {name}": position
        for name, inner in plan.spec.tensors.items()
        if isinstance(inner.values, ValueProfile)
        for position, one in enumerate(inner.values.choices)
        if one.label == "ends"
    }


def _ordinary_values(plan: Plan) -> list[Any]:
    """The kinds of values that are not special, such as NaN."""
    return [level for level in plan.factors.get("values", ()) if not regimes.is_special(level)]


def _long_size(size: int, most: int | None, *, even: bool) -> int | None:
    """A long size or, if ``even``, the even one beside it, in whole blocks below a bound; ``None`` where none fits."""
    long = _EVEN.get(size) if even else size
    if long is None or (most is not None and most < long // 2):
        return None
    return most // _WHOLE * _WHOLE if even and most is not None and most < long else long


def _beside_long(plan: Plan, size: int, dim: str, even: bool) -> Iterator[tuple[str, Any]]:
    """A level of each factor except sizes, dtype and values; if ``even``, the next level, and contiguous tensors."""
    for name, levels in plan.factors.items():
        if name in ("dtype", "values") or name.startswith("dim ") or (even and name.startswith(_LAYOUTS)):
            continue
        yield name, levels[(counter_random.mix(size, dim, name) + even) % len(levels)]


def broad_rows(plan: Plan) -> Iterator[dict[str, Any]]:
    """Two neighbouring dims long at once, the others small; every second time all tensors are contiguous."""
    dims = [n for n in plan.spec.sized if (most := plan.spec.bound(n).max) is None or most >= min(map(min, _BROAD))]
    pairs = list(zip(dims, dims[1:] + dims[:1], strict=True)) if len(dims) > 1 else []
    ordinary = _ordinary_values(plan)
    # Each pair with one of the sizes, then with the other.
    turns = itertools.product(range(len(_BROAD)), enumerate(pairs))
    both = [(pair, _BROAD[(turn + again) % len(_BROAD)]) for again, (turn, pair) in turns][:_MOST_BROAD]
    if math.prod(_VAST) <= plan.limits.elements:
        both += [(pair, _VAST) for pair in pairs[:1]]
    for turn, ((many, several), (long, less)) in enumerate(both):
        # A tensor of all dims would be too large with sizes of 3.
        choice: dict[str, Any] = {f"dim {name}": 3 if turn % 2 else 1 for name in plan.spec.sized}
        choice |= {f"dim {many}": long, f"dim {several}": less}
        for name, levels in plan.factors.items():
            if name in choice or name == "values" or ((long, less) == _BROAD[0] and name.startswith(_LAYOUTS)):
                continue
            choice[name] = levels[counter_random.mix("broad", turn, name) % len(levels)]
        if ordinary:
            choice["values"] = ordinary[turn % len(ordinary)]
        yield choice


def within(budget: float, pairs: Iterable[T], long: Sequence[T], mixed: tuple[int, int] | None = None) -> Iterator[T]:
    """First those for pairs, then the long ones: all where ``budget`` allows; else long ones have a part of it.

    ``mixed``: the time may be up at any of them, so after so many others every so many-th is a long one.
    By ``max_examples=60`` no case was longer than a block, whatever a kernel did past it. Multiples of the golden ratio
    pick them: even steps would meet one dim alone, since dims take turns.
    """
    if budget == math.inf:
        later = iter(long)
        for turn, row in enumerate(pairs, 1):
            yield row
            if mixed is not None and turn > mixed[0] and turn % (mixed[1] - 1) == 0:
                yield from itertools.islice(later, 1)
        yield from later
        return
    most = max(int(budget), 0)
    first = list(itertools.islice(pairs, most))
    count = min(len(long), max(most - len(first), most // _LONG_OF))
    yield from first[: most - count]
    steps = (int(turn * _GOLDEN % 1 * len(long)) for turn in itertools.count(1))
    picked: set[int] = set()
    while len(picked) < count:
        picked.add(next(steps))
    yield from (long[i] for i in sorted(picked))


def spread(rows: Sequence[T]) -> list[T]:
    """The rows in an order in which any first few are from everywhere."""
    return [rows[place] for place in sorted(range(len(rows)), key=lambda place: place * _GOLDEN % 1)]


class PairCount:
    """Counts which pairs of levels the cases have met, out of all in the plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._met: set[Pair] = set()

    def add(self, choice: Mapping[str, Any]) -> None:
        levels = [(name, repr(choice[name])) for name in self._plan.factors if name in choice]
        for (a, x), (b, y) in itertools.combinations(levels, 2):
            self._met.add((a, x, b, y))

    def as_json(self) -> dict[str, Any]:
        pairs = self._pairs()
        met = len(self._met.intersection(pairs))
        return {"pairs": len(pairs), "covered": met, "share": round(met / len(pairs), 4) if pairs else 1.0}

    def unmet(self) -> list[str]:
        """The pairs that no case has met, in the order of the plan: a line for each level and what it has not met."""
        pairs = (pair for pair in self._pairs() if pair not in self._met)
        left = grouped((f"{a}={x} with {b}=", y) for a, x, b, y in pairs)
        return [first + " | ".join(others) for first, others in left.items()]

    def _pairs(self) -> list[Pair]:
        known = {name: dict.fromkeys(map(repr, levels)) for name, levels in self._plan.factors.items()}
        return [(a, x, b, y) for a, b in itertools.combinations(known, 2) for x in known[a] for y in known[b]]


Ints = NDArray[np.intp]


def covering_array(counts: Sequence[int]) -> Iterator[list[int]]:
    """Rows with one level for each factor; ``counts`` are the numbers of levels."""
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.intp)
    factors = np.repeat(np.arange(len(counts)), counts)
    levels = [range(start, start + count) for start, count in zip(starts.tolist(), counts, strict=True)]
    every = [pair for two in itertools.combinations(levels, 2) for pair in itertools.product(*two)]
    pairs = np.array(sorted(every, key=_hashed), dtype=np.intp).reshape(-1, 2)
    while len(pairs):
        # A factor in no chosen pair takes its first level.
        row = starts.copy()
        for level in _chosen(pairs, factors):
            row[factors[level]] = level
        yield (row - starts).tolist()
        pairs = pairs[(row[factors[pairs]] != pairs).any(1)]


def _chosen(pairs: Ints, factors: Ints) -> Iterator[int]:
    """The levels of one row; ``pairs`` are those that no row has yet, ``factors`` the factor of each level.

    The next pair is the first whose new levels complete, on average, more than one pair per place of the row; if there
    is none, the pair that completes most.
    """
    missing = np.zeros((len(factors), len(factors)), dtype=np.int64)
    missing[pairs[:, 0], pairs[:, 1]] = missing[pairs[:, 1], pairs[:, 0]] = 1
    completed = np.zeros(len(factors), dtype=np.int64)  # pairs that each level would complete with the row's
    free, taken = np.ones(len(factors), dtype=bool), np.zeros(len(factors), dtype=bool)
    size = 0
    while len(pairs):
        new = free[pairs]
        count = new.sum(1)
        completes = (completed[pairs] * new).sum(1) + (count == 2)
        enough = completes > size * count
        chosen = pairs[enough.argmax() if enough.any() else completes.argmax()]
        for level in chosen[free[chosen]]:
            taken[factors == factors[level]] = True
            free[factors == factors[level]] = False
            taken[level] = False
            completed += missing[level]
            size += 1
            yield int(level)
        pairs = pairs[~taken[pairs].any(1) & free[pairs].any(1)]


def _hashed(pair: tuple[int, int]) -> int:
    """FNV-1a of a pair: a pseudo-random order, equal in every process."""
    value = 0x811C9DC5
    for byte in b"%d,%d " % pair:
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value
