"""`Span` times one call; `Pairs` are timings of both kernels on equal copies, in random order, as ratios of blocks."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from pytest_fusion.canary.evidence.evidence_counts import Arm
from pytest_fusion.canary.live.sharing import threshold
from pytest_fusion.case import counter_random


def clock_of(devices: Iterable[torch.device]) -> torch.device | None:
    """The CUDA device whose stream times a call, ``None`` for the host's clock. Raises ``ValueError`` for several."""
    found = {device for device in devices if device.type == "cuda"}
    if len(found) > 1:
        raise ValueError(f"the call is on {len(found)} devices, and no single clock covers it")
    return found.pop() if found else None


@dataclass(slots=True, eq=False)
class Span:
    """A time measurement. ``begin`` and ``end`` wait for no device; ``seconds`` is for another thread. A device
    measures GPU time where work is queued, plus the launch where the GPU is idle; the host measures wall-clock time."""

    device: torch.device | None
    _start: Any = None
    _stop: Any = None

    def begin(self) -> None:
        self._start = self._now()

    def end(self) -> None:
        self._stop = self._now()

    def _now(self) -> Any:
        if self.device is None:
            return time.perf_counter()
        with torch.cuda.device(self.device):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        return event

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` with timing; time that the caller spends around it does not count."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            try:
                return call(*args, **kwargs)
            finally:
                self.end()

        return timed

    def seconds(self) -> float | None:
        """The duration; ``None`` until the device has finished, or if it never began."""
        if self._start is None or self._stop is None:
            return None
        if self.device is None:
            return float(self._stop - self._start)
        if not self._stop.query():
            return None
        return float(self._start.elapsed_time(self._stop)) / 1e3


# Share of timed calls that pair the incumbent with itself: to promote, the judge wants 50 blocks of these, and the
# candidate needs more than that in buckets of little traffic.
ITSELF = 0.2
# Pairs of each order in a block. The mean of the two medians cancels the order and single interrupts.
HALF = 10
# Pairs that are not finished on their device; with more waiting, no further call is timed.
_MOST_WAITING = 256


class Plan(NamedTuple):
    """How one call is timed: which kernel beside the incumbent, and whether it goes first."""

    arm: Arm
    first: bool


class Block(NamedTuple):
    """A complete block: the log ratio of its pairs."""

    bucket: str
    arm: Arm
    ratio: float


class _Pair(NamedTuple):
    bucket: str
    plan: Plan
    incumbent: Span
    other: Span


class Pairs:
    """Collects timed pairs. ``plan`` and ``add`` are for any thread and wait for no device; ``ready`` is for one."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._seeds: tuple[int, ...] = (0, 0, 0)
        self.clear()

    def seed(self, seed: int) -> None:
        """Sets the seed of the random choices: equal seeds time equal calls."""
        self._seeds = tuple(counter_random.mix(seed, choice) for choice in ("timed", "itself", "first"))

    def clear(self) -> None:
        """Forgets all pairs, as in a forked child."""
        self._waiting: deque[_Pair] = deque()
        self._found: dict[tuple[str, Arm], tuple[list[float], list[float]]] = {}
        self._reading = threading.Lock()

    def plan(self, ticket: int) -> Plan | None:
        """How the call number ``ticket`` is timed; ``None`` if it is not."""
        timed, itself, first = self._seeds
        if len(self._waiting) >= _MOST_WAITING or counter_random.element(timed, ticket) >= threshold(self._share):
            return None
        itself = counter_random.element(itself, ticket) < threshold(ITSELF)
        first = counter_random.element(first, ticket) < threshold(0.5)
        return Plan("itself" if itself else "candidate", first)

    def add(self, bucket: str, plan: Plan, incumbent: Span, other: Span) -> None:
        self._waiting.append(_Pair(bucket, plan, incumbent, other))

    def ready(self) -> Iterator[Block]:
        """The blocks that were completed since the last call."""
        with self._reading:
            while self._waiting:
                pair = self._waiting[0]
                ours, theirs = pair.incumbent.seconds(), pair.other.seconds()
                if ours is None or theirs is None:
                    return
                self._waiting.popleft()
                # A clock that did not advance would give an infinite ratio.
                if ours <= 0 or theirs <= 0:
                    continue
                where = pair.bucket, pair.plan.arm
                orders = self._found.setdefault(where, ([], []))
                orders[pair.plan.first].append(math.log(theirs / ours))
                if min(map(len, orders)) >= HALF:
                    yield Block(*where, (median(orders[0][:HALF]) + median(orders[1][:HALF])) / 2)
                    self._found[where] = orders[0][HALF:], orders[1][HALF:]
