"""Explicit strides as a kind of layout, for tensors recorded where they were used."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

_STATED = re.compile(r"strides\((\d+(?:,\d+)*)\)")


def stated(strides: Sequence[int]) -> str:
    """``"strides(4096,1)"``; of a 0-d tensor, which has none, ``"contiguous"``."""
    return f"strides({','.join(map(str, strides))})" if strides else "contiguous"


def parse(kind: str) -> tuple[int, ...] | None:
    """The strides, in elements, of a kind that states them; ``None`` for every other kind."""
    found = _STATED.fullmatch(kind)
    return tuple(map(int, found[1].split(","))) if found else None


def repeats(kind: str) -> bool:
    """Whether a tensor of this kind may repeat one slice, so that its values depend on its layout."""
    return kind == "expanded" or 0 in (parse(kind) or ())


def expanded(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The axes along which one slice is repeated."""
    return tuple(axis for axis, stride in enumerate(strides) if stride == 0 and shape[axis] > 1)


def admits(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether all elements have places of their own, except slices repeated by a stride of 0."""
    if len(shape) != len(strides):
        return False
    reached = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride:
            if stride <= reached:
                return False
            reached += (size - 1) * stride
    return True


def kinds(shape: Sequence[int], strides: Sequence[int]) -> tuple[str, ...]:
    """The layouts that include these strides, one being enough; ``()`` for contiguous ones."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if expanded(shape, strides):
        return ("expanded",)
    ordered = all(strides[a] >= strides[b] for a, b in itertools.pairwise(axes))
    dense = 1
    for axis in reversed(axes):
        if strides[axis] != dense:
            break
        dense *= shape[axis]
    else:
        return ()
    unit_last = not axes or strides[axes[-1]] == 1
    if not ordered:
        return ("transposed", "unflattenable") if unit_last else ("transposed",)
    return ("padded", "unflattenable") if unit_last else ("step",)
