"""Verdicts on latency: called when it is there, not called when it is not, and unknown when nobody can tell."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from benchmarks.judging.machines import CLOUD, H200, ROUGH, Machine, Session
from benchmarks.judging.rates import beside, incumbent, rates, stored
from pytest_fusion.bench.baseline.bootstrap import (
    FEWEST,
    block_ratios,
    chi_square_limit,
    estimate,
    holm,
    settled,
    student_limit,
    student_tail,
)
from pytest_fusion.bench.baseline.latency_judge import (
    OTHER_UNIT,
    SAME_UNIT,
    Noise,
    against_stored,
    judge,
    level,
    noise,
    scatter,
    worth,
)
from pytest_fusion.bench.baseline.row import Session as Stored
from tests.bench.baseline.made import latency
from tests.sweeps import sweep

QUIET = Noise(0.0005)


def _blocks(centre: float, scale: float = 0.001, count: int = 20) -> list[float]:
    return [centre + scale * NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]


def _ask(centre: float, scale: float = 0.001, machine: Noise = QUIET, count: int = 20) -> str:
    question = beside(estimate(_blocks(centre, scale, count)), machine)
    return judge([question])[0].verdict


def test_an_estimate_is_a_function_of_its_blocks() -> None:
    """The same blocks give the same interval, another seed another one of about that width."""
    blocks = _blocks(0.02, 0.004)
    one, again, other = estimate(blocks), estimate(list(blocks)), estimate(blocks, seed=1)

    assert one == again
    assert one.ratio == pytest.approx(0.02, abs=1e-6)
    assert one.low < one.ratio < one.high
    assert other.half_width == pytest.approx(one.half_width, rel=0.3)
    assert all(type(value) is float for value in (one.ratio, one.low, one.high, one.error, *one.blocks))


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Of 400 samples of 20 normal blocks some 98 % of the intervals hold the median, and hardly more than 99 %."""
    rng = np.random.default_rng(1)
    found = [estimate(rng.normal(size=20).tolist(), seed=i) for i in range(400)]

    assert 0.96 <= sum(one.low <= 0 <= one.high for one in found) / 400 <= 0.995


def test_a_disturbed_pair_does_not_move_its_block() -> None:
    """Two of five pairs that something made ten times slower leave the block's ratio where it is."""
    control = [[1.0, 1.1, 1.2, 1.3, 1.4]] * 3
    candidate = [[1.02, 1.122, 12.0, 1.326, 14.0]] * 3

    assert block_ratios(candidate, control) == pytest.approx([math.log(1.02)] * 3)


@pytest.mark.parametrize(
    ("candidate", "control"),
    [([[1.0]], [[1.0, 1.0]]), ([[1.0]], []), ([[]], [[]]), ([[0.0]], [[1.0]]), ([[math.nan]], [[1.0]])],
)
def test_times_that_are_none_are_refused(candidate: list[list[float]], control: list[list[float]]) -> None:
    """Blocks that do not match, empty blocks and times that are not positive are errors, not ratios."""
    with pytest.raises(ValueError, match="block"):
        block_ratios(candidate, control)


def test_no_blocks_have_no_estimate() -> None:
    """Nothing measured is an error, and so is a ratio that is no number."""
    for blocks in ([], [math.nan] * 20):
        with pytest.raises(ValueError, match="no blocks"):
            estimate(blocks)


def test_more_blocks_are_measured_until_the_interval_is_narrow() -> None:
    """Half of the effect to each side is narrow enough, and fewer blocks than a bootstrap needs never are."""
    assert settled(estimate(_blocks(0, 0.001)), 0.01)
    assert not settled(estimate(_blocks(0, 0.02)), 0.01)
    assert not settled(estimate([0.0] * (FEWEST - 1)), 0.01)


