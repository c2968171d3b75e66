"""Shape operations of the interpreter's builder: every axis that Triton names is one further back (``batch``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.control.batch import lanes
from pytest_fusion.interpreter.memory.regions import joined


def _size(n: Any) -> int:
    return int(getattr(n, "value", n))


def _together(a: Array, b: Array) -> tuple[Array, Array]:
    """Both arrays with the larger number of programs."""
    count = max(a.shape[0], b.shape[0])
    return lanes(a, count), lanes(b, count)


def create(builder: Any, *operations: Callable[..., Any]) -> None:
    """Install each operation as the builder's method ``create_<its name>``."""
    for operation in operations:
        setattr(builder, f"create_{operation.__name__}", operation)


def patch_shapes(builder: Any, handle: Any) -> None:
    """Replace the operations that change the shape of blocks, for the whole process."""

    def like(data: Array, source: Any) -> Any:
        return handle(data, source.dtype.scalar, source.attr)

    def of_both(data: Array, lhs: Any, rhs: Any) -> Any:
        attributes = joined(lhs.attr, rhs.attr) if lhs.dtype.scalar.is_ptr() else lhs.attr
        return handle(data, lhs.dtype.scalar, attributes)

    def reshape(self: Any, arg: Any, shape: Any, *_: Any) -> Any:
        return like(arg.data.reshape(arg.data.shape[0], *map(_size, shape)), arg)

    def trans(self: Any, arg: Any, perm: Any) -> Any:
        return like(np.transpose(arg.data, (0, *(_size(p) + 1 for p in perm))), arg)

    def expand_dims(self: Any, arg: Any, axis: Any) -> Any:
        return like(np.expand_dims(arg.data, _size(axis) + 1), arg)

    def broadcast(self: Any, arg: Any, shape: Any) -> Any:
        return like(np.broadcast_to(arg.data, (arg.data.shape[0], *map(_size, shape))), arg)

    def splat(self: Any, returned: Any, arg: Any) -> Any:
        shape = tuple(map(_size, returned.shape))
        programs = arg.data.shape[0]
        wide = arg.data.reshape(programs, *(1,) * len(shape))
        return like(np.broadcast_to(wide, (programs, *shape)), arg)

    def unsplat(self: Any, arg: Any) -> Any:
        return like(arg.data.reshape(arg.data.shape[0], -1)[:, 0], arg)

    def cat(self: Any, lhs: Any, rhs: Any) -> Any:
        return of_both(np.concatenate(_together(lhs.data, rhs.data), axis=1), lhs, rhs)

    def join(self: Any, lhs: Any, rhs: Any) -> Any:
        return of_both(np.stack(_together(lhs.data, rhs.data), axis=-1), lhs, rhs)

    def split(self: Any, arg: Any) -> Any:
        return like(np.ascontiguousarray(arg.data[..., 0]), arg), like(np.ascontiguousarray(arg.data[..., 1]), arg)

    def gather(self: Any, source: Any, indices: Any, axis: Any) -> Any:
        values, positions = _together(source.data, indices.data)
        axis = _size(axis)
        axis = axis + 1 if axis >= 0 else axis
        return like(np.take_along_axis(values, positions.astype(np.int64), axis=axis), source)

    def make_range(self: Any, returned: Any, start: Any, stop: Any) -> Any:
        return handle(np.arange(_size(start), _size(stop), dtype=np.int32)[None], returned.scalar)

    create(builder, reshape, trans, expand_dims, broadcast, splat, unsplat)
    create(builder, cat, join, split, gather, make_range)
