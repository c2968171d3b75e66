"""Statistics of random bits and numbers in float64: binomial tails, the G-test, correlations at every distance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Bins of fewer expected draws are pooled: below 5 the chi-square law of G does not hold (Cochran, 1954).
FEWEST_EXPECTED = 5.0
# A correlation of at least a quarter of the bits is shared random numbers, not an accident of a small sample.
_SHARED = 0.25


def _log_binomial(n: int, p: float, k: torch.Tensor) -> torch.Tensor:
    """Logarithm of the probability of ``k`` successes in ``n`` draws, ``0 < p < 1``."""
    total = torch.tensor(float(n + 1), dtype=torch.float64)
    ways = torch.lgamma(total) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return ways + k * math.log(p) + (n - k) * math.log1p(-p)


def at_most(k: int, n: int, p: float) -> float:
    """The probability of ``k`` successes or fewer in ``n`` draws of probability ``p``."""
    if k >= n or p <= 0:
        return 1.0
    if k < 0 or p >= 1:
        return 0.0
    terms = _log_binomial(n, p, torch.arange(k + 1, dtype=torch.float64))
    return min(float(torch.logsumexp(terms, 0).exp()), 1.0)


def at_least(k: int, n: int, p: float) -> float:
    """The probability of ``k`` successes or more."""
    return at_most(n - k, n, 1 - p)


def chi_square_tail(x: float, freedom: int) -> float:
    """The probability that a chi-square variable of ``freedom`` degrees of freedom exceeds ``x``."""
    half = torch.tensor([freedom / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@dataclass(frozen=True, slots=True)
class Fit:
    """A G-test: the statistic, its degrees of freedom, the probability of a larger one by chance."""

    g: float
    freedom: int
    p: float


def g_test(observed: torch.Tensor, expected: torch.Tensor) -> Fit | None:
    """The G-test of counts (1-d), with rare bins pooled until each expects at least 5; ``None`` for a single bin."""
    o, e = observed.to(torch.float64), expected.to(torch.float64)
    e = e * (o.sum() / e.sum())
    order = e.argsort()
    o, e = o[order], e[order]
    rare = int((e < FEWEST_EXPECTED).sum())
    if rare:
        sums = e.cumsum(0)
        # All rare ones, and as many of the next as needed.
        taken = max(rare, int((sums < FEWEST_EXPECTED).sum()) + 1)
        if taken >= len(e):
            return None
        o, e = (torch.cat([t[:taken].sum()[None], t[taken:]]) for t in (o, e))
    freedom = len(e) - 1
    if freedom < 1:
        return None
    g = 2 * float(torch.special.xlogy(o, o / e).sum())
    return Fit(g, freedom, chi_square_tail(max(g, 0.0), freedom))


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
    # Bernstein's inequality for a sum of products, each at most `largest` in size and of variance `spread` squared.
    largest = max(shares[0], 1 - shares[0]) * max(shares[1], 1 - shares[1])
    exponent = pairs * strength.square() / (2 * (1 + largest * strength.abs() / (3 * spread)))
    found = (strength >= _SHARED) & (exponent >= math.log(2 * n / alpha))
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
