"""Counter-based numbers: stable bits, honest distributions."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_fusion.case import counter_random


def test_the_bits_of_a_stream_never_change() -> None:
    """A replay file of an older version gives the same numbers, so these literals may never be edited."""
    assert counter_random.mix("x", 0) == 5253199441270455250
    assert counter_random.bits(3, 1, "cpu").tolist() == [
        -7995527694508729151,
        -4689498862643123097,
        -534904783426661026,
    ]
    assert counter_random.uniform((2,), 5, "cpu").tolist() == [0.386768045983934, 0.7523070158382239]
    assert counter_random.normal((2,), 5, "cpu").tolist() == [1.414373262211921, -0.7399936321737436]
    assert counter_random.integers((6,), -2, 2, 3, "cpu").tolist() == [1, -2, 0, -1, -1, 1]


def test_an_element_does_not_depend_on_how_many_follow_it() -> None:
    """A longer tensor begins with the elements of a shorter one of the same stream."""
    for make in (counter_random.uniform, counter_random.normal):
        assert torch.equal(make((5,), 3, "cpu"), make((40,), 3, "cpu")[:5])


def test_mix_tells_apart_what_differs() -> None:
    """Order, type and number of the parts all change the seed, and so does a sign."""
    parts = [(1, 2), (2, 1), (12,), ("12",), (1, 2, 0), ("a", 1), (1, "a"), (-1, 2)]
    assert len({counter_random.mix(*part) for part in parts}) == len(parts)


def test_normal_has_mean_zero_and_variance_one_and_an_end() -> None:
    """Over 100 000 elements mean and variance are within five standard errors; no element exceeds 4.9."""
    v = counter_random.normal((100_000,), 7, "cpu")
    assert abs(float(v.mean())) < 5 / math.sqrt(100_000)
    assert abs(float(v.var()) - 1) < 5 * math.sqrt(2 / 100_000)
    assert float(v.abs().max()) <= 4.9


def test_uniform_fills_its_interval_and_excludes_one() -> None:
    """Every tenth of [0, 1) gets its share of 10 000 elements within five standard errors."""
    v = counter_random.uniform((10_000,), 7, "cpu")
    assert float(v.min()) >= 0
    assert float(v.max()) < 1
    counts = torch.histc(v, 10, 0, 1)
    assert bool(((counts - 1000).abs() < 5 * math.sqrt(900)).all())


@pytest.mark.parametrize(("low", "high"), [(0, 0), (-3, 4), (5, 6)])
def test_integers_take_every_value_from_low_to_high(low: int, high: int) -> None:
    """Both ends are included and nothing lies outside."""
    found = set(counter_random.integers((500,), low, high, 11, "cpu").tolist())
    assert found == set(range(low, high + 1))


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 2**62),
        (-(2**62), 2**62),
        (0, 2**63 - 1),
        (-(2**63), 2**63 - 2),
        (-(2**63), 2**63 - 1),
        (0, 2**64 - 2),
        (2**63, 2**64 - 1),
    ],
)
def test_integers_fill_ranges_of_64_bits(low: int, high: int) -> None:
    """Evenly to both ends; those above 2^63 come as the negative numbers of the same bits."""
    found = [
        n + (1 << 64) if n < min(low, 0) else n for n in counter_random.integers((4000,), low, high, 5, "cpu").tolist()
    ]
    found = [n % (1 << 64) for n in found] if high >= 1 << 63 else found
    assert all(low <= n <= high for n in found)
    places = [(n - low) / (high - low) for n in found]
    assert min(places) < 0.01
    assert max(places) > 0.99
    assert abs(sum(places) / len(places) - 0.5) < 0.03


def test_streams_of_neighbouring_seeds_are_unrelated() -> None:
    """Seeds 1 and 2 agree in no element and hardly correlate."""
    a, b = counter_random.normal((10_000,), 1, "cpu"), counter_random.normal((10_000,), 2, "cpu")
    assert not bool((a == b).all())
    assert abs(float((a * b).mean())) < 5 / 100