@pytest.mark.parametrize(
    ("centre", "scale", "verdict"),
    [
        (0.0, 0.001, "same"),
        (0.005, 0.001, "same"),
        (0.01, 0.001, "regressed"),
        (0.02, 0.001, "regressed"),
        (-0.02, 0.001, "improved"),
        (0.0, 0.05, "inconclusive"),
        (0.02, 0.05, "inconclusive"),
        (0.2, 0.05, "regressed"),
        (0.02, 0.0, "regressed"),
        (0.0, 0.0, "same"),
    ],
)
def test_the_four_verdicts(centre: float, scale: float, verdict: str) -> None:
    """1 % against an incumbent counts, half of it is the same, and what the interval does not tell is inconclusive."""
    assert _ask(centre, scale) == verdict


def test_nothing_counts_under_three_times_the_spread_of_the_machine() -> None:
    """A machine that puts equal things 1 % apart calls no 2 % and does call 4 %."""
    assert [_ask(centre, machine=Noise(0.01)) for centre in (0.02, 0.04)] == ["same", "regressed"]


def test_too_few_blocks_or_a_noisy_machine_give_no_verdict() -> None:
    """Even twice the time is not called slower on such evidence."""
    assert _ask(0.7, count=FEWEST - 1) == "inconclusive"
    assert _ask(0.7, machine=Noise(0.001, "noisy")) == "inconclusive"


def test_a_machine_that_favours_a_side_is_noisy() -> None:
    """An A/A interval that lies beyond 0.3 % is; one that excludes zero by less, or holds it, is not."""

    def found(centre: float, scale: float = 0.0003, count: int = 20) -> Noise:
        return noise([estimate(_blocks(centre, scale, count))])

    assert found(0.0).noisy == ""
    assert found(-0.0008).noisy == ""
    assert "favours one side" in found(0.006).noisy
    assert found(0.006, 0.02).noisy == ""
    assert "blocks" in found(0.0, count=3).noisy
    assert found(0.0, 0.02).spread > 3 * found(0.0, 0.002).spread
    with pytest.raises(ValueError, match="no A/A run"):
        noise([])


def test_holm_corrects_for_the_number_of_questions() -> None:
    """The textbook example, order kept, and Bonferroni where the rest of the family is not at hand."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, 0.001], family=10) == pytest.approx([0.1, 0.01])
    assert holm([0.9], family=10) == [1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("t", "freedom", "tail"),
    [(2.998, 7, 0.01), (4.785, 7, 0.001), (2.539, 19, 0.01), (3.579, 19, 0.001), (2.326, math.inf, 0.01), (0, 7, 0.5)],
)
def test_tails_are_those_of_the_tables(t: float, freedom: float, tail: float) -> None:
    """Student's t within 4 % of the printed probabilities, and its inverse."""
    assert student_tail(t, freedom) == pytest.approx(tail, rel=0.04)
    assert student_tail(-t, freedom) == pytest.approx(1 - tail, rel=0.04)
    if t:
        assert student_tail(student_limit(tail, freedom), freedom) == pytest.approx(tail, rel=1e-6)


def test_the_lower_limit_of_chi_square_is_that_of_the_tables() -> None:
    """Of 4 degrees 20 % are under 1.649, of 9 under 5.380."""
    assert [chi_square_limit(0.2, freedom) for freedom in (4, 9)] == pytest.approx([1.649, 5.380], rel=0.01)


def test_the_spread_between_sessions_is_learnt() -> None:
    """Fewer than five sessions have the default of one GPU; from five on, what they show and a margin."""

    def between(ratios: list[float], unit: str = "u1") -> tuple[float, bool]:
        history = tuple(Stored(ratio, "u1") for ratio in ratios[:-1])
        found = level(latency(ratios[-1], unit="u1", history=history), unit)
        return found.between, found.known

    assert between([-0.7] * 4) == (SAME_UNIT, False)
    quiet, loud = between([-0.7, -0.701, -0.699, -0.7, -0.7]), between([-0.7, -0.73, -0.67, -0.7, -0.7])
    assert (quiet[1], loud[1]) == (True, True)
    assert 0.0007 < quiet[0] < 0.002
    assert 0.02 < loud[0] < 0.05


