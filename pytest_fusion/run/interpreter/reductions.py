"""``tl.reduce``, ``tl.associative_scan`` and what is built on them, vectorised.

Upstream calls a custom combine function once per element in Python (0.19 s per 1024 elements). Here it is called on
whole halves, log2(n) times. The device hands the combine function scalars, so a function that branches on them with
``if`` is legal there: such a function is met with ``NeedsScalars`` and evaluated element by element.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pytest_fusion.run.interpreter import trees
from pytest_fusion.run.interpreter.dtypes import Array, is_float, numpy_dtype


class NeedsScalars(Exception):
    """A combine function asked for the truth of a whole block."""


_blocks_have_no_truth = False


def truth(array: Array) -> bool:
    """The truth of a tensor: its value for one element.

    For more, Triton's own code relies on ``True`` (``if other and other.type.is_block()``), except inside a combine
    function, where it raises ``NeedsScalars``.
    """
    if array.size == 1:
        return bool(array.reshape(-1)[0])
    if _blocks_have_no_truth:
        raise NeedsScalars
    return True


class Reducer:
    """Reduces and scans Triton tensors; built once per process from Triton's own modules."""

    def __init__(self, tl: Any, handle: Any) -> None:
        self._tl = tl
        self._handle = handle
        standard = tl.standard
        self._folds = {
            id(standard._sum_combine): (np.add, np.add),
            id(standard._elementwise_max): (np.fmax, np.maximum),
            id(standard._elementwise_min): (np.fmin, np.minimum),
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
        arrays = [np.asarray(t.handle.data) for t in inputs]
        if axis is None:
            reduced = self._reduce([a.reshape(-1) for a in arrays], 0, combine_fn, inputs)
            reduced = [a.reshape((1,) * rank) for a in reduced]
            if not keep_dims:
                reduced = [a.reshape(-1) for a in reduced]
        else:
            reduced = self._reduce(arrays, axis, combine_fn, inputs)
            if not keep_dims:
                reduced = [np.squeeze(a, axis) for a in reduced]
        scalar = not keep_dims and (axis is None or rank == 1)
        results = tuple(self._tensor(a, t.dtype, scalar) for a, t in zip(reduced, inputs, strict=True))
        return results if isinstance(input, tuple | self._tl.tuple) else results[0]

    def scan(self, input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
        """``tl.associative_scan``, same shapes as ``input``."""
        inputs = self._tensors(input)
        axis = self._axis(axis, len(inputs[0].shape))
        backwards = bool(getattr(reverse, "value", reverse))
        arrays = [np.asarray(t.handle.data) for t in inputs]
        if backwards:
            arrays = [np.flip(a, axis) for a in arrays]
        function = self._scans.get(id(combine_fn))
        if function is not None and len(arrays) == 1:
            scanned = [trees.scan(arrays[0], axis, function)]
        else:
            scanned = self._combining(trees.scan_tree, arrays, axis, combine_fn, inputs)
        if backwards:
            scanned = [np.ascontiguousarray(np.flip(a, axis)) for a in scanned]
        results = tuple(self._tensor(a, t.dtype, False) for a, t in zip(scanned, inputs, strict=True))
        return results if isinstance(input, tuple | self._tl.tuple) else results[0]

    def map(self, scalar_fn: Any, *args: Any, pack: Any = 1, **_: Any) -> Any:
        """``tl.map_elementwise``: ``scalar_fn`` of ``pack`` neighbouring elements of each tensor at a time."""
        pack = int(getattr(pack, "value", pack))
        arrays = [a.reshape(-1) for a in np.broadcast_arrays(*(np.asarray(t.handle.data) for t in args))]
        shape = np.broadcast_shapes(*(t.handle.data.shape for t in args))
        columns: list[list[Any]] = []
        types: list[Any] = []
        for start in range(0, arrays[0].size, pack):
            operands = [
                self._tensor(a[start + j : start + j + 1], t.dtype, True)
                for a, t in zip(arrays, args, strict=True)
                for j in range(pack)
            ]
            returned = scalar_fn(*operands)
            values = list(returned) if isinstance(returned, tuple | self._tl.tuple) else [returned]
            if not columns:
                columns = [[] for _ in range(len(values) // pack)]
                types = [value.dtype for value in values[::pack]]
            for position, value in enumerate(values):
                columns[position // pack].append(value.handle.data.reshape(1))
        results = [
            self._tensor(np.concatenate(column).astype(numpy_dtype(ty)).reshape(shape), ty, False)
            for column, ty in zip(columns, types, strict=True)
        ]
        return results[0] if len(results) == 1 else tuple(results)

    def _reduce(self, arrays: list[Array], axis: int, combine_fn: Any, inputs: list[Any]) -> list[Array]:
        if len(arrays) == 1 and id(combine_fn) in self._folds:
            for_floats, for_integers = self._folds[id(combine_fn)]
            function = for_floats if is_float(arrays[0].dtype) else for_integers
            if function is not None:
                return [trees.fold(arrays[0], axis, function)]
        choose = self._picks.get(id(combine_fn))
        if choose is not None and len(arrays) == 2:
            floats = is_float(arrays[0].dtype)
            values = arrays[0].astype(np.float32) if floats and arrays[0].dtype.itemsize <= 2 else arrays[0]
            if not (floats and np.isnan(values).any()):
                position_values, indices = trees.pick(values, arrays[1], axis, choose)
                return [position_values.astype(arrays[0].dtype), indices]
        return self._combining(trees.reduce_tree, arrays, axis, combine_fn, inputs)

    def _combining(self, walk: Any, arrays: list[Array], axis: int, combine_fn: Any, inputs: list[Any]) -> list[Array]:
        types = [t.dtype for t in inputs]

        def combine(left: list[Array], right: list[Array]) -> list[Array]:
            operands = [self._tensor(a, ty, False) for side in (left, right) for a, ty in zip(side, types, strict=True)]
            return self._called(combine_fn, operands, types, left[0].shape)

        def one_by_one(left: list[Array], right: list[Array]) -> list[Array]:
            results = [np.empty(a.shape, a.dtype) for a in left]
            for index in np.ndindex(left[0].shape):
                operands = [
                    self._tensor(a[index].reshape(1), ty, True)
                    for side in (left, right)
                    for a, ty in zip(side, types, strict=True)
                ]
                for result, value in zip(results, self._called(combine_fn, operands, types, (1,)), strict=True):
                    result[index] = value[0]
            return results

        global _blocks_have_no_truth
        before, _blocks_have_no_truth = _blocks_have_no_truth, True
        try:
            return list(walk(arrays, axis, combine))
        except Exception as error:
            if not _caused_by_truth(error):
                raise
        finally:
            _blocks_have_no_truth = before
        return list(walk(arrays, axis, one_by_one))

    def _called(self, combine_fn: Any, operands: list[Any], types: list[Any], shape: tuple[int, ...]) -> list[Array]:
        returned = combine_fn(*operands)
        values = returned if isinstance(returned, tuple | self._tl.tuple) else (returned,)
        arrays = []
        for value, ty in zip(values, types, strict=True):
            data = np.asarray(value.handle.data if isinstance(value, self._tl.tensor) else value)
            arrays.append(np.broadcast_to(data, shape).astype(numpy_dtype(ty), copy=False))
        return arrays

    def _tensors(self, input: Any) -> list[Any]:
        tensors = list(input) if isinstance(input, tuple | self._tl.tuple) else [input]
        for tensor in tensors:
            if not isinstance(tensor, self._tl.tensor):
                raise TypeError(f"reduce and associative_scan take tensors, got {type(tensor).__name__}")
        shapes = {tuple(int(n) for n in t.shape) for t in tensors}
        if len(shapes) > 1:
            raise ValueError(f"tensors reduced together must have one shape, got {sorted(shapes)}")
        return tensors

    def _axis(self, axis: Any, rank: int) -> Any:
        axis = getattr(axis, "value", axis)
        if axis is None:
            return None
        axis = int(axis)
        if not -rank <= axis < rank:
            raise ValueError(f"axis {axis} is outside a tensor of rank {rank}")
        return axis % rank

    def _tensor(self, array: Array, dtype: Any, scalar: bool) -> Any:
        handle = self._handle(array.reshape(1) if scalar else array, dtype.scalar)
        return self._tl.tensor(handle, dtype if scalar else self._tl.block_type(dtype, list(array.shape)))


def _caused_by_truth(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, NeedsScalars):
            return True
        error = error.__cause__
    return False
