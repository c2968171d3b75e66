"""Which calls are kept: of each class of shapes a few, each call with the same chance; and the number of all calls."""

from __future__ import annotations

import threading

from pytest_fusion.case import numbers

# Classes that are counted; calls of further ones are counted together.
MOST_BUCKETS = 256
OTHERS = "others"


class Bucket:
    """The calls of one class of shapes."""

    __slots__ = ("_lock", "_most", "_seed", "calls", "name")

    def __init__(self, name: str, seed: int, most: int) -> None:
        self.name = name
        self.calls = 0
        self._seed = seed
        self._most = most
        self._lock = threading.Lock()

    def admit(self) -> tuple[int, int | None]:
        """Counts a call: its number, from 0, and the place it takes among those kept; ``None`` for none.

        After n calls each of them holds one of the places with the same chance (Vitter's algorithm R, 1985).
        """
        with self._lock:
            number = self.calls
            self.calls = number + 1
        if number < self._most:
            return number, number
        place = numbers.element(self._seed, number) % (number + 1)
        return number, place if place < self._most else None


class Reservoir:
    """Buckets by name, made when they are first asked for; at most ``MOST_BUCKETS`` and ``OTHERS``."""

    def __init__(self, seed: int, most: int) -> None:
        self._seed = seed
        self._most = most
        self._lock = threading.Lock()
        self._buckets: dict[str, Bucket] = {}

    def bucket(self, name: str) -> Bucket:
        found = self._buckets.get(name)
        if found is not None:
            return found
        with self._lock:
            if name not in self._buckets and len(self._buckets) >= MOST_BUCKETS:
                name = OTHERS
            if name not in self._buckets:
                self._buckets[name] = Bucket(name, numbers.mix(self._seed, name), self._most)
            return self._buckets[name]

    def calls(self) -> dict[str, int]:
        """How many calls each bucket had."""
        with self._lock:
            return {name: bucket.calls for name, bucket in self._buckets.items()}
