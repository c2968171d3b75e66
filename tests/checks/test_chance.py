"""Statistics of random bits: known values, false alarms by simulation, what is found."""

from __future__ import annotations

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


@pytest.mark.parametrize(("x", "freedom", "expected"), [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (0.0, 4, 1.0)])
def test_the_chi_square_tail_is_the_tables(x: float, freedom: int, expected: float) -> None:
    """Critical values at 5 % have that probability."""
    assert chance.chi_square_tail(x, freedom) == pytest.approx(expected, rel=1e-6)


def test_a_g_test_by_hand() -> None:
    """Ten and twenty where fifteen and fifteen are expected: G is 3.398 with one degree of freedom."""
    fit = chance.g_test(torch.tensor([10, 20]), torch.tensor([1.0, 1.0]))
    assert fit is not None
    assert (fit.g, fit.freedom) == (pytest.approx(3.3980, abs=1e-3), 1)
    assert fit.p == pytest.approx(0.0653, abs=1e-3)


def test_rare_bins_are_pooled() -> None:
    """Bins that expect less than 5 become one; where that leaves a single bin there is no test."""
    fit = chance.g_test(torch.tensor([50, 45, 2, 1, 2]), torch.tensor([50.0, 45.0, 2.0, 1.0, 2.0]))
    assert fit is not None
    assert (fit.freedom, fit.g) == (2, pytest.approx(0.0))
    assert chance.g_test(torch.tensor([2, 1]), torch.tensor([1.0, 1.0])) is None


def test_the_g_test_raises_as_few_false_alarms_as_it_says() -> None:
    """Of 4,000 fair samples of 1,024 draws in 16 bins about one in a hundred is below 1 %, none below 1e-6."""
    generator = torch.Generator().manual_seed(0)
    counts = [torch.bincount(torch.randint(16, (1024,), generator=generator), minlength=16) for _ in range(4000)]
    p = torch.tensor([fit.p for c in counts if (fit := chance.g_test(c, torch.ones(16))) is not None])
    assert 20 <= int((p < 0.01).sum()) <= 65
    assert float(p.min()) > 1e-6


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
