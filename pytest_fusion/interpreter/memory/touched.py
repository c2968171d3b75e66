"""The lanes of an access that reach one storage, with their elements and programs."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.control import batch

# The program number of a lane that several programs share.
MANY = -1


class Touched:
    """``elements`` (int64, of ``itemsize`` bytes each, (programs or 1, ...)) where ``selected`` (all: ``None``).

    The rest is computed on first use: most loads are from memory without stores.
    """

    def __init__(self, elements: Array, selected: Array | None, itemsize: int) -> None:
        if selected is not None and selected.shape != elements.shape:
            self.shape = np.broadcast_shapes(elements.shape, selected.shape)
        else:
            self.shape = elements.shape
        self._elements, self._selected, self.itemsize = elements, selected, itemsize
        now = batch.current
        self._numbers, self._active, self._count = now.numbers, now.active, now.count
        self._turned = now.turned

    @property
    def held(self) -> int:
        """How many elements of memory this holds."""
        return int(self._elements.size)

    @cached_property
    def selected(self) -> Array | None:
        """Bool of the access's shape; ``None`` for all lanes."""
        return None if self._selected is None else batch.broadcast(self._selected, self.shape)

    @cached_property
    def flat(self) -> Array:
        """The selected elements, int64 (lanes,)."""
        elements = batch.broadcast(self._elements, self.shape)
        return elements.reshape(-1) if self.selected is None else elements[self.selected]

    @cached_property
    def index(self) -> Array | slice:
        """``flat``, as a slice if it counts up by one: ten times faster, and no two lanes share an element."""
        flat = self.flat
        if flat.size > 1 and flat[-1] - flat[0] == flat.size - 1 and bool((flat[1:] - flat[:-1] == 1).all()):
            return slice(int(flat[0]), int(flat[-1]) + 1)
        return flat

    @cached_property
    def turns(self) -> Array | slice:
        """The lanes, program by program, in the order in which they run: a permutation that is its own inverse."""
        if not self._turned:
            return slice(None)
        rows = self.shape[0]
        selected = np.ones((rows, self.flat.size // rows), np.bool_) if self.selected is None else self.selected
        each = selected.reshape(rows, -1).sum(1)
        ends = np.cumsum(each)
        return np.asarray(np.repeat(2 * ends - each - 1, each) - np.arange(self.flat.size))

    def put(self, values: Array, memory: Array) -> None:
        """Store ``values``, (lanes,); of those for the same element the last one to run stays."""
        if isinstance(self.index, slice):
            memory[self.index] = values
        else:
            memory[self.index[self.turns]] = values[self.turns]

    @cached_property
    def actors(self) -> Array:
        """Numbers, from 1, of all active programs."""
        return (self._numbers if self._active is None else self._numbers[self._active]) + 1

    @cached_property
    def programs(self) -> Array:
        """Number, from 1, of the program of each lane, int32 (lanes,), or (1,) for a lane that all share."""
        if self.shape[0] == 1 and self._count > 1:
            return (self.actors[:1] if self.actors.size == 1 else np.array([MANY])).astype(np.int32)
        numbers = (self._numbers + 1).astype(np.int32)
        if numbers.size == 1:
            return numbers
        if self.selected is None:
            return np.repeat(numbers, self.flat.size // numbers.size)
        return np.repeat(numbers, self.selected.reshape(numbers.size, -1).sum(1))

    def of(self, values: Array) -> Array:
        """The entries of ``values`` (of the access's shape, or broadcastable) that belong to the selected lanes."""
        whole = batch.broadcast(values, self.shape)
        return whole.reshape(-1) if self.selected is None else whole[self.selected]

    def at(self, positions: Array) -> Array:
        """Bool of the access's shape: the lanes at these positions among the selected ones."""
        result = np.zeros(self.shape, np.bool_)
        if self.selected is not None:
            positions = np.flatnonzero(self.selected)[positions]
        result.reshape(-1)[positions] = True
        return result
