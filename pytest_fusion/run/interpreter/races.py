"""Which program last stored and loaded each element, and whether two of them were put in an order.

Two programs of a launch run in no order on a GPU. A store and another access to the same element by two programs are
a race unless both are atomic, the store leaves the value as it was, or an atomic with release semantics by the first
came before one with acquire semantics by the second on the same address (the "last program done" ticket, a lock). Only
atomics on scalars are taken for such signals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pytest_fusion.run.interpreter.dtypes import Array
from pytest_fusion.run.interpreter.findings import Site
from pytest_fusion.run.interpreter.touched import MANY, Touched

# Elements whose loads are remembered per storage, 8 bytes each; beyond, the oldest are forgotten.
_REMEMBERED = 1 << 22


@dataclass(slots=True)
class _Point:
    """The synchronising atomics on one address: program, time, and what each of them does."""

    programs: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    acquires: list[bool] = field(default_factory=list)
    releases: list[bool] = field(default_factory=list)


class Order:
    """Which atomics put two programs of a launch in an order; programs are numbered from 1."""

    def __init__(self) -> None:
        self._time = 0
        self._points: dict[int, _Point] = {}

    def now(self) -> int:
        """The time of the next event."""
        self._time += 1
        return self._time

    def atomic(self, addresses: Array, programs: Array, *, acquire: bool, release: bool) -> None:
        """One scalar atomic of each program, in this order; (programs,) both."""
        for address, program in zip(addresses.tolist(), programs.tolist(), strict=True):
            point = self._points.setdefault(address, _Point())
            point.programs.append(program)
            point.times.append(self.now())
            point.acquires.append(acquire)
            point.releases.append(release)

    def ordered(self, first: Array, since: Array, second: Array) -> Array:
        """Whether what ``first`` did at ``since`` comes before what ``second`` does now; (lanes,) or (1,) each."""
        first, since, second = np.broadcast_arrays(first, since, second)
        result = np.zeros(first.shape, np.bool_)
        if not self._points:
            return result
        # A release counts from the moment of the access on, an acquire after that release on the same address.
        triples = np.stack([first, since, second]).astype(np.int64)
        different, lanes = np.unique(triples, axis=1, return_inverse=True)
        known = np.zeros(different.shape[1], np.bool_)
        for point in self._points.values():
            programs, times = np.array(point.programs), np.array(point.times)
            acquires, releases = np.array(point.acquires), np.array(point.releases)
            for i, (one, at, two) in enumerate(different.T.tolist()):
                if known[i] or one < 1:
                    continue
                taken = times[acquires & (programs == two)]
                given = times[releases & (programs == one) & (times > at)]
                known[i] = bool(taken.size and given.size and taken.max() > given.min())
        result[...] = known[lanes.reshape(first.shape)]
        return result


@dataclass(slots=True)
class Past:
    """An executed access: its lanes, when and where it was, and through which argument."""

    lanes: Touched
    time: int
    site: Site
    argument: Any


@dataclass(slots=True)
class Conflict:
    """Lanes (flat positions) that race, the program on the other side of each, and that one's line and argument."""

    lanes: Array
    others: Array
    site: Site | None = None
    argument: Any = None


