"""`Reservoir`: a random sample of calls of each class of shapes, and the number of all calls."""

from __future__ import annotations

import math
import threading

from pytest_fusion.case import counter_random

# Classes that are counted separately; calls of further ones are counted together.
MOST_BUCKETS = 256
OTHERS = "others"


class Bucket:
    """The call counter and sampler of one class of shapes."""

    __slots__ = ("_drawn", "_largest", "_lock", "_most", "_next", "_seed", "calls", "name")

    def __init__(self, name: str, seed: int, most: int) -> None:
        self.name = name
        self.calls = 0
        self._seed = seed
        self._most = most
        # Of as many uniform numbers as there were calls, the largest of the ``most`` smallest.
        self._largest = 1.0
        self._drawn = self._next = 0
        # A signal handler may call what it interrupted.
        self._lock = threading.RLock()

    def admit(self) -> tuple[int, int | None]:
        """Counts a call; returns its number, from 0, and its place in the sample, or ``None`` if it is not in it.

        After n calls each of them has a place with the same probability. A call outside the sample costs one
        comparison, as the number of calls to skip is drawn at once (Li's algorithm L, ACM TOMS 20, 1994).
        """
        with self._lock:
            number = self.calls
            self.calls = number + 1
            if number < self._next:
                return number, None
            place = number if number < self._most else int(self._uniform() * self._most)
            self._next = number + 1
            if self._next >= self._most:
                self._largest *= self._uniform() ** (1 / self._most)
                self._next += int(math.log(self._uniform()) / math.log1p(-self._largest))
            return number, place

    def _uniform(self) -> float:
        """A random number above 0 and below 1."""
        self._drawn += 1
        return ((counter_random.element(self._seed, self._drawn) >> 12) + 0.5) * 2.0**-52


class Reservoir:
    """Buckets by name, created on first use; at most ``MOST_BUCKETS`` and ``OTHERS``."""

    def __init__(self, seed: int, most: int) -> None:
        self._seed = seed
        self._most = most
        self._lock = threading.RLock()
        self._buckets: dict[str, Bucket] = {}

    def bucket(self, name: str) -> Bucket:
        """The bucket of this name, or ``OTHERS`` where there are too many."""
        found = self._buckets.get(name)
        if found is not None:
            return found
        with self._lock:
            if name not in self._buckets and len(self._buckets) >= MOST_BUCKETS:
                name = OTHERS
            if name not in self._buckets:
                self._buckets[name] = Bucket(name, counter_random.mix(self._seed, name), self._most)
            return self._buckets[name]

    def calls(self) -> dict[str, int]:
        """The number of calls of each bucket."""
        with self._lock:
            return {name: bucket.calls for name, bucket in self._buckets.items()}
