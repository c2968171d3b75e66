"""Evidence that may be looked at all the time: seldom wrong when it is, and there when it should be."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pytest_fusion.canary.evidence.sequential import RATE, Scale, above, below, clean_calls, interval, mean, percent
from tests.sweeps import sweep

RATIO = Scale(-0.25, 0.25, 0.005)
RUNS = 300
ALPHA = 0.05
Drawn = NDArray[np.float64]
Evidence = Callable[[Mapping[int, int], Scale, float], float]


def _ever(draws: Drawn, scale: Scale, alarm: Callable[[Counter[int]], bool]) -> bool:
    """Whether one looks at the wrong moment: after each of the first 50 observations, then after every twentieth."""
    counts: Counter[int] = Counter()
    for number, value in enumerate(draws, 1):
        counts[scale.index(float(value))] += 1
        if (number <= 50 or number % 20 == 0) and alarm(counts):
            return True
    return False


def _share(draw: Callable[[np.random.Generator], Drawn], scale: Scale, alarm: Callable[[Counter[int]], bool]) -> float:
    return sum(_ever(draw(np.random.default_rng(seed)), scale, alarm) for seed in range(RUNS)) / RUNS


STREAMS = {
    "rate 0.3": (RATE, 0.3, lambda g: (g.random(500) < 0.3).astype(float)),
    "rate 0.01": (RATE, 0.01, lambda g: (g.random(500) < 0.01).astype(float)),
    "narrow": (RATIO, 0.02, lambda g: 0.02 + 0.01 * g.standard_normal(500)),
    "wide": (RATIO, 0.0, lambda g: g.uniform(-0.25, 0.25, 500)),
    "two values": (RATIO, 0.0, lambda g: np.where(g.random(500) < 0.1, 0.18, -0.02)),
    "rare and far": (RATIO, 0.0, lambda g: np.where(g.random(500) < 0.04, -0.24, 0.01)),
}


@sweep("name", STREAMS, fast=2)
def test_the_true_mean_is_excluded_at_most_as_often_as_promised_by_one_who_looks_all_the_time(name: str) -> None:
    """Of 300 streams at 5 %, 15 may be wrong on average, and 27 or more would be by chance in 0.2 %."""
    scale, truth, draw = STREAMS[name]
    # The stream is rounded to the scale, which must have its mean.
    offset = 0.0 if scale is RATE else scale.step * 1e-9
    needed = math.log(2 / ALPHA)

    wrong = _share(
        draw,
        scale,
        lambda counts: max(above(counts, scale, truth + offset), below(counts, scale, truth - offset)) >= needed,
    )

    assert wrong < 27 / RUNS


@pytest.mark.parametrize("bound", [0.003, 0.3, 0.9])
@pytest.mark.parametrize("evidence", [above, below])
def test_wealth_does_not_grow_on_average_where_the_mean_is_the_bound(evidence: Evidence, bound: float) -> None:
    """Summed over all that 30 calls can show, expected wealth is 1 at the bound and less beyond it: Ville's premise."""

    def expected(rate: float) -> float:
        return sum(
            math.comb(30, k) * rate**k * (1 - rate) ** (30 - k) * math.exp(evidence({0: 30 - k, 1: k}, RATE, bound))
            for k in range(31)
        )

    harmless, harmful = (bound / 2, (1 + bound) / 2) if evidence is above else ((1 + bound) / 2, bound / 2)

    assert expected(bound) == pytest.approx(1, abs=1e-9)
    assert expected(harmless) < 1 < expected(harmful)


def test_wealth_does_not_grow_on_average_with_ratios_either() -> None:
    """The same of all sequences of six observations of three values, -0.05, 0.02 and 0.2, whose mean is the bound."""
    values, chances = (-0.05, 0.02, 0.2), (0.5, 0.3, 0.2)
    bound = sum(value * chance for value, chance in zip(values, chances, strict=True))
    for evidence in (above, below):
        expected = 0.0
        for drawn in itertools.product(range(3), repeat=6):
            counts = Counter(RATIO.index(values[one]) for one in drawn)
            expected += math.prod(chances[one] for one in drawn) * math.exp(evidence(counts, RATIO, bound))
        assert expected == pytest.approx(1, abs=1e-9)


def test_an_interval_for_one_look_would_not_pass_that_test() -> None:
    """The usual 95 % interval, looked at all the time, excludes the truth far more often: the simulation can tell."""

    def usual(counts: Counter[int]) -> bool:
        n = sum(counts.values())
        return n >= 20 and abs(counts[1] / n - 0.3) > 1.96 * math.sqrt(0.21 / n)

    assert _share(STREAMS["rate 0.3"][2], RATE, usual) > 27 / RUNS