@dataclass(slots=True)
class Shadow:
    """What is remembered of one storage: per element of ``granule`` bytes, programs numbered from 1."""

    elements: int
    granule: int
    grid: int
    order: Order
    stores: list[Past] = field(default_factory=list)
    loads: list[Past] = field(default_factory=list)
    atomics: list[Past] = field(default_factory=list)
    _writer: Array | None = None
    _reader: Array | None = None
    _toucher: Array | None = None
    _stored_at: Array | None = None
    _loaded_at: Array | None = None
    _held: int = 0

    def load(self, lanes: Touched, site: Site, argument: Any) -> Conflict | None:
        """A load; races with another program's store before it."""
        conflict = None
        if self._writer is not None and self._stored_at is not None:
            index, programs = self._fine(lanes)
            writer = self._writer[index]
            foreign = (writer > 0) & (writer != programs)
            if foreign.any():
                foreign &= ~self.order.ordered(writer, self._stored_at[np.maximum(writer, 0)], programs)
            if foreign.any():
                conflict = self._conflict(foreign, writer, lanes, self.stores)
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
        if self._writer is None or self._stored_at is None:
            self._writer = np.zeros(self.elements, np.int32)
            self._stored_at = np.zeros(self.grid + 1, np.int64)
        index, programs = self._fine(lanes)
        with_store = self._store_after_store(index, programs, lanes, changed)
        if with_store is None:
            with_store = self._store_after_atomic(index, programs, lanes)
        with_load = self._store_after_load(index, programs, lanes, changed) if self.loads else None
        self._writer[index] = programs
        self._stored_at[lanes.actors] = self.order.now()
        self._note(self.stores, Past(lanes, 0, site, argument))
        return with_store, with_load

    def atomic(self, lanes: Touched, site: Site, argument: Any) -> Conflict | None:
        """An atomic; races with another program's plain store."""
        conflict = None
        index, programs = self._fine(lanes)
        if self._writer is not None and self._stored_at is not None:
            writer = self._writer[index]
            foreign = (writer != 0) & (writer != programs)
            if foreign.any():
                foreign &= ~self.order.ordered(writer, self._stored_at[np.maximum(writer, 0)], programs)
            if foreign.any():
                conflict = self._conflict(foreign, writer, lanes, self.stores)
        if self._toucher is None:
            self._toucher = np.zeros(self.elements, np.int32)
        # The last one only: a program whose own atomic came last has seen all of them (a ticket that it may reset).
        self._toucher[index] = programs
        self._note(self.atomics, Past(lanes, 0, site, argument))
        return conflict

    def _store_after_store(
        self, index: Array | slice, programs: Array, lanes: Touched, changed: Callable[[], Array]
    ) -> Conflict | None:
        assert self._writer is not None
        assert self._stored_at is not None
        writer = self._writer[index]
        if not writer.any():
            return None
        foreign = (writer != 0) & (writer != programs)
        if foreign.any():
            foreign &= self._wide(changed(), lanes)
        if foreign.any():
            foreign &= ~self.order.ordered(writer, self._stored_at[np.maximum(writer, 0)], programs)
        return self._conflict(foreign, writer, lanes, self.stores) if foreign.any() else None

    def _store_after_atomic(self, index: Array | slice, programs: Array, lanes: Touched) -> Conflict | None:
        if self._toucher is None:
            return None
        toucher = self._toucher[index]
        foreign = (toucher != 0) & (toucher != programs)
        if foreign.any():
            foreign &= ~self.order.ordered(toucher, np.zeros(1, np.int64), programs)
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
        if foreign.any() and self._loaded_at is not None:
            foreign &= ~self.order.ordered(reader, self._loaded_at[np.maximum(reader, 0)], programs)
            foreign &= ~self._all_before(foreign & (reader == MANY), lanes)
        return self._conflict(foreign, reader, lanes, self.loads, own=programs) if foreign.any() else None

    def _fine(self, lanes: Touched) -> tuple[Array | slice, Array]:
        """The lanes' elements in granules, and the program of each granule, int32 (granules,) or (1,)."""
        if lanes.itemsize == self.granule:
            return lanes.index, lanes.programs
        if lanes.itemsize < self.granule:
            times = self.granule // lanes.itemsize
            for name in ("_writer", "_reader", "_toucher"):
                array = getattr(self, name)
                if array is not None:
                    setattr(self, name, np.repeat(array, times))
            self.elements, self.granule = self.elements * times, lanes.itemsize
            return lanes.index, lanes.programs
        times = lanes.itemsize // self.granule
        programs = lanes.programs
        return self._granules(lanes), np.repeat(programs, times) if programs.size > 1 else programs

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
        # Lanes of one instruction: of equal elements the last one is there now.
        several |= reader[index] != programs
        if several.any():
            reader[self._granules(lanes)[several]] = MANY

    def _all_before(self, several: Array, lanes: Touched) -> Array:
        """Of elements that several programs have loaded: whether each of those loads comes before the store now."""
        fine = several.copy()
        wanted = np.flatnonzero(several)
        if not wanted.size:
            return fine
        elements, programs = self._granules(lanes), self._fine(lanes)[1]
        storing = np.broadcast_to(programs, elements.shape)[wanted]
        sorting = np.argsort(elements[wanted], kind="stable")
        ordered = elements[wanted][sorting]
        for past in self.loads:
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
        while self._held > _REMEMBERED and len(accesses) > 1:
            self._held -= accesses.pop(0).lanes.held

    def _conflict(
        self, foreign: Array, others: Array, lanes: Touched, accesses: list[Past], own: Array | None = None
    ) -> Conflict:
        """The racing lanes, and where the other side of the first of them was."""
        positions = np.flatnonzero(foreign)
        found = others[positions]
        times = lanes.itemsize // self.granule
        element = self._granules(lanes)[positions[0]]
        mine = 0
        if own is not None:
            mine = int(own[positions[0]] if own.size > 1 else own[0])
        for past in reversed(accesses):
            hit = self._granules(past.lanes) == element
            if not hit.any():
                continue
            programs = self._fine(past.lanes)[1]
            who = programs[hit] if programs.size > 1 else programs
            strangers = who[who != mine]
            if strangers.size:
                if found[0] == MANY:
                    found[0] = strangers[0]
                return Conflict(positions // times, found, past.site, past.argument)
        return Conflict(positions // times, found)
