"""Sizes that matter: 0, 1, primes, powers of two, the kernel's own block sizes, and their neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.spec.dims import Dim, Size, parse_expression

# Several sizes a class, so that rows of the covering array differ. Small, because the interpreter takes 0.7 ms a
# program; longer ones come one dim at a time (LONG) and around the kernel's own blocks.
CLASSES: dict[str, tuple[int, ...]] = {
    "one": (1,),
    "power+1": (3, 5, 9, 17, 33),
    # 41 times the float32 next to 1/41 is below 1, so an index divided that way is one too low.
    "prime": (2, 7, 11, 13, 19, 41),
    "power": (2, 4, 8, 16, 32),
    "power-1": (3, 7, 15, 31),
    "zero": (0,),
}
# Only these show a width above one block, a grid axis of 65535, or an int16 index.
LONG: tuple[int, ...] = (65, 129, 257, 1025, 4097, 65537)

# Every boundary, ascending: shrinking reports no size above the next of these.
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
        # A path for whole blocks may confuse blocks: the second size shows it; the third has an odd number of blocks.
        found["blocks"] = tuple(n for b in blocks for n in (2 * b + 1, 2 * b, 3 * b))
    return found


# Dims bounded to at least 17 shift their classes by multiples of 32, which leaves tails of up to 32 as they were.
_LARGE, _MOVED = 17, 32


def of_class(wanted: tuple[int, ...], bound: Dim) -> tuple[int, ...]:
    """The sizes of a class for a dim; of a dim that is never small, beyond its least size."""
    # Fitted to a least size of 64, all would be 64.
    if bound.min < _LARGE:
        return wanted
    return tuple(n if n < 2 or n >= bound.min else n + -(-bound.min // _MOVED) * _MOVED for n in wanted)


def count(size: Size) -> int:
    """The size of a dim, or the rows of a batch."""
    return math.prod(size) if isinstance(size, tuple) else size


def leading(rows: int, turn: int) -> tuple[int, ...]:
    """Leading dims with so many rows: one dim or, in every second turn, two where the number has factors."""
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
    """The largest admissible size up to ``wanted``, or the least; 0 only where wanted or nothing else is allowed.

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
