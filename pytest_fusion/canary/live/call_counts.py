"""`Traffic`: how many calls of which shapes were made, and which kernel served them; counted without a lock."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from pytest_fusion.canary.live.calls.signature import MOST_TENSORS, bucket_of
from pytest_fusion.case.containers import tensors_of

# The bucket of calls whose class came after the last one that has a bucket of its own.
OTHERS = "others"
# Exact shapes whose bucket is remembered; where sequences have any length there is no end of them.
_MOST_KEYS = 4096
_PLAIN = frozenset((int, float, bool, str, type(None)))
_LONGEST = 1 + 2 * MOST_TENSORS


class Ticker:
    """A count that any number of threads raise by ``up()``: one step of the interpreter, which loses none.

    ``read`` is for one reader at a time.
    """

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
    """Where a call is counted. ``unverified``: served by the candidate, and nobody compared what it returned."""

    __slots__ = ("bucket", "calls", "candidate", "unverified")

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.calls, self.candidate, self.unverified = Ticker(), Ticker(), Ticker()


class Calls(NamedTuple):
    """Calls of one bucket in one state; the candidate served ``candidate`` of them, ``unverified`` of those unseen."""

    calls: int
    candidate: int
    unverified: int


class Traffic:
    """At most ``most`` buckets, the last of them for all others. ``slot`` is called by any thread, ``read`` by one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: dict[object, Slot] = {}
        self._slots: dict[tuple[str, str], Slot] = {}
        self._buckets: set[str] = set()

    def slot(self, state: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Slot:
        """Where this call, made in ``state``, is counted; it is counted as a call by this."""
        try:
            key = _key(state, args, kwargs)
            found = self._known.get(key)
            if found is None:
                found = self._new(key, state, bucket_of(args, kwargs))
        except Exception:  # noqa: BLE001 - tensors whose sizes are no numbers (nested ones): no call may fail for it
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
        """By state and bucket, so far."""
        with self._lock:
            slots = dict(self._slots)
        return {
            where: Calls(slot.calls.read(), slot.candidate.read(), slot.unverified.read())
            for where, slot in sorted(slots.items())
        }


def _key(state: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """What ``bucket_of`` looks at, as it is: cheaper to compare than to round up and to write as text.

    Asked of every call, so types are compared: ``isinstance`` asks torch's metaclass, 70 ns for what is no tensor. Of
    the 0.8 us that a call of two tensors takes to be counted, shapes and dtypes are 0.35.
    """
    parts: list[object] = [state]
    append = parts.append
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            append(value.shape)
            append(value.dtype)
        elif kind not in _PLAIN:
            for tensor in tensors_of(value):
                append(tensor.shape)
                append(tensor.dtype)
    return tuple(parts) if len(parts) <= _LONGEST else tuple(parts[:_LONGEST])
