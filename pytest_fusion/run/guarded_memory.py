"""Describes guarded memory to the interpreter: which bytes a kernel may write, and which hold no value yet."""

from __future__ import annotations

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.memory.regions import Facts, Owned, holds_still, mark, memory_at
from pytest_fusion.run.memory.arena import Arena
from pytest_fusion.run.memory.far import FarRegion
from pytest_fusion.run.memory.region import Region
from pytest_fusion.run.memory.watch import Watch


class Described:
    """A provider for ``regions.described_by``.

    Of an input (``arena``) only its own elements may be written, of what the candidate allocated (``watch``) all: a
    kernel may use the padding of a buffer that it made itself.
    """

    def __init__(self, arena: Arena | None, watch: Watch) -> None:
        self._arena, self._watch = arena, watch
        self._known: dict[int, tuple[Region, Facts]] = {}

    def __call__(self, address: int) -> Facts | None:
        own = self._arena.region(address) if self._arena is not None else None
        region = own or self._watch.region(address)
        if region is None:
            return None
        known = self._known.get(address)
        # An address is used again once its tensor is gone, for another one of another size.
        if known is None or known[0] is not region:
            known = self._known[address] = (region, self._described(region))
        found = known[1]
        if found.written is not None:
            for layout in self._watch.take_written(address):
                mark(found.written, layout.shape, layout.strides, layout.offset, layout.itemsize)
        return found

    def hidden(self) -> frozenset[int]:
        """Addresses of the blocks around the guarded tensors."""
        inputs = self._arena.blocks() if self._arena is not None else frozenset()
        return inputs | self._watch.blocks()

    def _described(self, region: Region) -> Facts:
        if self._arena is not None and self._arena.region(region.address) is region:
            return Facts(own=_own(region))
        if not self._watch.fresh(region.address):
            return Facts()
        nbytes = region.storage_elements * region.dtype.itemsize
        fill = holds_still(memory_at(region.address, nbytes), np.frombuffer(region.bits, np.uint8))
        return Facts(written=np.zeros(nbytes, np.bool_), untouched=fill)


def _own(region: Region) -> Array | Owned | None:
    """Bool (bytes of the storage,): the tensor's own elements; ``None`` if they are all."""
    if region.dense:
        return None
    if isinstance(region, FarRegion):
        size = region.dtype.itemsize
        return Owned([(region.offset * size, region.shape, region.strides, size)])
    mask = np.zeros(region.storage_elements * region.dtype.itemsize, np.bool_)
    mark(mask, region.shape, region.strides, region.offset, region.dtype.itemsize)
    return mask
