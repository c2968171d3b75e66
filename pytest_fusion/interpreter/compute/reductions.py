"""``tl.reduce``, ``tl.associative_scan`` and ``tl.map_elementwise``, vectorised.

Upstream calls a custom combine function once per element in Python (0.19 s per 1024 elements). Here log2(n) calls get
whole halves. As on the device the function sees scalars: every element is a program of its own, and a branch on them is
predicated as in a kernel.

A GPU reduces in a tree: a few values in each thread, then one half of the warp with the other, each partial result
rounded to the reduced type (``tl.sum`` of bfloat16 compiles to ``add.bf16`` at every step on sm_90). numpy adds float16
in float32 along one axis and one by one along another. These trees have the same bits for one program and for a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, is_float, numpy_dtype
from pytest_fusion.interpreter.compute import arith
from pytest_fusion.interpreter.control import batch

Combine = Callable[[list[Array], list[Array]], Sequence[Array]]


def _part(array: Array, axis: int, which: slice) -> Array:
    return array[(slice(None),) * axis + (which,)]


def fold(array: Array, axis: int, function: Any) -> Array:
    """Reduce ``array`` over ``axis`` to length 1 by halves; ``function`` commutes and is a ufunc for integers."""
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
        merged = combine(left, [_part(a, axis, slice(1, even, 2)) for a in level])
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
        # Blocks have a constant length, a power of two; the first `reach` entries of the result are replaced again.
        before = [np.roll(a, reach, axis) for a in level]
        merged = combine(before, level)
        level = [
            np.concatenate([_part(a, axis, slice(0, reach)), _part(m, axis, slice(reach, None))], axis=axis)
            for a, m in zip(level, merged, strict=True)
        ]
        reach *= 2
    return level


def scan(array: Array, axis: int, function: np.ufunc) -> Array:
    """Inclusive scan of one array with a ufunc; integers wrap, floats use ``scan_tree``."""
    if not is_float(array.dtype):
        return np.asarray(function.accumulate(array, axis=axis, dtype=array.dtype))
    return scan_tree([array], axis, lambda a, b: [function(a[0], b[0])])[0]


def pick(values: Array, indices: Array, axis: int, choose: Callable[..., Any]) -> tuple[Array, Array]:
    """The extreme value over ``axis``, reduced to length 1, and its entry of ``indices``.

    ``choose`` is ``np.argmax`` or ``np.argmin``: the left-most of equal values wins. For arrays without NaN.
    """
    position = np.expand_dims(choose(values, axis=axis), axis)
    return np.take_along_axis(values, position, axis), np.take_along_axis(indices, position, axis)


class Reducer:
    """Reduces and scans Triton tensors; built once per process from Triton's own modules."""

    def __init__(self, tl: Any, handle: Any) -> None:
        self._tl = tl
        self._handle = handle
        standard = tl.standard
        self._folds = {
            id(standard._sum_combine): (np.add, np.add),
            id(standard._elementwise_max): (arith.max_number, np.maximum),
            id(standard._elementwise_min): (arith.min_number, np.minimum),
            id(standard._xor_combine): (None, np.bitwise_xor),
            id(standard._or_combine): (None, np.bitwise_or),
        }
        self._scans = {id(standard._sum_combine): np.add, id(standard._prod_combine): np.multiply}
        self._picks = {
            id(standard._argmax_combine_tie_break_left): np.argmax,
            id(standard._argmax_combine_tie_break_fast): np.argmax,
            id(standard._argmin_combine_tie_break_left): np.argmin,
            id(standard._argmin_combine_tie_break_fast): np.argmin,
        }

    def reduce(self, input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
        """``tl.reduce``: a tensor, or a tuple of them when ``input`` is one."""
        inputs = self._tensors(input)
        rank = len(inputs[0].shape)
        axis, keep_dims = self._axis(axis, rank), bool(getattr(keep_dims, "value", keep_dims))
        arrays = self._arrays(inputs)
        if axis is None:
            reduced = self._reduce([a.reshape(a.shape[0], -1) for a in arrays], 1, combine_fn, inputs)
            reduced = [a.reshape(-1, *(1,) * rank) if keep_dims else a.reshape(-1) for a in reduced]
        else:
            reduced = self._reduce(arrays, axis + 1, combine_fn, inputs)
            if not keep_dims:
                reduced = [np.squeeze(a, axis + 1) for a in reduced]
        return self._results(reduced, inputs, input)

    def scan(self, input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
        """``tl.associative_scan``, same shapes as ``input``."""
        inputs = self._tensors(input)
        axis = self._axis(axis, len(inputs[0].shape)) + 1
        backwards = bool(getattr(reverse, "value", reverse))
        arrays = self._arrays(inputs)
        if backwards:
            arrays = [np.flip(a, axis) for a in arrays]
        function = self._scans.get(id(combine_fn))
        if function is not None and len(arrays) == 1:
            scanned = [scan(arrays[0], axis, function)]
        else:
            scanned = list(scan_tree(arrays, axis, self._combiner(combine_fn, inputs)))
        if backwards:
            scanned = [np.ascontiguousarray(np.flip(a, axis)) for a in scanned]
        return self._results(scanned, inputs, input)

    def map(self, scalar_fn: Any, *args: Any, pack: Any = 1, **_: Any) -> Any:
        """``tl.map_elementwise``: ``scalar_fn`` of ``pack`` neighbouring elements of each tensor at a time."""
        pack = int(getattr(pack, "value", pack))
        arrays = list(np.broadcast_arrays(*batch.aligned(*(t.handle.data for t in args))))
        operands = [
            self._scalars(a.reshape(-1)[first::pack], t.dtype)
            for a, t in zip(arrays, args, strict=True)
            for first in range(pack)
        ]
        with batch.running(batch.single(arrays[0].size // pack)):
            returned = scalar_fn(*operands)
        values = list(returned) if isinstance(returned, tuple | self._tl.tuple) else [returned]
        results = []
        for first in range(0, len(values), pack):
            column = np.empty(arrays[0].size, numpy_dtype(values[first].dtype))
            for position in range(pack):
                column[position::pack] = values[first + position].handle.data
            results.append(self._tensor(column.reshape(arrays[0].shape), values[first].dtype))
        return results[0] if len(results) == 1 else tuple(results)

    def _reduce(self, arrays: list[Array], axis: int, combine_fn: Any, inputs: list[Any]) -> list[Array]:
        if len(arrays) == 1 and id(combine_fn) in self._folds:
            for_floats, for_integers = self._folds[id(combine_fn)]
            function = for_floats if is_float(arrays[0].dtype) else for_integers
            if function is not None:
                return [fold(arrays[0], axis, function)]
        choose = self._picks.get(id(combine_fn))
        if choose is not None and len(arrays) == 2:
            return self._pick(arrays, axis, choose, combine_fn, inputs)
        return list(reduce_tree(arrays, axis, self._combiner(combine_fn, inputs)))

    def _pick(self, arrays: list[Array], axis: int, choose: Any, combine_fn: Any, inputs: list[Any]) -> list[Array]:
        """Extreme value and its index. With a NaN among the values, the combine function decides."""
        values, floats = arrays[0], is_float(arrays[0].dtype)
        if floats and values.dtype.itemsize <= 2:
            values = values.astype(np.float32)
        picked, indices = pick(values, arrays[1], axis, choose)
        found = [picked.astype(arrays[0].dtype), indices]
        nan = np.isnan(values).any(axis=axis, keepdims=True) if floats else np.zeros(1, np.bool_)
        if not nan.any():
            return found
        combined = reduce_tree(arrays, axis, self._combiner(combine_fn, inputs))
        return [np.where(nan, c, f) for c, f in zip(combined, found, strict=True)]

    def _combiner(self, combine_fn: Any, inputs: list[Any]) -> Callable[[list[Array], list[Array]], list[Array]]:
        """``combine_fn`` for arrays of equal shape: each element on its own, all at once."""
        types = [t.dtype for t in inputs]

        def combine(left: list[Array], right: list[Array]) -> list[Array]:
            operands = [
                self._scalars(a.reshape(-1), ty) for side in (left, right) for a, ty in zip(side, types, strict=True)
            ]
            with batch.running(batch.single(left[0].size)):
                returned = combine_fn(*operands)
            values = returned if isinstance(returned, tuple | self._tl.tuple) else (returned,)
            arrays = []
            for value, ty in zip(values, types, strict=True):
                data = np.asarray(value.handle.data if isinstance(value, self._tl.tensor) else value)
                whole = np.broadcast_to(data.reshape(-1), (left[0].size,))
                arrays.append(whole.reshape(left[0].shape).astype(numpy_dtype(ty), copy=False))
            return arrays

        return combine

    def _arrays(self, inputs: list[Any]) -> list[Array]:
        """The arrays of tensors that are reduced together, with equal numbers of programs."""
        arrays = [np.asarray(t.handle.data) for t in inputs]
        count = max(a.shape[0] for a in arrays)
        return [batch.lanes(a, count) for a in arrays]

    def _scalars(self, array: Array, dtype: Any) -> Any:
        return self._tl.tensor(self._handle(np.ascontiguousarray(array), dtype.scalar), dtype)

    def _tensors(self, input: Any) -> list[Any]:
        tensors = list(input) if isinstance(input, tuple | self._tl.tuple) else [input]
        for tensor in tensors:
            if not isinstance(tensor, self._tl.tensor):
                raise TypeError(f"reduce and associative_scan take tensors, got {type(tensor).__name__}")
        shapes = {tuple(int(n) for n in t.shape) for t in tensors}
        if len(shapes) > 1:
            raise ValueError(f"tensors reduced together must have one shape, got {sorted(shapes)}")
        return tensors

    def _results(self, arrays: list[Array], inputs: list[Any], given: Any) -> Any:
        results = tuple(self._tensor(a, t.dtype) for a, t in zip(arrays, inputs, strict=True))
        return results if isinstance(given, tuple | self._tl.tuple) else results[0]

    def _axis(self, axis: Any, rank: int) -> Any:
        axis = getattr(axis, "value", axis)
        if axis is None:
            return None
        axis = int(axis)
        if not -rank <= axis < rank:
            raise ValueError(f"axis {axis} is outside a tensor of rank {rank}")
        return axis % rank

    def _tensor(self, array: Array, dtype: Any) -> Any:
        handle = self._handle(array, dtype.scalar)
        shape = list(array.shape[1:])
        return self._tl.tensor(handle, self._tl.block_type(dtype, shape) if shape else dtype)