def test_sessions_of_one_gpu_tell_nothing_about_another() -> None:
    """However many there are, another GPU of the model has the default between GPUs, until several are known."""
    one = tuple(Stored(-0.7, "u1") for _ in range(9))
    several = tuple(Stored(-0.7 + 0.001 * (i % 3), f"u{i}") for i in range(9))

    assert level(latency(history=one), "u9").between == OTHER_UNIT
    assert level(latency(history=one), "").known is True
    assert level(latency(), "").between == OTHER_UNIT
    assert level(latency(history=several), "new").known is True
    assert level(latency(history=several), "new").between < 0.005


def test_the_spread_between_sessions_is_never_under_that_of_the_machine() -> None:
    """Five equal sessions by accident do not make a stored ratio exact."""
    history = tuple(Stored(-0.7, "u1") for _ in range(9))

    assert level(latency(history=history), "u1", aa=0.002).between == 0.002


def test_a_reference_that_takes_another_time_makes_the_stored_ratio_worth_less() -> None:
    """8 % is a regression while the reference takes what it took, and no evidence where that became 28 % slower."""
    stored = latency()

    def verdict(slower: float, reference: float) -> str:
        now = latency(stored.ratio + math.log1p(slower), reference_s=stored.reference_s * reference)
        compared = against_stored(now, worth(level(stored, "u1"), stored, now), QUIET)
        return judge([compared], family=30)[0].verdict

    assert [verdict(0.08, shift) for shift in (1.0, 1.015, 0.985)] == ["regressed"] * 3
    assert [verdict(0.08, shift) for shift in (1.28, 0.78)] == ["inconclusive"] * 2
    assert verdict(0.5, 1.28) == "regressed"
    assert worth(level(stored, "u1"), stored, latency(reference_s=0.0)) == level(stored, "u1")


def test_a_gpu_that_others_used_makes_short_kernels_worth_less() -> None:
    """20 % of 1 us is no evidence where the blocks of one session lie 4 % apart, and is where they agree; of 50 us, in
    either case."""
    apart = tuple(-0.7 + 0.04 * step for step in np.linspace(-1.5, 1.5, 20))

    def verdict(fused_s: float, blocks: tuple[float, ...]) -> str:
        stored = latency(fused_s=fused_s, blocks=blocks)
        now = latency(stored.ratio + math.log1p(0.2), fused_s=1.2 * fused_s)
        compared = against_stored(now, worth(level(stored, "u1"), stored, now), QUIET)
        return judge([compared], family=30)[0].verdict

    assert 0.03 < scatter(apart) < 0.06
    assert scatter(apart[:3]) == 0.0
    assert verdict(1e-6, latency().blocks) == "regressed"
    assert verdict(1e-6, apart) == "inconclusive"
    assert verdict(5e-5, apart) == "regressed"


@sweep("machine", [H200, CLOUD, ROUGH], ids=lambda machine: machine.name)
def test_a_run_in_which_nothing_changed_raises_no_alarm(machine: Machine) -> None:
    """Forty simulated runs on each machine, against the incumbent and stored ratios of the same GPU and others."""
    for rule in (incumbent, stored(1), stored(1, same_unit=False)):
        assert rates(rule, machine, 0.0, 40, seed=1).get("regressed", 0.0) == 0


def test_a_slowdown_that_counts_is_called_on_a_quiet_gpu() -> None:
    """2 % against the incumbent and 5 % against a stored ratio of the same GPU every time, 1 % nine times in ten."""
    assert rates(incumbent, H200, 0.02, 30, seed=2)["regressed"] == 1
    assert rates(incumbent, H200, 0.01, 60, seed=2)["regressed"] >= 0.85
    assert rates(stored(1), H200, 0.05, 30, seed=2)["regressed"] == 1


def test_the_made_up_machine_scatters_as_the_real_one() -> None:
    """Ten A/A runs on the H200 lie within the tenth of a per cent in which ten real ones lay."""
    rng = np.random.default_rng(3)
    found = [estimate(Session(H200, rng).ratios()).ratio for _ in range(10)]

    assert 0.0004 < max(found) - min(found) < 0.0025
