"""Reductions and scans as balanced trees over plain arrays.

A GPU reduces in a tree: a few values in each thread, then one half of the warp with the other, each partial result
rounded to the type reduced (``tl.sum`` of bfloat16 compiles to ``add.bf16`` at every step on sm_90). numpy instead adds
float16 in float32 along one axis and one by one along another. The tree here depends on nothing but the length, so
its bits are the same for one program and for a batch of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, is_float

Combine = Callable[[list[Array], list[Array]], Sequence[Array]]


def _part(array: Array, axis: int, which: slice) -> Array:
    return array[(slice(None),) * axis + (which,)]


def fold(array: Array, axis: int, function: Any) -> Array:
    """Reduce ``array`` over ``axis`` to length 1, combining its halves.

    ``function`` commutes; for integers it is a ufunc.
    """
    if not is_float(array.dtype):
        return np.asarray(function.reduce(array, axis=axis, keepdims=True, dtype=array.dtype))
    while (length := array.shape[axis]) > 1:
        half = length // 2
        folded = function(_part(array, axis, slice(0, half)), _part(array, axis, slice(half, 2 * half)))
        if length % 2:
            folded = np.concatenate([folded, _part(array, axis, slice(2 * half, None))], axis=axis)
        array = folded
    return array


def reduce_tree(arrays: Sequence[Array], axis: int, combine: Combine) -> list[Array]:
    """Reduce several arrays together over ``axis`` to length 1, neighbours first, in order."""
    level = list(arrays)
    while (length := level[0].shape[axis]) > 1:
        even = length - length % 2
        left = [_part(a, axis, slice(0, even, 2)) for a in level]
        right = [_part(a, axis, slice(1, even, 2)) for a in level]
        merged = combine(left, right)
        if length % 2:
            last = [_part(a, axis, slice(even, None)) for a in level]
            merged = [np.concatenate([m, t], axis=axis) for m, t in zip(merged, last, strict=True)]
        level = list(merged)
    return level


def scan_tree(arrays: Sequence[Array], axis: int, combine: Combine) -> list[Array]:
    """Inclusive scan of several arrays together over ``axis`` in log2(length) passes (Hillis and Steele 1986)."""
    level = list(arrays)
    length = level[0].shape[axis]
    reach = 1
    while reach < length:
        # Blocks keep their length, a power of two; what the first `reach` entries are combined with is dropped again.
        before = [np.roll(a, reach, axis) for a in level]
        merged = combine(before, level)
        level = [
            np.concatenate([_part(a, axis, slice(0, reach)), _part(m, axis, slice(reach, None))], axis=axis)
            for a, m in zip(level, merged, strict=True)
        ]
        reach *= 2
    return level


def scan(array: Array, axis: int, function: np.ufunc) -> Array:
    """Inclusive scan of one array with a ufunc; integers wrap, floats go through ``scan_tree``."""
    if not is_float(array.dtype):
        return np.asarray(function.accumulate(array, axis=axis, dtype=array.dtype))
    return scan_tree([array], axis, lambda a, b: [function(a[0], b[0])])[0]


def pick(values: Array, indices: Array, axis: int, choose: Callable[..., Any]) -> tuple[Array, Array]:
    """The extreme value over ``axis``, reduced to length 1, and its entry of ``indices``.

    ``choose`` is ``np.argmax`` or ``np.argmin``: the left-most of equal values wins. For arrays without NaN.
    """
    position = np.expand_dims(choose(values, axis=axis), axis)
    return np.take_along_axis(values, position, axis), np.take_along_axis(indices, position, axis)
