"""The order that atomics create between programs of a launch.

What a program did before an atomic with release semantics comes before what another does after a later one with acquire
semantics on the same address, transitively (happens-before, Lamport 1978). It stores each address's releases, and how
many each acquire saw; the order of two programs is computed when they access one element, which is rare.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array

# Programs whose knowledge is cached; with n programs that each wait for all before, one has n entries.
_MOST_CACHED = 1024


@dataclass(slots=True)
class _Known:
    """For each program the time up to which it is known; from ``done`` acquires and, by address, ``seen`` releases."""

    latest: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    done: int = 0


class Order:
    """The synchronisation of one launch; programs are numbered from 1."""

    def __init__(self) -> None:
        self._time = 0
        # By address: the programs and times of its releases, in order.
        self._released: dict[int, list[tuple[int, int]]] = {}
        # By program: time, address, and number of releases.
        self._acquired: dict[int, list[tuple[int, int, int]]] = {}
        self._known: dict[int, _Known] = {}

    def now(self) -> int:
        """The time of the next event."""
        self._time += 1
        return self._time

    @property
    def any(self) -> bool:
        """Whether any atomic so far could order two programs."""
        return bool(self._released)

    def atomic(self, addresses: Array, programs: Array, *, acquire: bool, release: bool) -> None:
        """One scalar atomic of each program, in this order; (programs,) both."""
        if not acquire and not release:
            return
        for address, program in zip(addresses.tolist(), programs.tolist(), strict=True):
            time = self.now()
            releases = self._released.get(address)
            if acquire and releases is not None:
                self._acquired.setdefault(program, []).append((time, address, len(releases)))
            if release:
                if releases is None:
                    releases = self._released[address] = []
                releases.append((program, time))

    def ordered(self, first: Array, since: Array, second: Array) -> Array:
        """Whether what ``first`` did at ``since`` comes before what ``second`` does now; (lanes,) or (1,) each."""
        first, since, second = np.broadcast_arrays(first, since, second)
        result = np.zeros(first.shape, np.bool_)
        lanes = np.flatnonzero((first > 0) & (second > 0))
        if not self._acquired or not lanes.size:
            return result
        since = since[lanes]
        pairs, which = np.unique(second[lanes].astype(np.int64) << 32 | first[lanes], return_inverse=True)
        latest = np.array([self._directly(pair >> 32).get(pair & 0xFFFFFFFF, 0) for pair in pairs.tolist()])
        left = np.unique(which[latest[which] <= since])
        indirect: dict[int, dict[int, int]] = {}
        for i, pair in zip(left.tolist(), pairs[left].tolist(), strict=True):
            program = pair >> 32
            if program not in indirect:
                indirect[program] = self._through_others(program)
            latest[i] = indirect[program].get(pair & 0xFFFFFFFF, 0)
        result[lanes] = latest[which] > since
        return result

    def _directly(self, program: int) -> dict[int, int]:
        """The programs and times that ``program`` knows from releases that it acquired itself."""
        known = self._known.get(program)
        if known is None:
            if len(self._known) >= _MOST_CACHED:
                self._known.clear()
            known = self._known[program] = _Known()
        acquired = self._acquired.get(program, [])
        for _, address, count in acquired[known.done :]:
            self._learn(known, address, count)
        known.done = len(acquired)
        return known.latest

    def _through_others(self, program: int) -> dict[int, int]:
        """The programs and times that ``program`` knows directly or through others."""
        known = _Known()
        done: dict[int, int] = {}
        waiting = [(program, self._time + 1)]
        while waiting:
            who, until = waiting.pop()
            acquired = self._acquired.get(who, [])
            at = done.get(who, 0)
            while at < len(acquired) and acquired[at][0] < until:
                _, address, count = acquired[at]
                waiting += self._learn(known, address, count)
                at += 1
            done[who] = at
        return known.latest

    def _learn(self, known: _Known, address: int, count: int) -> list[tuple[int, int]]:
        """Add the first ``count`` releases on ``address``; returns the new ones, as programs and times."""
        begin = known.seen.get(address, 0)
        if begin >= count:
            return []
        known.seen[address] = count
        new, latest = self._released[address][begin:count], known.latest
        for program, time in new:
            if time > latest.get(program, 0):
                latest[program] = time
        return new
