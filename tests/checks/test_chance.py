"""Statistics of random bits: known values, false alarms by simulation, what is found."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_fusion.checks.randomness import chance


def bits(count: int, share: float, seed: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) < share


def everywhere(t: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(t, dtype=torch.bool)


@pytest.mark.parametrize(
    ("k", "n", "p", "expected"),
    [(3, 10, 0.5, 0.171875), (0, 20, 0.1, 0.9**20), (19, 20, 0.9, 1 - 0.9**20), (-1, 5, 0.5, 0.0), (5, 5, 0.5, 1.0)],
)
def test_binomial_tails_are_exact(k: int, n: int, p: float, expected: float) -> None:
    """The lower tail is the textbook's, and both tails together count the value itself twice."""
    assert chance.at_most(k, n, p) == pytest.approx(expected, rel=1e-12)
    assert chance.at_least(k + 1, n, p) == pytest.approx(1 - expected, abs=1e-12)


def test_a_tail_far_out_keeps_its_digits() -> None:
    """A probability of 1e-18 comes out as that, not as the rounding of 1."""
    assert chance.at_least(60, 60, 0.5) == pytest.approx(2.0**-60, rel=1e-9)
    assert chance.at_most(0, 60, 0.5) == pytest.approx(2.0**-60, rel=1e-9)


def test_the_tail_is_that_of_the_binomial_law_or_above_it() -> None:
    """From 2 to 6 standard deviations above 20 to 5,000 expected draws: about as large or larger, at most 30 times."""
    for n, p in [(100, 0.2), (1000, 0.02), (1000, 0.5), (10_000, 0.5), (100_000, 0.05)]:
        spread = math.sqrt(n * p * (1 - p))
        for sigmas in (2, 4, 6):
            k = math.ceil(n * p + sigmas * spread)
            excess = torch.tensor([k - n * p], dtype=torch.float64)
            found = float(chance.tail(excess, torch.tensor([spread**2], dtype=torch.float64)))
            exact = chance.at_least(k, n, p) + chance.at_most(math.floor(2 * n * p - k), n, p)
            assert 0.8 * exact <= found <= 30 * exact, (n, p, sigmas, found, exact)


def test_what_is_found_with_99_percent_is() -> None:
    """A share and a variance of the stated size are missed in about one of a hundred samples, at most in three."""
    generator = torch.Generator().manual_seed(0)
    draws, alpha, runs = 4096, 1e-4, 2000
    share = chance.needed(draws, alpha, 0.25)
    more = torch.binomial(
        torch.full((runs,), float(draws)), torch.tensor(0.5 + share).expand(runs), generator=generator
    )
    variance = torch.full((runs,), draws / 4, dtype=torch.float64)
    missed = chance.tail(more.double() - draws / 2, variance) >= alpha
    assert 0.002 <= float(missed.float().mean()) <= 0.03
    calls, rows, alpha = 200, 60, 2e-3
    pairs = calls * rows * (rows - 1) // 2
    alike = chance.needed(pairs, alpha, largest=3 * rows)
    common = torch.randn(300, calls, 1, generator=generator, dtype=torch.float64) * math.sqrt(alike)
    each = torch.randn(300, calls, rows, generator=generator, dtype=torch.float64) * math.sqrt(1 - alike)
    places = (torch.special.ndtr(common + each) - 0.5) * math.sqrt(12)
    products = (places.sum(-1).square() - places.square().sum(-1)).sum(-1) / 2
    missed = chance.tail(products, torch.full_like(products, pairs), largest=3 * rows) >= alpha
    assert 0 < float(missed.float().mean()) <= 0.04


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_independent_bits_are_not_correlated(share: float) -> None:
    """Over 200 masks and pairs of masks, at all their distances, an alarm of probability 1e-3 hardly ever comes."""
    alarms = 0
    for seed in range(100):
        a, b = bits(700, share, 2 * seed), bits(700, share, 2 * seed + 1)
        alarms += chance.correlated(a, a, everywhere(a), alpha=1e-3, itself=True) is not None
        alarms += chance.correlated(a, b, everywhere(a), alpha=1e-3) is not None
    assert alarms <= 2


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_period_and_a_shift_are_found(share: float) -> None:
    """Rows that repeat show at the width of a row, a shifted copy at its distance, unknown bits left out."""
    row = bits(64, share, 1)
    rows = row.repeat(20)
    found = chance.correlated(rows, rows, everywhere(rows), alpha=1e-12, itself=True)
    assert found is not None
    assert (found.distance, found.strength) == (64, pytest.approx(1.0, abs=0.05))
    long = bits(1200, share, 2)
    known = bits(1000, 0.8, 3)
    shifted = chance.correlated(long[:1000], long[7:1007], known, alpha=1e-12)
    assert shifted is not None
    assert shifted.distance == -7


def test_equal_bits_say_nothing() -> None:
    """A mask that keeps everything has no correlation, and neither has one without known elements."""
    ones = torch.ones(100, dtype=torch.bool)
    assert chance.correlated(ones, ones, ones, alpha=1e-3) is None
    assert chance.correlated(bits(100, 0.5, 0), bits(100, 0.5, 0), ~ones, alpha=1e-3) is None
