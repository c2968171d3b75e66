"""Sizes that matter: 0, 1, primes, powers of two and their neighbours, the kernel's own block sizes and theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.spec.dims import Dim, Size, parse_expression

# Several of each class, so that rows of the covering array that share a class differ in size. Small, because the
# interpreter pays 0.7 ms a program; longer ones come one dim at a time (LONG) and around the kernel's own blocks.
CLASSES: dict[str, tuple[int, ...]] = {
    "one": (1,),
    "power+1": (3, 5, 9, 17, 33),
    # 41 times the float32 next to 1/41 is below 1: who divides an index so has the one before.
    "prime": (2, 7, 11, 13, 19, 41),
    "power": (2, 4, 8, 16, 32),
    "power-1": (3, 7, 15, 31),
    "zero": (0,),
}
# A kernel whose width exceeds one block, a grid axis of 65535, and an int16 index show only here.
LONG: tuple[int, ...] = (65, 129, 257, 1025, 4097, 65537)

# Every boundary, ascending: shrinking reports no size above the next one of these.
LADDER: tuple[int, ...] = tuple(
    sorted({0, 1, 2, 3, *(n for power in range(2, 18) for n in (2**power - 1, 2**power, 2**power + 1))})
)


def classes(blocks: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The size classes of a dim, with those around the block sizes that the kernel was launched with."""
    found = dict(CLASSES)
    if blocks:
        found["block"] = blocks
        found["block+1"] = tuple(b + 1 for b in blocks)
        found["block-1"] = tuple(b - 1 for b in blocks)
        # A path for whole blocks may forget which one it is in: the second shows it; the third, an odd number.
        found["blocks"] = tuple(n for b in blocks for n in (2 * b + 1, 2 * b, 3 * b))
    return found


# Dims of at least so many, and what their classes are then moved by multiples of: a tail of up to 32 stays as it was.
_LARGE, _MOVED = 17, 32


def of_class(wanted: tuple[int, ...], bound: Dim) -> tuple[int, ...]:
    """The sizes of a class for a dim: of one that is never small, beyond its least size by what they are otherwise.

    Fitted to a least size of 64 they would all be 64.
    """
    if bound.min < _LARGE:
        return wanted
    return tuple(n if n < 2 or n >= bound.min else n + -(-bound.min // _MOVED) * _MOVED for n in wanted)


def count(size: Size) -> int:
    """The size of a dim, and of a batch how many rows it has."""
    return math.prod(size) if isinstance(size, tuple) else size


def leading(rows: int, turn: int) -> tuple[int, ...]:
    """The leading dims of so many rows: one, or in every second turn two, where the number of rows has factors."""
    factor = next((n for n in (2, 3, 5) if rows > n and rows % n == 0), None)
    return (rows,) if factor is None or turn % 2 else (rows // factor, factor)


def step_of(bound: Dim, sizes: Mapping[str, Size]) -> int:
    """The number that a size must be a multiple of, given the sizes it refers to."""
    if isinstance(bound.multiple_of, str):
        try:
            return max(parse_expression(bound.multiple_of).evaluate(sizes)[0], 0)
        except ZeroDivisionError:
            raise ImpossibleCase(f"multiple_of={bound.multiple_of!r} divides by a size of zero") from None
    return bound.multiple_of or 1


def fit(wanted: int, bound: Dim, sizes: Mapping[str, Size]) -> int:
    """The admissible size nearest to ``wanted`` from below, never 0 unless 0 was wanted or nothing else is allowed.

    Raises ``ImpossibleCase`` when the bounds admit no size beside the other sizes of the case.
    """
    step = step_of(bound, sizes)
    if step == 0:
        if bound.min > 0:
            raise ImpossibleCase(f"a multiple of {bound.multiple_of} = 0 that is at least {bound.min}")
        return 0
    low = -(-bound.min // step) * step
    high = None if bound.max is None else bound.max // step * step
    if high is not None and high < low:
        raise ImpossibleCase(f"no multiple of {step} is from {bound.min} to {bound.max}")
    size = wanted // step * step
    if wanted > 0 and size == 0:
        size = step
    size = max(size, low)
    return size if high is None else min(size, high)
