"""One executed load, store or atomic: finds and checks the memory that its lanes reach, before it is performed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.control import batch
from pytest_fusion.interpreter.memory import memory_findings
from pytest_fusion.interpreter.memory.atomic_order import Order
from pytest_fusion.interpreter.memory.memory_findings import Finding, Kind, Site
from pytest_fusion.interpreter.memory.races import Conflict
from pytest_fusion.interpreter.memory.regions import Origin, Region, Regions, View, nearest


@dataclass(slots=True)
class Launching:
    """The memory and order of the current launch. ``grid`` has x, y, z."""

    regions: Regions
    grid: tuple[int, int, int]
    order: Order


_current = Launching(Regions(), (1, 1, 1), Order())


def launch() -> Launching:
    return _current


@contextmanager
def launching(regions: Regions, grid: tuple[int, int, int]) -> Iterator[Launching]:
    global _current
    before = _current
    _current = Launching(regions, grid, Order())
    try:
        yield _current
    finally:
        _current = before


def _active(mask: Array | None, pointers: Array) -> Array | None:
    """``mask`` without the lanes of inactive programs; ``None`` for all lanes."""
    active = batch.current.active
    if active is None:
        return mask
    if pointers.shape[0] == 1 and (mask is None or mask.shape[0] == 1):
        return mask if active.any() else np.zeros(pointers.shape, np.bool_)
    mine = active.reshape(-1, *(1,) * (pointers.ndim - 1))
    return mine if mask is None else mask & mine


def _program(number: int) -> tuple[int, int, int]:
    """The id of program ``number`` (from 0): the last dimension of the grid is the fastest."""
    _, y, z = _current.grid
    return number // (y * z), number // z % y, number % z


class Access:
    """One executed load, store or atomic, all its lanes. ``pointers``: uint64 (programs or 1, ...)."""

    def __init__(
        self, out_of_bounds: Kind, pointers: Array, origin: Origin | None, itemsize: int, mask: Array | None
    ) -> None:
        self.pointers, self.itemsize = pointers, itemsize
        self.mask = _active(mask, pointers)
        self._out_of_bounds: Kind = out_of_bounds
        self._origin = origin
        self._site: Site | None = None

    @property
    def site(self) -> Site:
        if self._site is None:
            self._site = memory_findings.site()
        return self._site

    def targets(self) -> Iterator[tuple[Region, View | None, Array, Array | None]]:
        """Region by region: elements of ``itemsize`` bytes (int64, valid where selected) and the lanes (``None``: all).

        Lanes that leave their region are reported and left out.
        """
        origin = self._origin
        if origin is not None and len(origin) == 1:
            (view,) = origin
            elements, selected = self._inside(view.region, view, self.mask)
            yield view.region, view, elements, selected
            return
        mask = self._mask()
        if not batch.some(mask):
            return
        among = None if not origin else {view.region: None for view in origin}
        at = batch.broadcast(self.pointers, mask.shape)
        for region, inside in _current.regions.containing(at, among):
            lanes = inside & mask
            if not batch.some(lanes):
                continue
            if region is None:
                near = nearest(origin, int(at[lanes][0])) if origin else None
                kind: Kind = self._out_of_bounds if near is not None else "use-after-free"
                self.report(kind, near, near.region if near else None, lanes)
                continue
            first = next((view for view in region.views if not origin or view in origin), None)
            elements, selected = self._inside(region, first, lanes)
            yield region, first, elements, selected

    def _mask(self) -> Array:
        """Every lane's mask, with the shape of the access."""
        if self.mask is None:
            return np.ones(self.pointers.shape, np.bool_)
        return batch.broadcast(self.mask, np.broadcast_shapes(self.mask.shape, self.pointers.shape))

    def _inside(self, region: Region, view: View | None, mask: Array | None) -> tuple[Array, Array | None]:
        offsets = self.pointers - np.uint64(region.address)
        size = self.itemsize
        if offsets.size and (region.nbytes < size or np.maximum.reduce(offsets, None) > region.nbytes - size):
            beyond = offsets > np.uint64(region.nbytes - size) if region.nbytes >= size else np.ones_like(offsets, bool)
            bad = beyond if mask is None else beyond & mask
            if batch.some(bad):
                self.report(self._out_of_bounds, view, region, bad)
                mask = ~bad if mask is None else mask & ~bad
        if self._origin is None or size > region.step:
            crooked = (offsets & np.uint64(size - 1)) != 0
            bad = crooked if mask is None else crooked & mask
            if batch.some(bad):
                self.report("misaligned-access", view, region, bad)
                mask = ~bad if mask is None else mask & ~bad
        shift = size.bit_length() - 1
        return (offsets >> np.uint64(shift)).view(np.int64), mask

    def report(
        self,
        kind: Kind,
        view: View | None,
        region: Region | None,
        lanes: Array,
        *,
        conflict: Conflict | None = None,
        site: Site | None = None,
        number: int | None = None,
    ) -> None:
        """Report a finding about the lanes ``lanes`` (bool of the access's shape, or with fewer programs).

        ``site`` and ``number`` (from 1) are those of the access, unless the finding is about an earlier one.
        """
        position = np.unravel_index(int(np.argmax(lanes)), lanes.shape)
        if number is None:
            number = self.number(int(position[0]), lanes.shape[0])
        pointers = batch.broadcast(self.pointers, np.broadcast_shapes(self.pointers.shape, lanes.shape))
        address = int(pointers[position])
        site = site or self.site
        offset = index = None
        detail = ""
        if view is not None:
            byte = address - view.region.address
            index = view.index(byte) if 0 <= byte < view.region.nbytes else None
            offset = (byte - view.start) // view.itemsize
            detail = _outside(view, byte)
        elif region is None:
            detail = f"{address:#x}, which is inside no live tensor"
        elif kind == "misaligned-access":
            detail = f"{address:#x}"
        if kind == "misaligned-access" and address % self.itemsize != 0:
            detail = f"address {address:#x}, no multiple of the {self.itemsize} bytes accessed"
            index = None
        other = other_line = None
        if conflict is not None:
            who = int(conflict.others[0])
            other = _program(who - 1) if who > 0 else None
            other_line = conflict.site.line if conflict.site else None
        layout = (view.shape, view.strides, view.dtype) if view is not None else ((), (), "")
        program, name, count = _program(number - 1), view.name if view is not None else None, int(lanes.sum())
        memory_findings.report(
            Finding(kind, *site.located, name, program, index, offset, *layout, count, other, other_line, detail)
        )

    def number(self, row: int, rows: int) -> int:
        """Number from 1 of the program in ``row`` of ``rows``; of a row that all share, the first active one."""
        now = batch.current
        if rows == 1 and now.count > 1:
            row = int(np.argmax(now.active)) if now.active is not None else 0
        return int(now.numbers[row]) + 1


def _outside(view: View, byte: int) -> str:
    """How far ``byte`` is outside the storage, as text."""
    size, region = view.itemsize, view.region
    if byte < 0:
        return f"{-(byte // size)} before the start of its storage"
    if byte >= region.nbytes:
        return f"{(byte - region.nbytes) // size + 1} past the end of its storage"
    return "" if view.index(byte) is not None else "which is none of its elements"
