"""Races: records which program last stored and loaded each element, and reports unordered accesses.

Two programs' store and other access to one element race unless both are atomic, the store changes nothing, or atomics
on scalars order them (``atomic_order``): the "last program done" ticket, a lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.memory.atomic_order import Order
from pytest_fusion.interpreter.memory.memory_findings import Site
from pytest_fusion.interpreter.memory.touched import MANY, Touched

# Elements of accesses stored per storage, 8 bytes each; beyond, the oldest are dropped.
_MOST_STORED = 1 << 22


@dataclass(slots=True)
class Past:
    """An executed access: its lanes, time, line and argument."""

    lanes: Touched
    time: int
    site: Site
    argument: Any


@dataclass(slots=True)
class Conflict:
    """Lanes (flat positions) that race, the other program of each, and the line and argument of its access."""

    lanes: Array
    others: Array
    site: Site | None = None
    argument: Any = None


@dataclass(slots=True)
class Shadow:
    """The access history of a storage: for each element of ``granule`` bytes, programs numbered from 1."""

    elements: int
    granule: int
    grid: int
    order: Order
    stores: list[Past] = field(default_factory=list)
    loads: list[Past] = field(default_factory=list)
    atomics: list[Past] = field(default_factory=list)
    _writer: Array | None = None
    _reader: Array | None = None
    # The program with the last atomic, and the program with the only atomic.
    _toucher: Array | None = None
    _touched: Array | None = None
    # When each element was stored; zero, before any order, until the first atomic that orders programs.
    _stored_at: Array | None = None
    # When each program last loaded anything.
    _loaded_at: Array | None = None
    _held: int = 0

    def load(self, lanes: Touched, site: Site, argument: Any) -> Conflict | None:
        """A load; races with another program's store or atomic before it."""
        self._refine(lanes.itemsize)
        conflict = None
        if self._writer is not None:
            index, programs = self._fine(lanes)
            writer = self._writer[index]
            foreign = self._unordered((writer > 0) & (writer != programs), writer, self._stored(index), programs, lanes)
            if foreign.any():
                conflict = self._conflict(foreign, writer, lanes, self.stores)
        if conflict is None and self._touched is not None:
            conflict = self._load_after_atomic(lanes)
        if self._loaded_at is None:
            self._loaded_at = np.zeros(self.grid + 1, np.int64)
        time = self.order.now()
        self._loaded_at[lanes.actors] = time
        self._note(self.loads, Past(lanes, time, site, argument))
        if self._reader is not None:
            self._read(self._reader, lanes)
        return conflict

    def store(
        self, lanes: Touched, changed: Callable[[], Array], site: Site, argument: Any
    ) -> tuple[Conflict | None, Conflict | None]:
        """A store; ``changed()``: whether it changes each element. Races with stores and atomics, and with loads."""
        if self._writer is None:
            self._writer = np.zeros(self.elements, np.int32)
        index, programs = self._fine(lanes)
        time = self.order.now()
        with_store = self._after_store(index, programs, lanes, changed)
        if with_store is None:
            with_store = self._store_after_atomic(index, programs, lanes)
        with_load = self._store_after_load(index, programs, lanes, changed) if self.loads else None
        self._writer[index] = programs
        if programs.size > 1 and not isinstance(index, slice):
            # Several programs store the same value here and may each load it again; different values were reported.
            shared = self._writer[index] != programs
            self._writer[index[shared]] = MANY
        if self._stored_at is None and self.order.any:
            self._stored_at = np.zeros(self.elements, np.int32)
        if self._stored_at is not None:
            self._stored_at[index] = time
        if self._reader is not None:
            # A later store without a race comes after this store, and so after the loads before it.
            self._reader[index] = 0
        self._note(self.stores, Past(lanes, time, site, argument))
        return with_store, with_load

    def atomic(self, lanes: Touched, site: Site, argument: Any) -> Conflict | None:
        """An atomic; races with another program's plain store."""
        index, programs = self._fine(lanes)
        conflict = self._after_store(index, programs, lanes, None) if self._writer is not None else None
        if self._toucher is None or self._touched is None:
            self._toucher, self._touched = np.zeros((2, self.elements), np.int32)
        # Only the last one: a program whose own atomic came last has seen all of them (a ticket that it may reset).
        before, self._toucher[index], self._touched[index] = self._touched[index].copy(), programs, programs
        several = ((before != 0) & (before != programs)) | (self._touched[index] != programs)
        self._touched[self._granules(lanes)[several]] = MANY
        self._note(self.atomics, Past(lanes, 0, site, argument))
        return conflict

    def _load_after_atomic(self, lanes: Touched) -> Conflict | None:
        """A load races with atomics of other programs: their total is complete only after the last one."""
        assert self._touched is not None
        index, programs = self._fine(lanes)
        touched = self._touched[index]
        foreign = (touched == MANY) | ((touched != 0) & (touched != programs))
        foreign = self._unordered(foreign, touched, np.zeros(1, np.int32), programs, lanes)
        if self.order.any:
            foreign &= ~self._all_before(foreign & (touched == MANY), lanes, self.atomics)
        return self._conflict(foreign, touched, lanes, self.atomics, own=programs) if foreign.any() else None

    def _after_store(
        self, index: Array | slice, programs: Array, lanes: Touched, changed: Callable[[], Array] | None
    ) -> Conflict | None:
        """A store or atomic races with a store of another program, unless they are ordered."""
        assert self._writer is not None
        writer = self._writer[index]
        foreign = (writer != 0) & (writer != programs)
        if foreign.any() and changed is not None:
            foreign &= self._wide(changed(), lanes)
        foreign = self._unordered(foreign, writer, self._stored(index), programs, lanes)
        if self.order.any:
            foreign &= ~self._all_before(foreign & (writer == MANY), lanes, self.stores)
        return self._conflict(foreign, writer, lanes, self.stores) if foreign.any() else None

    def _store_after_atomic(self, index: Array | slice, programs: Array, lanes: Touched) -> Conflict | None:
        if self._toucher is None:
            return None
        toucher = self._toucher[index]
        foreign = (toucher != 0) & (toucher != programs)
        foreign = self._unordered(foreign, toucher, np.zeros(1, np.int32), programs, lanes)
        return self._conflict(foreign, toucher, lanes, self.atomics) if foreign.any() else None

    def _store_after_load(
        self, index: Array | slice, programs: Array, lanes: Touched, changed: Callable[[], Array]
    ) -> Conflict | None:
        if self._reader is None:
            self._reader = np.zeros(self.elements, np.int32)
            for past in self.loads:
                self._read(self._reader, past.lanes)
        reader = self._reader[index]
        foreign = (reader != 0) & (reader != programs)
        if self.grid < 2:
            foreign &= reader != MANY
        if foreign.any():
            foreign &= self._wide(changed(), lanes)
        if foreign.any() and self.order.any and self._loaded_at is not None:
            foreign = self._unordered(foreign, reader, self._loaded_at[np.maximum(reader, 0)], programs, lanes)
            foreign &= ~self._all_before(foreign, lanes, self.loads)
        return self._conflict(foreign, reader, lanes, self.loads, own=programs) if foreign.any() else None

    def _stored(self, index: Array | slice) -> Array:
        return np.zeros(1, np.int32) if self._stored_at is None else self._stored_at[index]

    def _unordered(self, foreign: Array, first: Array, since: Array, programs: Array, lanes: Touched) -> Array:
        """``foreign`` without elements whose access by ``first``, at ``since``, is ordered before this one."""
        at = np.flatnonzero(foreign)
        if not at.size or not self.order.any:
            return foreign
        first, since = first[at], since[at] if since.size > 1 else since
        shared = programs.size == 1 and programs[0] == MANY
        seconds = lanes.actors[:, None] if shared else [programs[at] if programs.size > 1 else programs]
        good = np.ones(at.size, np.bool_)
        for second in seconds:
            good &= (first == second) | self.order.ordered(first, since, second)
            if not good.any():
                return foreign
        result = foreign.copy()
        result[at[good]] = False
        return result

    def _fine(self, lanes: Touched) -> tuple[Array | slice, Array]:
        """The lanes' elements in granules, and the program of each granule, int32 (granules,) or (1,)."""
        self._refine(lanes.itemsize)
        if lanes.itemsize == self.granule:
            return lanes.index, lanes.programs
        times = lanes.itemsize // self.granule
        programs = lanes.programs
        return self._granules(lanes), np.repeat(programs, times) if programs.size > 1 else programs

    def _refine(self, itemsize: int) -> None:
        """Switch to smaller granules, if these elements are smaller."""
        if itemsize >= self.granule:
            return
        times = self.granule // itemsize
        for name in ("_writer", "_reader", "_toucher", "_touched", "_stored_at"):
            array = getattr(self, name)
            if array is not None:
                setattr(self, name, np.repeat(array, times))
        self.elements, self.granule = self.elements * times, itemsize

    def _granules(self, lanes: Touched) -> Array:
        times = lanes.itemsize // self.granule
        flat = lanes.flat
        return flat if times == 1 else (flat[:, None] * times + np.arange(times)).reshape(-1)

    def _wide(self, per_lane: Array, lanes: Touched) -> Array:
        times = lanes.itemsize // self.granule
        return per_lane if times == 1 else np.repeat(per_lane, times)

    def _read(self, reader: Array, lanes: Touched) -> None:
        index, programs = self._fine(lanes)
        before = reader[index]
        several = (before != 0) & (before != programs)
        reader[index] = programs
        # Lanes of one instruction: of equal elements the last one is stored now.
        several |= reader[index] != programs
        if several.any():
            reader[self._granules(lanes)[several]] = MANY

    def _all_before(self, several: Array, lanes: Touched, accesses: list[Past]) -> Array:
        """The elements of ``several`` for which every one of ``accesses`` is ordered before the current one."""
        programs = self._fine(lanes)[1]
        if programs.size == 1 and programs[0] == MANY:
            fine = several
            for program in lanes.actors:
                fine = self._all_before_program(fine, lanes, accesses, np.array([program]))
            return fine
        return self._all_before_program(several, lanes, accesses, programs)

    def _all_before_program(self, several: Array, lanes: Touched, accesses: list[Past], programs: Array) -> Array:
        """The same for ``programs``, one for each lane or one for all."""
        fine = several.copy()
        wanted = np.flatnonzero(several)
        if not wanted.size:
            return fine
        elements = self._granules(lanes)
        storing = np.broadcast_to(programs, elements.shape)[wanted]
        sorting = np.argsort(elements[wanted], kind="stable")
        ordered = elements[wanted][sorting]
        for past in accesses:
            loaded = self._granules(past.lanes)
            at = np.minimum(np.searchsorted(ordered, loaded), ordered.size - 1)
            hits = np.flatnonzero(ordered[at] == loaded)
            if not hits.size:
                continue
            lane = sorting[at[hits]]
            loading = self._fine(past.lanes)[1]
            if loading.size == 1:
                who = past.lanes.actors if loading[0] == MANY else loading
                loading, lane = np.repeat(who, hits.size), np.tile(lane, who.size)
            else:
                loading = loading[hits]
            before = (loading == storing[lane]) | self.order.ordered(loading, np.array([past.time]), storing[lane])
            fine[wanted[lane[~before]]] = False
        return fine

    def _note(self, accesses: list[Past], past: Past) -> None:
        accesses.append(past)
        self._held += past.lanes.held
        while self._held > _MOST_STORED and len(accesses) > 1:
            self._held -= accesses.pop(0).lanes.held

    def _conflict(
        self, foreign: Array, others: Array, lanes: Touched, accesses: list[Past], own: Array | None = None
    ) -> Conflict:
        """The racing lanes, with the line of the other access of the first one."""
        positions = np.flatnonzero(foreign)
        found = others[positions]
        times = lanes.itemsize // self.granule
        element = self._granules(lanes)[positions[0]]
        mine = 0
        if own is not None:
            mine = int(own[positions[0]] if own.size > 1 else own[0])
            mine = int(lanes.actors[0]) if mine == MANY else mine
        for past in reversed(accesses):
            hit = self._granules(past.lanes) == element
            if not hit.any():
                continue
            programs = self._fine(past.lanes)[1]
            if programs.size == 1:
                who = past.lanes.actors if programs[0] == MANY else programs
            else:
                who = programs[hit]
            strangers = who[who != mine]
            if strangers.size:
                if found[0] == MANY:
                    found[0] = strangers[0]
                return Conflict(positions // times, found, past.site, past.argument)
        return Conflict(positions // times, found)
