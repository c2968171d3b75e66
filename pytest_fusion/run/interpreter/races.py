"""Which program last stored and loaded each element, and whether two of them were put in an order.

Two programs of a launch run in no order on a GPU. A store and another access to the same element by two programs are
a race unless both are atomic, the store leaves the value as it was, or an atomic with release semantics by the first
came before one with acquire semantics by the second on the same address (the "last program done" ticket, a lock). Only
atomics on scalars are taken for such signals.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pytest_fusion.run.interpreter.dtypes import Array
from pytest_fusion.run.interpreter.findings import Site

# A storage read by several programs at once, or stored by them with one value.
MANY = -1
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
class Access:
    """One executed access: elements (flat), the program of each (or ``MANY``: all ``actors``), line, argument."""

    elements: Array
    programs: Array
    actors: Array
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
    stores: list[Access] = field(default_factory=list)
    loads: list[Access] = field(default_factory=list)
    atomics: list[Access] = field(default_factory=list)
    _writer: Array | None = None
    _reader: Array | None = None
    _toucher: Array | None = None
    _stored_at: Array | None = None
    _loaded_at: Array | None = None
    _held: int = 0

    def spread(self, elements: Array, itemsize: int) -> tuple[Array, int]:
        """``elements`` (flat, of ``itemsize`` bytes) in granules, and how many granules each takes."""
        if itemsize == self.granule:
            return elements, 1
        if itemsize < self.granule:
            self._refine(itemsize)
            return elements, 1
        times = itemsize // self.granule
        wide = elements[:, None] * times + np.arange(times)
        return wide.reshape(-1), times

    def _refine(self, granule: int) -> None:
        times = self.granule // granule
        for accesses in (self.stores, self.loads, self.atomics):
            for access in accesses:
                access.elements = (access.elements[:, None] * times + np.arange(times)).reshape(-1)
                if access.programs.size > 1:
                    access.programs = np.repeat(access.programs, times)
        for name in ("_writer", "_reader", "_toucher"):
            array = getattr(self, name)
            if array is not None:
                setattr(self, name, np.repeat(array, times))
        self.elements, self.granule = self.elements * times, granule

    def load(
        self, elements: Array, programs: Array, actors: Array, site: Site, argument: Any, order: Order
    ) -> Conflict | None:
        """A load of ``elements`` by ``programs``, (lanes,) or (1,); ``actors`` are all programs that take part."""
        conflict = None
        if self._writer is not None and self._stored_at is not None:
            writer = self._writer[elements]
            foreign = (writer > 0) & (writer != programs)
            if foreign.any():
                foreign &= ~order.ordered(writer, self._stored_at[np.maximum(writer, 0)], programs)
            if foreign.any():
                conflict = self._conflict(foreign, writer, elements, self.stores)
        time = order.now()
        self._note(self.loads, Access(elements, programs, actors, time, site, argument))
        if self._loaded_at is None:
            self._loaded_at = np.zeros(self.grid + 1, np.int64)
        self._loaded_at[actors] = time
        if self._reader is not None:
            self._read(self._reader, elements, programs)
        return conflict

    def store(
        self, elements: Array, programs: Array, actors: Array, changed: Array, site: Site, argument: Any, order: Order
    ) -> tuple[Conflict | None, Conflict | None]:
        """A store; ``changed``: whether it changes the element. Races with stores and atomics, and with loads."""
        if self._writer is None or self._stored_at is None:
            self._writer = np.zeros(self.elements, np.int32)
            self._stored_at = np.zeros(self.grid + 1, np.int64)
        writer = self._writer[elements]
        foreign = (writer != 0) & (writer != programs) & changed
        with_store = with_load = None
        if foreign.any():
            foreign &= ~order.ordered(writer, self._stored_at[np.maximum(writer, 0)], programs)
        if foreign.any():
            with_store = self._conflict(foreign, writer, elements, self.stores)
        elif self._toucher is not None:
            toucher = self._toucher[elements]
            foreign = (toucher != 0) & (toucher != programs)
            if foreign.any():
                foreign &= ~order.ordered(toucher, np.zeros(1, np.int64), programs)
            if foreign.any():
                with_store = self._conflict(foreign, toucher, elements, self.atomics)
        if self.loads:
            if self._reader is None:
                self._reader = np.zeros(self.elements, np.int32)
                for access in self.loads:
                    self._read(self._reader, access.elements, access.programs)
            reader = self._reader[elements]
            foreign = (reader != 0) & (reader != programs) & changed
            if self.grid < 2:
                foreign &= reader != MANY
            if foreign.any() and self._loaded_at is not None:
                foreign &= ~order.ordered(reader, self._loaded_at[np.maximum(reader, 0)], programs)
                foreign &= ~self._all_before(reader == MANY, elements, programs, order)
            if foreign.any():
                with_load = self._conflict(foreign, reader, elements, self.loads, programs)
        self._writer[elements] = programs
        self._stored_at[actors] = order.now()
        self._note(self.stores, Access(elements, programs, actors, 0, site, argument))
        return with_store, with_load

    def atomic(self, elements: Array, programs: Array, site: Site, argument: Any, order: Order) -> Conflict | None:
        """An atomic; races with another program's plain store."""
        conflict = None
        if self._writer is not None and self._stored_at is not None:
            writer = self._writer[elements]
            foreign = (writer != 0) & (writer != programs)
            if foreign.any():
                foreign &= ~order.ordered(writer, self._stored_at[np.maximum(writer, 0)], programs)
            if foreign.any():
                conflict = self._conflict(foreign, writer, elements, self.stores)
        if self._toucher is None:
            self._toucher = np.zeros(self.elements, np.int32)
        # The last one only: a program whose own atomic came last has seen all of them (a ticket that it may reset).
        self._toucher[elements] = programs
        self._note(self.atomics, Access(elements, programs, programs, 0, site, argument))
        return conflict

    def _read(self, reader: Array, elements: Array, programs: Array) -> None:
        before = reader[elements]
        several = (before != 0) & (before != programs)
        reader[elements] = programs
        # Lanes of one instruction: of equal elements the last one is there now.
        several |= reader[elements] != programs
        if several.any():
            reader[elements[several]] = MANY

    def _all_before(self, several: Array, elements: Array, programs: Array, order: Order) -> Array:
        """Of elements that several programs have loaded: whether each of those loads comes before ``programs`` now."""
        lanes = np.flatnonzero(several)
        fine = several.copy()
        if not lanes.size:
            return fine
        storing = np.broadcast_to(programs, elements.shape)[lanes]
        sorting = np.argsort(elements[lanes], kind="stable")
        wanted = elements[lanes][sorting]
        for access in self.loads:
            at = np.minimum(np.searchsorted(wanted, access.elements), wanted.size - 1)
            hits = np.flatnonzero(wanted[at] == access.elements)
            if not hits.size:
                continue
            lane = sorting[at[hits]]
            if access.programs.size == 1:
                loading = np.repeat(access.actors if access.programs[0] == MANY else access.programs, hits.size)
                lane = np.tile(lane, loading.size // hits.size)
            else:
                loading = access.programs[hits]
            before = (loading == storing[lane]) | order.ordered(loading, np.array([access.time]), storing[lane])
            fine[lanes[lane[~before]]] = False
        return fine

    def _note(self, accesses: list[Access], access: Access) -> None:
        accesses.append(access)
        self._held += access.elements.size
        while self._held > _REMEMBERED and len(accesses) > 1:
            self._held -= accesses.pop(0).elements.size

    def _conflict(
        self, foreign: Array, others: Array, elements: Array, accesses: list[Access], own: Array | None = None
    ) -> Conflict:
        lanes = np.flatnonzero(foreign)
        found = others[lanes]
        element = elements[lanes[0]]
        mine = int(own[lanes[0]] if own is not None and own.size > 1 else own[0]) if own is not None else 0
        for access in reversed(accesses):
            hit = access.elements == element
            if not hit.any():
                continue
            who = access.programs[hit] if access.programs.size > 1 else access.programs
            strangers = who[who != mine] if own is not None else who
            if strangers.size:
                if found[0] == MANY:
                    found = found.copy()
                    found[0] = strangers[0]
                return Conflict(lanes, found, access.site, access.argument)
        return Conflict(lanes, found)
