"""Latency verdicts over all cases of a run at once, and the uncertainty of stored ratios today."""

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

# With so many sessions their own spread counts, before that a default.
ENOUGH = 5
# Standard deviations of a log ratio between sessions. On one GPU: ten A/A runs on an H200 ranged over 0.11 to 0.15 %, a
# deviation of 0.04 to 0.05 %; ten times that is for weeks. On two GPUs of a model: the spread at which a rule without a
# variance between machines raised 18 % false alarms in simulation.
SAME_UNIT = 0.005
OTHER_UNIT = 0.02
# If the time of the unchanged reference shifts by more than a wandering clock, the ratio does not cancel all of it. On
# a shared H200 a 5 us reference became slower by 28 % and the ratio by 8 %, with nothing changed.
WANDERS = 0.02
UNCANCELLED = 1 / 3
# A larger scatter of blocks means a shared GPU: alone, forty measurements of eight kernels of 4.6 to 43 us had 0.03 to
# 0.44 %. There a launch may be off for a whole session: a 1 us kernel took 0.94 or 1.12, one of 2.5 us 2.5 or 2.7.
RESTLESS = 0.01
TICK_S = 2e-7
# The spread of few sessions may be small by chance, so its upper bound at 80 % is used.
_UNSURE = 0.2


@dataclass(frozen=True, slots=True)
class Level:
    """A stored log ratio, and its standard ``error`` against a ratio of today, without today's sampling error.
    ``between`` is the standard deviation between sessions, measured if ``known``, else a default."""

    ratio: float
    error: float
    between: float
    known: bool


def level(stored: Latency, unit: str, aa: float = 0.0) -> Level:
    """The level of ``stored`` on the GPU ``unit``; ``aa`` (a log ratio) is the least spread between sessions. If this
    GPU has sessions, only they count: five give their spread, before that it is ``SAME_UNIT``. Else all count: five of
    several GPUs give it, before ``OTHER_UNIT``. Today differs from the mean of n by tau * sqrt(1 + 1 / n)."""
    every = [*stored.history, Session(stored.ratio, stored.unit)]
    own = [one for one in every if unit and one.unit == unit]
    used, default = (own, SAME_UNIT) if own else (every, OTHER_UNIT)
    # Sessions of one GPU do not show the spread between GPUs.
    alike = not own and bool(unit) and len({one.unit for one in every}) == 1
    seen = len(used) >= ENOUGH and not alike
    ratios = [one.ratio for one in used]
    between = max(spread(ratios) if seen else default, aa)
    error = math.sqrt(between**2 * (1 + 1 / len(ratios)) + stored.error**2 / len(ratios))
    return Level(fmean(ratios), error, between, seen)


def worth(known: Level, stored: Latency, now: Latency) -> Level:
    """The level for these sessions: less certain if the reference's time shifted or a GPU was shared."""
    if min(stored.fused_s, now.fused_s, stored.reference_s, now.reference_s) <= 0:
        return known
    shift = abs(math.log(now.reference_s / stored.reference_s))
    errors = [known.error, UNCANCELLED * max(0.0, shift - WANDERS)]
    unrest = max(scatter(stored.blocks), scatter(now.blocks))
    if unrest > RESTLESS:
        errors += [unrest, TICK_S / min(stored.fused_s, now.fused_s)]
    return replace(known, error=math.hypot(*errors))


def scatter(blocks: Sequence[float]) -> float:
    """The standard deviation of blocks by their quartiles, robust against outliers; 0.0 for fewer than four."""
    if len(blocks) < 4:
        return 0.0
    low, _, high = quantiles(blocks, n=4)
    return (high - low) / 1.349


def spread(ratios: Sequence[float]) -> float:
    """The standard deviation between sessions, its upper bound at 80 %, from two ratios or more."""
    freedom = len(ratios) - 1
    return math.sqrt(freedom * variance(ratios) / chi_square_limit(_UNSURE, freedom))


def continued(before: Latency, now: Latency, made: str) -> Latency:
    """``now`` with the sessions of ``before`` and ``before`` itself. The history starts anew with another place,
    reference or method, or after a step beyond the spread of sessions, which would hide the next step."""
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
# The probability of any false alarm in a run in which nothing changed.
ALPHA = 0.01
# An effect of the smallest size must be found nine times in ten: it counts from so many standard errors below on.
_POWER = NormalDist().inv_cdf(0.9)
# Student's degrees of freedom for a median's interval stop growing here (see bootstrap.estimate).
_MOST_FREE = 19
# The allowed bias of an A/A run beyond its interval, as a log ratio: a 9.7 us softmax on an H200 had -0.14 to -0.03 %
# in ten runs, harmless for a verdict about 1 %.
_OFF = 0.003


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of a machine in A/A runs: ``spread`` is a log ratio; ``noisy`` says why no latency is judged."""

    spread: float
    noisy: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """One case's log ratio against the expected one: ``difference`` is positive if the kernel is slower. ``error`` is
    its standard error, ``sampling`` the part that more blocks reduce. ``smallest`` is the log ratio that counts; below
    ``floor`` nothing counts on this machine. ``why_not`` says why there is no answer."""

    difference: float
    error: float
    sampling: float
    freedom: float
    smallest: float
    floor: float = 0.0
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The answer: ``change`` in per cent with its interval."""

    verdict: LatencyStatus
    change: float
    low: float
    high: float
    reason: str


def noise(runs: Sequence[Estimate]) -> Noise:
    """The machine's noise in A/A runs. Raises ``ValueError`` for no runs: an untested machine gets no verdicts."""
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


def against_stored(found: Estimate | Latency, stored: Level, machine: Noise, smallest: float = STORED) -> Question:
    """The question whether the ratio to the reference is higher than in stored sessions."""
    why_not = machine.noisy
    if not why_not and len(found.blocks) < FEWEST:
        why_not = f"{len(found.blocks)} blocks were measured, and {FEWEST} are needed for an interval"
    return Question(
        difference=found.ratio - stored.ratio,
        error=math.hypot(found.error, stored.error),
        sampling=found.error,
        freedom=min(len(found.blocks) - 1, _MOST_FREE),
        smallest=math.log1p(smallest),
        floor=3 * machine.spread,
        why_not=why_not,
    )


def judge(questions: Sequence[Question], *, family: int | None = None) -> list[Judgement]:
    """All questions of a run; ``family`` is their number if these are only some of them (see ``bootstrap.holm``).

    *regressed*: slower than chance explains (Holm at ``ALPHA``), by an amount from which a true effect of the smallest
    size is found nine times in ten, and at least three times the machine's spread. *improved* mirrors it. *same*: the
    whole interval is within the smallest effect. Else *inconclusive*.
    """
    slower = holm([_chance(one, one.difference) for one in questions], family)
    faster = holm([_chance(one, -one.difference) for one in questions], family)
    return [_judged(*answer) for answer in zip(questions, slower, faster, strict=True)]


def _freedom(one: Question) -> float:
    """Degrees of freedom of the whole error: Student's for the sampling, infinite between sessions (Welch)."""
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
    # Blocks do not show a bias of all blocks alike. The A/A run does, and the floor is three times that.
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
        reason = f"the interval is too wide to decide whether it changed by {_percent(counts):.1f} %"
        verdict = "inconclusive"
    return Judgement(
        verdict=verdict,
        change=round(_percent(one.difference), 3),
        low=round(_percent(low), 3),
        high=round(_percent(high), 3),
        reason=reason,
    )


def _percent(ratio: float) -> float:
    return 100 * math.expm1(ratio)
