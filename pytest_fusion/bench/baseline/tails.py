"""Tail probabilities of one-sided tests, and Holm's correction for asking many questions at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

_NORMAL = NormalDist()


def student_tail(t: float, freedom: float) -> float:
    """P(T > t) of Student's t with ``freedom`` degrees, infinite ones too.

    By Wallace's transformation to a normal (Ann. Math. Stat. 30, 1959): within 4 % of the probability for 7 degrees and
    more, down to 10^-5, and larger than it rather than smaller.
    """
    if math.isinf(freedom):
        return _NORMAL.cdf(-t)
    scale = (8 * freedom + 1) / (8 * freedom + 3)
    return _NORMAL.cdf(-math.copysign(scale * math.sqrt(freedom * math.log1p(t * t / freedom)), t))


def student_limit(chance: float, freedom: float) -> float:
    """The t that is exceeded with probability ``chance`` (under one half)."""
    z = -_NORMAL.inv_cdf(chance)
    if math.isinf(freedom):
        return z
    scale = (8 * freedom + 1) / (8 * freedom + 3)
    return math.sqrt(freedom * math.expm1((z / scale) ** 2 / freedom))


def chi_square_limit(chance: float, freedom: int) -> float:
    """The value that chi-square falls below with probability ``chance``; Wilson and Hilferty (PNAS 17, 1931)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + _NORMAL.inv_cdf(chance) * math.sqrt(part)) ** 3


def holm(chances: Sequence[float], family: int | None = None) -> list[float]:
    """Each p-value corrected by Holm's step-down rule (Scand. J. Stat. 6, 1979), in the order given.

    ``family`` is how many questions are asked in all, where more are asked than are at hand (a test that is judged
    before the others ran): those not at hand are taken for the smallest, which makes it Bonferroni's rule and only
    stricter. Corrected values under a level together err, for any dependence, with at most that probability.
    """
    count = max(len(chances), family or 0)
    missing = count - len(chances)
    corrected = [1.0] * len(chances)
    worst = 0.0
    for rank, index in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        left = count if missing else count - rank
        worst = max(worst, min(1.0, left * chances[index]))
        corrected[index] = worst
    return corrected
