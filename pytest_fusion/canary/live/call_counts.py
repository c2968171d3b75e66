"""`Traffic`: counts calls by class of shapes and by the kernel that served them, without a lock."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from pytest_fusion.canary.live.calls.arguments import bucket_of, shapes_of

# The bucket for calls of all classes that came after the bound was reached.
OTHERS = "others"
# Exact shapes whose bucket is cached; sequences of any length would make them endless.
_MOST_KEYS = 4096


class Ticker:
    """A counter that any number of threads raise by ``up()``, one atomic step; ``read`` is for one thread at a time."""

    __slots__ = ("_count", "_peeks", "up")

    def __init__(self) -> None:
        self._count = itertools.count()
        self._peeks = 0
        self.up = self._count.__next__

    def read(self) -> int:
        value = next(self._count) - self._peeks
        self._peeks += 1
        return value


class Slot:
    """The counters of one bucket in one state. ``unverified`` calls were served by the candidate and not compared."""

    __slots__ = ("bucket", "calls", "candidate", "unverified")

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.calls, self.candidate, self.unverified = Ticker(), Ticker(), Ticker()


class Calls(NamedTuple):
    """Numbers of one bucket in one state: all calls, those the candidate served, and of these those not compared."""

    calls: int
    candidate: int
    unverified: int


class Traffic:
    """Counts in at most ``most`` buckets, the last for all others. Any thread may call ``slot``, one ``read``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: dict[object, Slot] = {}
        self._slots: dict[tuple[str, str], Slot] = {}
        self._buckets: set[str] = set()

    def slot(self, state: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Slot:
        """Counts this call, made in ``state``, and returns its counters."""
        try:
            key = state, shapes_of(args, kwargs)
            found = self._known.get(key)
            if found is None:
                found = self._new(key, state, bucket_of(args, kwargs))
        except Exception:  # noqa: BLE001 - counting must not fail a call, e.g. for nested tensors without sizes
            found = self._new(state, state, OTHERS)
        found.calls.up()
        return found

    def _new(self, key: object, state: str, bucket: str) -> Slot:
        with self._lock:
            if bucket not in self._buckets:
                if len(self._buckets) >= self._most - 1:
                    bucket = OTHERS
                self._buckets.add(bucket)
            slot = self._slots.setdefault((state, bucket), Slot(bucket))
            if len(self._known) >= _MOST_KEYS:
                self._known = {}
            self._known[key] = slot
            return slot

    def read(self) -> dict[tuple[str, str], Calls]:
        """The counts so far, by state and bucket."""
        with self._lock:
            slots = dict(self._slots)
        return {
            where: Calls(slot.calls.read(), slot.candidate.read(), slot.unverified.read())
            for where, slot in sorted(slots.items())
        }
