"""``tl.reduce``, ``tl.associative_scan`` and ``tl.map_elementwise``, vectorised.

Upstream calls a custom combine function once per element in Python (0.19 s per 1024 elements). Here it is called on
whole halves, log2(n) times. On the device the combine function receives scalars, so here too: every element is a
program of its own meanwhile, and a function that branches on its arguments is predicated like a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, is_float, numpy_dtype
from pytest_fusion.interpreter.compute import arith, trees
from pytest_fusion.interpreter.control import batch


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
            scanned = [trees.scan(arrays[0], axis, function)]
        else:
            scanned = list(trees.scan_tree(arrays, axis, self._combiner(combine_fn, inputs)))
        if backwards:
            scanned = [np.ascontiguousarray(np.flip(a, axis)) for a in scanned]
        return self._results(scanned, inputs, input)

    def map(self, scalar_fn: Any, *args: Any, pack: Any = 1, **_: Any) -> Any:
        """``tl.map_elementwise``: ``scalar_fn`` of ``pack`` neighbouring elements of each tensor at a time."""
        pack = int(getattr(pack, "value", pack))
        arrays = list(np.broadcast_arrays(*batch.aligned(*(t.handle.data for t in args))))
        shape = arrays[0].shape
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
            results.append(self._tensor(column.reshape(shape), values[first].dtype))
        return results[0] if len(results) == 1 else tuple(results)

    def _reduce(self, arrays: list[Array], axis: int, combine_fn: Any, inputs: list[Any]) -> list[Array]:
        if len(arrays) == 1 and id(combine_fn) in self._folds:
            for_floats, for_integers = self._folds[id(combine_fn)]
            function = for_floats if is_float(arrays[0].dtype) else for_integers
            if function is not None:
                return [trees.fold(arrays[0], axis, function)]
        choose = self._picks.get(id(combine_fn))
        if choose is not None and len(arrays) == 2:
            return self._pick(arrays, axis, choose, combine_fn, inputs)
        return list(trees.reduce_tree(arrays, axis, self._combiner(combine_fn, inputs)))

    def _pick(self, arrays: list[Array], axis: int, choose: Any, combine_fn: Any, inputs: list[Any]) -> list[Array]:
        """Extreme value and its index. With a NaN among the values, the combine function itself decides."""
        values, floats = arrays[0], is_float(arrays[0].dtype)
        if floats and values.dtype.itemsize <= 2:
            values = values.astype(np.float32)
        picked, indices = trees.pick(values, arrays[1], axis, choose)
        found = [picked.astype(arrays[0].dtype), indices]
        nan = np.isnan(values).any(axis=axis, keepdims=True) if floats else np.zeros(1, np.bool_)
        if not nan.any():
            return found
        combined = trees.reduce_tree(arrays, axis, self._combiner(combine_fn, inputs))
        return [np.where(nan, c, f) for c, f in zip(combined, found, strict=True)]

    def _combiner(self, combine_fn: Any, inputs: list[Any]) -> Callable[[list[Array], list[Array]], list[Array]]:
        """``combine_fn`` for arrays of equal shape: each element on its own, all at once."""
        types = [t.dtype for t in inputs]

        def combine(left: list[Array], right: list[Array]) -> list[Array]:
            shape = left[0].shape
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
                arrays.append(whole.reshape(shape).astype(numpy_dtype(ty), copy=False))
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
