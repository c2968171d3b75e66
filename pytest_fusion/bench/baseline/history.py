"""What a stored ratio is worth today: its level over earlier sessions, and how far sessions are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, quantiles, variance

from pytest_fusion.bench.baseline.bootstrap import chi_square_limit
from pytest_fusion.bench.baseline.row import MOST_SESSIONS, Latency, Session

# From so many sessions on their own spread counts, before that a default.
ENOUGH = 5
# Standard deviations of a log ratio between sessions. One GPU: ten A/A runs on an H200 ranged over 0.11 to 0.15 %,
# which is 0.04 to 0.05 % of standard deviation; ten times that is left for weeks. Two GPUs of one model: the spread at
# which a rule without a variance between machines raised 18 % false alarms in simulation.
SAME_UNIT = 0.005
OTHER_UNIT = 0.02
# What the reference itself takes, unchanged, tells how far this session is from the stored one: more than a clock that
# wanders, and a ratio no longer cancels all of it. On an H200 that other processes used too, a reference of 5 us became
# slower by 28 % and the ratio by 8 %, with nothing changed.
WANDERS = 0.02
UNCANCELLED = 1 / 3
# Blocks of a session that lie further apart than this were measured on a GPU that others used too: alone, forty
# measurements of eight kernels of 4.6 to 43 us scattered by 0.03 to 0.44 %. There a launch may take this much more or
# less for the whole session: a kernel of 1 us took 0.94 or 1.12, one of 2.5 us 2.5 or 2.7.
RESTLESS = 0.01
TICK_S = 2e-7
# The spread of few sessions may be small by accident: what is used is its upper bound at 80 %.
_UNSURE = 0.2


@dataclass(frozen=True, slots=True)
class Level:
    """A stored log ratio and its standard ``error`` against a ratio of today, without today's own sampling error.

    ``sessions`` is how many it rests on, ``between`` the standard deviation between sessions that went into it, and
    ``known`` whether that was seen in them and is no default.
    """

    ratio: float
    error: float
    between: float
    sessions: int
    known: bool


def level(stored: Latency, unit: str, aa: float = 0.0) -> Level:
    """The level of ``stored`` for a session on the GPU ``unit``; ``aa`` (a log ratio) is the least between sessions.

    Where this very GPU has sessions, they alone count, and five of them tell their own spread; before that it is
    ``SAME_UNIT``. Where it has none, or nobody knows which it is, all count, and five of several GPUs tell their
    spread; before that it is ``OTHER_UNIT``. A session of today differs from the mean of n by tau * sqrt(1 + 1 / n).
    """
    every = [*stored.history, Session(stored.ratio, stored.unit)]
    own = [one for one in every if unit and one.unit == unit]
    used, default = (own, SAME_UNIT) if own else (every, OTHER_UNIT)
    # Sessions of one GPU tell nothing about another.
    alike = not own and bool(unit) and len({one.unit for one in every}) == 1
    seen = len(used) >= ENOUGH and not alike
    ratios = [one.ratio for one in used]
    between = max(spread(ratios) if seen else default, aa)
    error = math.sqrt(between**2 * (1 + 1 / len(ratios)) + stored.error**2 / len(ratios))
    return Level(fmean(ratios), error, between, len(ratios), seen)


def worth(known: Level, stored: Latency, now: Latency) -> Level:
    """The level for a comparison of these two sessions: worth less where the reference takes another time in each, or
    where the GPU did other things while one of them was measured."""
    if min(stored.fused_s, now.fused_s, stored.reference_s, now.reference_s) <= 0:
        return known
    shift = abs(math.log(now.reference_s / stored.reference_s))
    errors = [known.error, UNCANCELLED * max(0.0, shift - WANDERS)]
    unrest = max(scatter(stored.blocks), scatter(now.blocks))
    if unrest > RESTLESS:
        errors += [unrest, TICK_S / min(stored.fused_s, now.fused_s)]
    return replace(known, error=math.hypot(*errors))


def scatter(blocks: Sequence[float]) -> float:
    """The standard deviation of blocks by their quartiles, which no outlier moves; 0.0 of fewer than four."""
    if len(blocks) < 4:
        return 0.0
    low, _, high = quantiles(blocks, n=4)
    return (high - low) / 1.349


def spread(ratios: Sequence[float]) -> float:
    """The standard deviation between sessions, its upper bound at 80 %, from two ratios or more."""
    freedom = len(ratios) - 1
    return math.sqrt(freedom * variance(ratios) / chi_square_limit(_UNSURE, freedom))


def continued(before: Latency, now: Latency, made: str = "") -> Latency:
    """``now`` with the sessions of ``before`` and ``before`` itself, where they are about the same thing.

    Another class of devices, another reference or method, or a level that moved by more than sessions differ, begins
    anew: a history across a step would hide the next one in its spread.
    """
    if (before.place, before.control, before.method) != (now.place, now.control, now.method):
        return now
    known = level(before, now.unit, max(before.aa or 0.0, now.aa or 0.0))
    if abs(now.ratio - known.ratio) > 3 * math.hypot(known.error, now.error):
        return now
    sessions = (*before.history, Session(before.ratio, before.unit, made))
    return replace(now, history=sessions[-MOST_SESSIONS:])