@pytest.mark.parametrize(("true", "found"), [(0.05, 300), (0.06, 150)])
def test_a_slower_mean_is_found(true: float, found: int) -> None:
    """A mean of 5 % where 3 % is allowed is found in nine streams of ten within 300 noisy observations."""
    draws = [true + 0.02 * np.random.default_rng(seed).standard_normal(found) for seed in range(50)]
    counts = [Counter(RATIO.index(float(value)) for value in stream) for stream in draws]

    assert sum(above(one, RATIO, 0.03) >= math.log(100) for one in counts) >= 45


def test_without_an_event_it_is_the_rule_of_three_looked_at_all_the_time() -> None:
    """52,981 clean calls show a rate under one in 10,000 at 1 %, and 5 % fewer do not."""
    enough = clean_calls(1e-4, 0.01)

    assert enough == pytest.approx(math.log(200) * 1e4, rel=1e-3)
    assert below({0: enough}, RATE, 1e-4) >= math.log(100)
    assert below({0: round(0.95 * enough)}, RATE, 1e-4) < math.log(100)
    assert below({0: enough, 1: 1}, RATE, 1e-4) < math.log(100)


def test_events_that_are_never_to_be_seen_need_no_more_than_one() -> None:
    """Above a rate of zero, one event is infinite evidence, and none is none."""
    assert above({0: 1_000_000}, RATE, 0.0) == 0.0
    assert above({0: 1_000_000, 1: 1}, RATE, 0.0) == math.inf


def test_nothing_seen_is_no_evidence() -> None:
    """Without observations the interval is the whole scale, and evidence is zero."""
    assert above({}, RATIO, 0.03) == below({0: 0}, RATIO, 0.03) == 0.0
    assert interval({}, RATIO, 0.01) == (-0.25, 0.25)
    assert math.isnan(mean({}, RATIO))


@given(
    st.dictionaries(st.integers(0, 100), st.integers(0, 3000), min_size=1),
    st.floats(-0.24, 0.24),
    st.floats(-0.24, 0.24),
)
@settings(max_examples=60, deadline=None)
def test_evidence_falls_as_the_bound_rises(counts: dict[int, int], one: float, other: float) -> None:
    """So an interval is an interval: there is more evidence of being above a lower bound, below a higher one."""
    lower, higher = sorted((one, other))

    assert above(counts, RATIO, lower) >= above(counts, RATIO, higher) - 1e-9
    assert below(counts, RATIO, lower) <= below(counts, RATIO, higher) + 1e-9


@given(st.dictionaries(st.integers(0, 100), st.integers(1, 3000), min_size=1))
@settings(max_examples=40, deadline=None)
def test_an_interval_ends_where_the_evidence_reaches_its_level(counts: dict[int, int]) -> None:
    """The mean is inside, the ends are on the scale, and just inside of them nothing is refuted."""
    low, high = interval(counts, RATIO, 0.02)
    centre = mean(counts, RATIO)

    assert RATIO.low <= low <= centre + 1e-12
    assert centre - 1e-12 <= high <= RATIO.high
    assert above(counts, RATIO, low + 1e-3 * (centre - low)) < math.log(100)
    assert below(counts, RATIO, high - 1e-3 * (high - centre)) < math.log(100)
    if low > RATIO.low:
        assert above(counts, RATIO, low - 1e-3 * (low - RATIO.low)) >= math.log(100)


@pytest.mark.parametrize(("low", "high", "step"), [(0, 1, 0), (1, 0, 1), (0, 1, 0.3), (0, math.inf, 1)])
def test_a_scale_must_meet_its_ends(low: float, high: float, step: float) -> None:
    """A scale whose steps do not end at its end is refused."""
    with pytest.raises(ValueError, match="whole number of steps"):
        Scale(low, high, step)


def test_values_outside_are_clipped_and_nan_is_none() -> None:
    """Infinities are the ends of the scale; NaN is refused."""
    assert [RATIO.index(value) for value in (-math.inf, -0.25, 0.0, 0.25, math.inf)] == [0, 0, 50, 100, 100]
    with pytest.raises(ValueError, match="NaN"):
        RATIO.index(math.nan)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([3.4] * 15, "at least +28.4 %"),
        ([0.02] * 8 + [3.4], "at least +4.7 %"),
        ([-math.inf] * 3, "at most -22.1 %"),
        ([0.01] * 100 + [3.4], "+1.2 %"),
        ([3.4, -3.4], "+0.0 %"),
        ([0.1] * 3, "+10.5 %"),
    ],
)
def test_a_mean_of_clipped_values_is_told_as_a_bound(values: list[float], told: str) -> None:
    """Thirty times slower is not 28.4 % slower, where the scale ends; one interrupt in a hundred changes nothing."""
    assert percent(Counter(map(RATIO.index, values)), RATIO) == told


def test_alpha_is_a_probability() -> None:
    """An interval of another level is refused."""
    with pytest.raises(ValueError, match="alpha is 1"):
        interval({0: 1}, RATE, 1)
