"""Latency verdicts over all cases of a run at once, and what a stored ratio is worth today."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, quantiles, variance
from typing import Literal

from pytest_fusion.bench.baseline.bootstrap import (
    FEWEST,
    LEVEL,
    Estimate,
    chi_square_limit,
    holm,
    student_limit,
    student_tail,
)
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


LatencyStatus = Literal["regressed", "improved", "same", "inconclusive"]

# The smallest slowdown that counts, as a share.
STORED = 0.03
# With which probability a run in which nothing changed raises one false alarm or more.
ALPHA = 0.01
# An effect of just the size that counts is to be called nine times in ten, so it counts from this many standard errors
# below that size on.
_POWER = NormalDist().inv_cdf(0.9)
# Student's degrees of freedom for a median's interval stop to grow here (see bootstrap.estimate).
_MOST_FREE = 19
# What an A/A run may be off beyond its interval, as a log ratio: a 9.7 us softmax on an H200 read -0.14 to -0.03 % ten
# times over, which harms no verdict about 1 %.
_OFF = 0.003


@dataclass(frozen=True, slots=True)
class Noise:
    """What the machine makes of equal things: ``spread`` is a log ratio; ``noisy`` says why no latency is judged."""

    spread: float
    noisy: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """One case's log ratio against what it should be.

    ``difference`` is positive where the kernel is slower, ``error`` its whole standard error, ``sampling`` the part of
    it that more blocks would shrink, ``smallest`` the log ratio that counts, ``floor`` the one under which nothing
    counts on this machine. ``why_not`` says why it has no answer.
    """

    name: str
    difference: float
    error: float
    sampling: float
    freedom: float
    smallest: float
    floor: float = 0.0
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The answer: ``change`` in per cent with its interval, ``chance`` that nothing changed (corrected by Holm)."""

    name: str
    verdict: LatencyStatus
    change: float
    low: float
    high: float
    chance: float
    reason: str

    @property
    def failed(self) -> bool:
        return self.verdict == "regressed"


def noise(runs: Sequence[Estimate]) -> Noise:
    """From runs of a thing against itself: how far apart they were, and whether anything can be judged here.

    Raises ``ValueError`` for no runs: a machine that was not tried gets no verdicts.
    """
    if not runs:
        raise ValueError("no A/A run")
    spread = math.sqrt(fmean(run.ratio**2 + run.error**2 for run in runs))
    for run in runs:
        if len(run.blocks) < FEWEST:
            return Noise(spread, f"the run against itself has {len(run.blocks)} blocks, and {FEWEST} are needed")
        if run.low > _OFF or run.high < -_OFF:
            return Noise(
                spread,
                f"one thing measured against itself differs by {_percent(run.ratio):+.2f} % ({_percent(run.low):+.2f} "
                f"to {_percent(run.high):+.2f} %), so this machine favours one side; is it shared, or throttled?",
            )
    return Noise(spread)


def against_stored(name: str, found: Estimate, stored: Level, machine: Noise, smallest: float = STORED) -> Question:
    """The question whether the ratio to the reference is higher than in stored sessions."""
    why_not = machine.noisy
    if not why_not and len(found.blocks) < FEWEST:
        why_not = f"{len(found.blocks)} blocks were measured, and {FEWEST} are needed for an interval"
    return Question(
        name,
        difference=found.ratio - stored.ratio,
        error=math.hypot(found.error, stored.error),
        sampling=found.error,
        freedom=min(len(found.blocks) - 1, _MOST_FREE),
        smallest=math.log1p(smallest),
        floor=3 * machine.spread,
        why_not=why_not,
    )


def judge(questions: Sequence[Question], *, family: int | None = None) -> list[Judgement]:
    """All questions of a run; ``family`` is their number where these are only some of them (see ``bootstrap.holm``).

    *regressed*: slower than chance explains (Holm at ``ALPHA``), and not shown to be less than the smallest effect
    that counts: it is counted from where a true effect of that size is called nine times in ten, and never under three
    times the spread of the machine. *improved* mirrors it. *same*: the whole interval is within the smallest effect.
    Else *inconclusive*.
    """
    slower = holm([_chance(one, one.difference) for one in questions], family)
    faster = holm([_chance(one, -one.difference) for one in questions], family)
    return [_judged(*answer) for answer in zip(questions, slower, faster, strict=True)]


def _freedom(one: Question) -> float:
    """Of the whole error: Student's for what was sampled, normal for the spread between sessions (Welch)."""
    share = (one.sampling / one.error) ** 2 if one.error else 1.0
    return one.freedom / share**2 if share else math.inf


def _chance(one: Question, difference: float) -> float:
    if one.why_not:
        return 1.0
    if one.error == 0:
        return 0.0 if difference > 0 else 1.0
    return student_tail(difference / one.error, _freedom(one))


def _judged(one: Question, slower: float, faster: float) -> Judgement:
    reach = student_limit((1 - LEVEL) / 2, _freedom(one)) * one.error
    low, high = one.difference - reach, one.difference + reach
    counts = max(one.smallest, one.floor)
    # Blocks do not show what a machine does to all of them alike; the A/A run did, and the floor is thrice that.
    enough = max(one.smallest - _POWER * math.hypot(one.sampling, one.floor / 3), one.floor)
    verdict: LatencyStatus
    if one.why_not:
        verdict, reason = "inconclusive", one.why_not
    elif one.difference >= enough and slower < ALPHA:
        verdict, reason = "regressed", f"slower by {_percent(counts):.1f} % or more counts"
    elif -one.difference >= enough and faster < ALPHA:
        verdict, reason = "improved", "accept it with --fusion-update all"
    elif -counts < low and high < counts:
        verdict, reason = "same", f"the whole interval is within {_percent(counts):.1f} %"
    else:
        verdict, reason = (
            "inconclusive",
            f"the interval is too wide to decide whether it changed by {_percent(counts):.1f} %",
        )
    return Judgement(
        name=one.name,
        verdict=verdict,
        change=round(_percent(one.difference), 3),
        low=round(_percent(low), 3),
        high=round(_percent(high), 3),
        chance=min(slower, faster),
        reason=reason,
    )


def _percent(ratio: float) -> float:
    return 100 * math.expm1(ratio)
