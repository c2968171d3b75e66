"""Tensor descriptors and block pointers: a base, a shape and strides instead of a block of pointers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, numpy_dtype
from pytest_fusion.interpreter.control import batch
from pytest_fusion.interpreter.memory.regions import joined

_ALIGNMENT = 16


def _scalar(handle: Any) -> Array:
    return np.asarray(handle.data.reshape(-1).astype(np.int64))


def _pick(chosen: Array, mine: Array, theirs: Array) -> Array:
    return mine if mine is theirs else np.where(chosen, mine, theirs)


@dataclass(slots=True)
class Blocks:
    """A block of a strided tensor: the common part of descriptors and block pointers.

    ``base``: the pointer's handle; ``shape`` and ``strides``: int64 (programs or 1,) each, strides in elements.
    """

    base: Any
    shape: list[Array]
    strides: list[Array]
    block_shape: list[int]

    @property
    def dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self.base.get_element_ty())

    def pointers(self, offsets: Sequence[Array], bounded: Sequence[int]) -> tuple[Array, Array]:
        """Addresses of the block that begins at ``offsets``, and which are inside along the axes ``bounded``."""
        rank = len(self.block_shape)
        at = self.base.data.reshape(-1, *(1,) * rank)
        mask: Array = np.ones((1, *(1,) * rank), np.bool_)
        for axis, (offset, size) in enumerate(zip(offsets, self.block_shape, strict=True)):
            along = [1] * rank
            along[axis] = size
            position = (offset[:, None] + np.arange(size)).reshape(-1, *along)
            stride = self.strides[axis].reshape(-1, *(1,) * rank)
            at = at + (position * stride * self.dtype.itemsize).view(np.uint64)
            if axis in bounded:
                limit = self.shape[axis].reshape(-1, *(1,) * rank)
                mask = mask & (position >= 0) & (position < limit)
        programs = max(at.shape[0], mask.shape[0])
        block = (programs, *self.block_shape)
        return np.broadcast_to(at, block), np.broadcast_to(mask, block)

    def alike(self, other: Blocks) -> bool:
        """Whether the two could be values of one variable: same kind, block shape and type."""
        return type(self) is type(other) and (self.block_shape, self.dtype) == (other.block_shape, other.dtype)

    def _merged(self, chosen: Array, other: Blocks) -> dict[str, Any]:
        data = _pick(chosen, self.base.data, other.base.data)
        base = self.base
        if data is not base.data:
            base = type(base)(data, base.dtype, joined(base.attr, other.base.attr))
        return {
            "base": base,
            "shape": [_pick(chosen, a, b) for a, b in zip(self.shape, other.shape, strict=True)],
            "strides": [_pick(chosen, a, b) for a, b in zip(self.strides, other.strides, strict=True)],
        }


def _require(met: Array, condition: str) -> None:
    """Raise ``AssertionError`` unless all are met; pytest would rewrite an ``assert``, with six lines of numpy's."""
    if not bool(met.all()):
        raise AssertionError(condition)


@dataclass(slots=True)
class Descriptor(Blocks):
    """``tl.make_tensor_descriptor`` or a host ``TensorDescriptor``; ``nan`` (programs or 1,): NaN outside the shape."""

    nan: Array
    round_f32_to_tf32: bool | Array = False

    @classmethod
    def make(cls, base: Any, shape: Any, strides: Any, block_shape: Any, *, nan: bool) -> Descriptor:
        """Make a descriptor. Raises ``AssertionError`` for a base or stride that is no multiple of 16 bytes."""
        block = [int(getattr(n, "value", n)) for n in block_shape]
        made = cls(base, [_scalar(s) for s in shape], [_scalar(s) for s in strides], block, np.array([nan]))
        now = batch.current
        _require(now.of_active(base.data.reshape(-1)) % _ALIGNMENT == 0, "base must be 16-byte aligned")
        for stride in made.strides[:-1]:
            aligned = now.of_active(stride * made.dtype.itemsize) % _ALIGNMENT == 0
            _require(aligned, "stride must be 16-byte aligned")
        _require(now.of_active(made.strides[-1]) == 1, "last dim must be contiguous")
        return made

    def block(self, indices: Sequence[Any]) -> tuple[Array, Array]:
        """Addresses and mask of the block at ``indices`` (handles of scalars).

        Raises ``AssertionError`` unless it begins at a multiple of 16 bytes: a store at column 3 of bfloat16 was an
        illegal instruction on an H200.
        """
        offsets = [_scalar(i) for i in indices]
        start = batch.current.of_active(offsets[-1] * self.dtype.itemsize)
        _require(start % _ALIGNMENT == 0, "block offset start must be 16-byte aligned")
        return self.pointers(offsets, range(len(self.block_shape)))

    def rows(self, x_offsets: Any, y_offset: Any) -> tuple[Array, Array]:
        """Addresses and mask of the rows ``x_offsets`` (a block), from column ``y_offset`` on."""
        rows = x_offsets.data.astype(np.int64)
        columns = _scalar(y_offset)[:, None] + np.arange(self.block_shape[-1])
        size = self.dtype.itemsize
        at = self.base.data.reshape(-1, 1, 1) + (
            (rows * self.strides[0][:, None])[:, :, None] * size + columns[:, None, :] * size
        ).view(np.uint64)
        inside = ((rows >= 0) & (rows < self.shape[0][:, None]))[:, :, None]
        mask = inside & ((columns >= 0) & (columns < self.shape[1][:, None]))[:, None, :]
        at, mask = np.broadcast_arrays(at, mask)
        return at, mask

    def merged(self, chosen: Array, other: Descriptor) -> Descriptor:
        """This one in the programs ``chosen``, ``other`` elsewhere."""
        rounded = _pick(chosen, np.atleast_1d(self.round_f32_to_tf32), np.atleast_1d(other.round_f32_to_tf32))
        nan = _pick(chosen, self.nan, other.nan)
        return replace(self, **self._merged(chosen, other), nan=nan, round_f32_to_tf32=rounded)


@dataclass(slots=True)
class BlockPointer(Blocks):
    """``tl.make_block_ptr`` (Triton up to 3.7)."""

    offsets: list[Array]

    @classmethod
    def make(cls, base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any) -> BlockPointer:
        """A block pointer from handles of scalars."""
        block = [int(getattr(n, "value", n)) for n in block_shape]
        parts = [[_scalar(part) for part in parts] for parts in (shape, strides, offsets)]
        return cls(base, parts[0], parts[1], block, parts[2])

    def advance(self, steps: Sequence[Any]) -> BlockPointer:
        """The block pointer moved by ``steps``."""
        return replace(self, offsets=[o + _scalar(s) for o, s in zip(self.offsets, steps, strict=True)])

    def block(self, boundary_check: Sequence[int]) -> tuple[Array, Array]:
        """Addresses and mask of the block, bounded along the axes ``boundary_check``."""
        return self.pointers(self.offsets, [int(getattr(a, "value", a)) for a in boundary_check])

    def merged(self, chosen: Array, other: BlockPointer) -> BlockPointer:
        """This one in the programs ``chosen``, ``other`` elsewhere."""
        offsets = [_pick(chosen, a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        return replace(self, **self._merged(chosen, other), offsets=offsets)
