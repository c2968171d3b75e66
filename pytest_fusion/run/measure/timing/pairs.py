"""Two things timed against each other: blocks of interleaved pairs in random order, after both are warm.

A rank test on consecutive runs finds 47 of 100 unchanged kernels slower, because a machine's clock drifts; the members
of a pair share that clock.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pytest_fusion.run.pristine import perf_counter

PAIRS = 5
FEWEST_BLOCKS = 10
MOST_BLOCKS = 80
# Two medians of so many samples that agree to this share: the clock is stable.
_WINDOW, _STEADY = 16, 0.01
_WARM_S, _WARM_MOST_S = 0.05, 1.0


class Timed(Protocol):
    """A repeatable measurement of how long one call takes."""

    def seconds(self) -> float:
        """One sample: device seconds a call, averaged over the calls of a sample."""
        ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """Seconds of each pair of each block; ``warm``: both had a stable clock before the first."""

    candidate: tuple[tuple[float, ...], ...]
    control: tuple[tuple[float, ...], ...]
    warm: bool


def warmed(things: Sequence[Timed]) -> bool:
    """Run all in turn until each one's last two medians agree; false if that takes over a second."""
    begun = perf_counter()
    seen: list[list[float]] = [[] for _ in things]
    while True:
        for thing, samples in zip(things, seen, strict=True):
            samples.append(thing.seconds())
        spent = perf_counter() - begun
        if spent >= _WARM_S and all(map(_steady, seen)):
            return True
        if spent >= _WARM_MOST_S:
            return False


def _steady(samples: Sequence[float]) -> bool:
    if len(samples) < 2 * _WINDOW:
        return False
    last, before = statistics.median(samples[-_WINDOW:]), statistics.median(samples[-2 * _WINDOW : -_WINDOW])
    return abs(last - before) <= _STEADY * before


def paired(
    candidate: Timed,
    control: Timed,
    *,
    enough: Callable[[Sequence[Sequence[float]], Sequence[Sequence[float]]], bool],
    budget_s: float,
    seed: int = 0,
) -> Blocks:
    """Blocks of ``PAIRS`` pairs until there are ``enough`` or ``MOST_BLOCKS``, or the budget is spent. Calls ``enough``
    after 10, 20, 40 blocks: more looks find more differences by chance."""
    draw = random.Random(seed)
    warm = warmed((candidate, control))
    ours: list[tuple[float, ...]] = []
    theirs: list[tuple[float, ...]] = []
    begun = perf_counter()
    next_look = FEWEST_BLOCKS
    while len(ours) < MOST_BLOCKS:
        pairs = [_pair(candidate, control, draw.random() < 0.5) for _ in range(PAIRS)]
        ours.append(tuple(a for a, _ in pairs))
        theirs.append(tuple(b for _, b in pairs))
        if len(ours) == next_look:
            next_look *= 2
            if enough(ours, theirs):
                break
        if len(ours) >= FEWEST_BLOCKS and perf_counter() - begun >= budget_s:
            break
    return Blocks(tuple(ours), tuple(theirs), warm)


def _pair(candidate: Timed, control: Timed, first: bool) -> tuple[float, float]:
    if first:
        ours = candidate.seconds()
        return ours, control.seconds()
    theirs = control.seconds()
    return candidate.seconds(), theirs


# The least seconds of a sample: reading the clock takes some 50 ns, which must not count.
SHORTEST_S = 1e-4
# A test's clock may stand still; a batch grows no further.
_MOST = 1 << 20


@dataclass(slots=True)
class HostTimed:
    """A repeatable batch of ``calls``; ``timer`` names the clock."""

    calls: int
    _call: Callable[[], Any]
    timer: Literal["host"] = "host"

    def seconds(self) -> float:
        """Host seconds a call, over one run of the batch."""
        return _batch(self._call, self.calls) / self.calls


def host_timed(call: Callable[[], Any]) -> HostTimed:
    """``call`` to be timed, in batches of ``SHORTEST_S`` or more. Raises what it raises."""
    calls = 1
    call()
    while _batch(call, calls) < SHORTEST_S and calls < _MOST:
        calls *= 2
    return HostTimed(calls, call)


def _batch(call: Callable[[], Any], calls: int) -> float:
    begun = perf_counter()
    for _ in range(calls):
        call()
    return perf_counter() - begun
