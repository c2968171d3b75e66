"""Loads, stores and atomics on real memory, through Triton's own C++ code.

That code knows unsigned integers and numpy's floats; ``bfloat16`` and ``float8`` pass as integers of their width, and
16-bit float atomics, which it lacks or refuses, are made of loads and stores: programs run one after another here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from pytest_fusion.run.interpreter.dtypes import Array, poison, raw, raw_dtype

Fill = Literal["poison", "zero"]

_fill: Fill = "poison"


@contextmanager
def masked_fill(fill: Fill) -> Iterator[None]:
    """What a masked-off load without ``other`` yields: ``"poison"`` (the default) or ``"zero"``.

    Triton leaves such a value undefined; today's NVIDIA code generator happens to move zero into the register first.
    """
    global _fill
    before, _fill = _fill, fill
    try:
        yield
    finally:
        _fill = before


class Memory:
    """Memory of the process, by address. ``native`` is Triton's C++ interpreter module."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def load(
        self, pointers: Array, dtype: np.dtype[Any], mask: Array | None = None, other: Array | None = None
    ) -> Array:
        """Values of ``dtype`` at ``pointers`` (uint64 addresses, any shape); ``other`` or a fill where masked off."""
        if mask is None:
            mask = np.ones(pointers.shape, np.bool_)
        if other is not None:
            rest = np.ascontiguousarray(np.broadcast_to(other, pointers.shape))
        elif _fill == "zero":
            rest = np.zeros(pointers.shape, dtype)
        else:
            rest = np.full(pointers.shape, poison(dtype), dtype)
        loaded = self._native.load(pointers, mask, raw(rest), raw_dtype(dtype))
        return np.asarray(loaded).view(dtype)

    def store(self, pointers: Array, values: Array, mask: Array | None = None) -> None:
        """Write ``values`` to ``pointers`` where ``mask`` holds; of equal addresses the last one wins."""
        if mask is None:
            mask = np.ones(pointers.shape, np.bool_)
        values = np.ascontiguousarray(np.broadcast_to(values, pointers.shape))
        self._native.store(pointers, raw(values), mask)

    def update(self, function: Callable[[Array, Array], Array], pointers: Array, values: Array, mask: Array) -> Array:
        """Read-modify-write in index order; returns what each element found, unmasked ones the fill."""
        flat = np.broadcast_to(pointers, values.shape).reshape(-1)
        operands = values.reshape(-1)
        found = np.zeros(operands.shape, operands.dtype)
        waiting = np.flatnonzero(np.broadcast_to(mask, values.shape).reshape(-1))
        while waiting.size:
            # One round takes the first waiting element of each address, so that equal addresses see each other.
            first = np.sort(np.unique(flat[waiting], return_index=True)[1])
            now = waiting[first]
            old = self.load(flat[now], operands.dtype)
            self.store(flat[now], function(old, operands[now]))
            found[now] = old
            waiting = np.delete(waiting, first)
        return found.reshape(values.shape)

    def exchange_if_equal(self, pointers: Array, expected: Array, values: Array) -> Array:
        """Compare-and-swap of bit patterns, element by element; returns what was found."""
        found = np.empty(values.shape, values.dtype)
        bits = np.dtype(f"u{values.dtype.itemsize}")
        for index in np.ndindex(values.shape):
            at = pointers[index].reshape(1)
            old = self.load(at, values.dtype)
            found[index] = old[0]
            if old.view(bits)[0] == expected[index].reshape(1).view(bits)[0]:
                self.store(at, values[index].reshape(1))
        return found
