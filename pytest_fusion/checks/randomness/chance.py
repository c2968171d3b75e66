"""Statistics of random bits and numbers in float64: tails, the deviation that they find, correlations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch

NORMAL = NormalDist()
# A normal variable is above minus this with 99 %.
SURE = NORMAL.inv_cdf(0.99)
# A correlation of at least a quarter of the bits is shared random numbers, not an accident of a small sample.
_SHARED = 0.25


def at_most(k: int, n: int, p: float) -> float:
    """The probability of ``k`` successes or fewer in ``n`` draws of probability ``p``."""
    if k >= n or p <= 0:
        return 1.0
    if k < 0 or p >= 1:
        return 0.0
    each = torch.arange(k + 1, dtype=torch.float64)
    ways = math.lgamma(n + 1) - torch.lgamma(each + 1) - torch.lgamma(n - each + 1)
    terms = ways + each * math.log(p) + (n - each) * math.log1p(-p)
    return min(float(torch.logsumexp(terms, 0).exp()), 1.0)


def at_least(k: int, n: int, p: float) -> float:
    """The probability of ``k`` successes or more."""
    return at_most(n - k, n, 1 - p)


def tail(excess: torch.Tensor, variance: torch.Tensor, largest: float = 1.0) -> torch.Tensor:
    """The probability that a sum of independent terms, each at most ``largest`` in size, is as far from its mean."""
    # The normal law with the variance of Bernstein's inequality: the normal law alone calls a count of few too rare.
    z = excess.abs() / (variance + largest * excess.abs() / 3).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    return torch.erfc(z / math.sqrt(2))


def needed(count: int, alpha: float, variance: float = 1.0, largest: float = 1.0) -> float:
    """How far the mean of ``count`` terms must be off for ``tail`` to be below ``alpha`` with 99 %; at most 1."""
    total = count * variance
    spread = SURE * math.sqrt(total)
    square = NORMAL.inv_cdf(alpha / 2) ** 2
    part = square * largest / 3
    limit = (part + math.sqrt(part**2 + 4 * square * total)) / 2
    # A sum of few large terms varies more where its mean is off.
    left = 1 - spread * largest / 3 / total
    return min((limit + spread) / left / count, 1.0) if left > 0 else 1.0


def needed_correlation(share: float, count: int, alpha: float) -> float:
    """The correlation of strings of ``count`` bits, a ``share`` of them set, that ``correlated`` finds with 99 %."""
    largest = max(share, 1 - share) ** 2 / (share * (1 - share))
    return min(max(needed(count, alpha / count, largest=largest), _SHARED + SURE / math.sqrt(count)), 1.0)


@dataclass(frozen=True, slots=True)
class Correlation:
    """How far one bit string repeats another, ``distance`` further on: from 0, not at all, to 1."""

    distance: int
    strength: float


def correlated(
    a: torch.Tensor, b: torch.Tensor, known: torch.Tensor, *, alpha: float, itself: bool = False
) -> Correlation | None:
    """The distance at which bits of ``b`` repeat those of ``a``, if chance does that with less than ``alpha``.

    1-d bools, counted where ``known`` in both. ``alpha`` is for all distances. ``itself``: ``b`` is ``a``, so 0 is left
    out.
    """
    n = a.numel()
    counted = int(known.sum())
    if counted < 2:
        return None
    weight = known.to(torch.float64)
    shares = [float((t.to(torch.float64) * weight).sum()) / counted for t in (a, b)]
    spread = math.sqrt(shares[0] * (1 - shares[0]) * shares[1] * (1 - shares[1]))
    if spread == 0:
        return None
    centred = [(t.to(torch.float64) - share) * weight for t, share in zip((a, b), shares, strict=True)]
    products, pairs = _lagged(centred[0], centred[1]), _lagged(weight, weight).round()
    distances = torch.arange(-(n - 1), n, device=a.device)
    if itself:
        products, pairs, distances = products[n:], pairs[n:], distances[n:]
    strength = products / (pairs.clamp_min(1) * spread)
    largest = max(shares[0], 1 - shares[0]) * max(shares[1], 1 - shares[1])
    found = (strength >= _SHARED) & (tail(products / spread, pairs, largest / spread) < alpha / n)
    if not bool(found.any()):
        return None
    # Among those nearly as strong as the strongest, the shortest distance is the period.
    found &= strength >= 0.9 * strength[found].max()
    candidates = found.nonzero().flatten()
    at = int(candidates[distances[candidates].abs().argmin()])
    return Correlation(int(distances[at]), round(float(strength[at]), 3))


def _lagged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sums over ``i`` of ``a[i] * b[i + d]``, for ``d`` from ``1 - n`` to ``n - 1``."""
    n = a.numel()
    size = 2 * n
    sums = torch.fft.irfft(torch.fft.rfft(a, size).conj() * torch.fft.rfft(b, size), size)
    return torch.cat([sums[size - n + 1 :], sums[:n]])


def alike_by_chance(share: float, count: int) -> float:
    """The probability that two independent strings of ``count`` bits, a ``share`` of them set, are equal."""
    return float((share**2 + (1 - share) ** 2) ** count)
