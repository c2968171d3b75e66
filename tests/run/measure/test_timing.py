"""Pairs, warm-up and rotation, on things whose time is made up."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest
import torch

from pytest_fusion.run.measure.timing import pairs
from pytest_fusion.run.measure.timing.graph_replay import FEWEST, MOST, copies_needed, rotated, twin
from pytest_fusion.run.measure.timing.pairs import FEWEST_BLOCKS, MOST_BLOCKS, PAIRS, paired, warmed


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


class Made:
    """Takes ``own`` seconds times what the machine adds at the time, and moves the clock."""

    def __init__(self, clock: Clock, own: float, drift: float = 0.0, jitter: float = 0.0, seed: int = 0) -> None:
        self.clock, self.own, self.drift, self.jitter = clock, own, drift, jitter
        self.random, self.calls = random.Random(seed), 0

    def seconds(self) -> float:
        self.calls += 1
        took = self.own * (1 + self.drift * self.clock.now) * (1 + self.random.gauss(0, self.jitter))
        self.clock.now += took
        return took


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pairs, "perf_counter", lambda: made.now)
    return made


def never(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> bool:
    return False


def test_a_drifting_machine_does_not_favour_one_side(clock: Clock) -> None:
    """Where everything gets slower by 1 % a second, the pairs' ratio stays that of the two things."""
    found = paired(Made(clock, 1.02e-3, 0.01), Made(clock, 1e-3, 0.01, seed=1), enough=never, budget_s=10)

    ratios = [
        a / b
        for ours, theirs in zip(found.candidate, found.control, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    assert statistics.median(ratios) == pytest.approx(1.02, rel=1e-4)


def test_what_is_measured_first_changes_at_random(clock: Clock) -> None:
    """Of many pairs each side is first in some."""
    order: list[str] = []

    class Named(Made):
        def __init__(self, name: str) -> None:
            super().__init__(clock, 1e-3)
            self.name = name

        def seconds(self) -> float:
            order.append(self.name)
            return super().seconds()

    paired(Named("a"), Named("b"), enough=never, budget_s=0)
    firsts = order[-2 * PAIRS * FEWEST_BLOCKS :: 2]
    assert 10 < firsts.count("a") < 40


def test_measuring_ends_when_it_is_precise_or_the_budget_is_spent(clock: Clock) -> None:
    """Whether blocks are enough is checked after 10, 20, 40 only; the budget ends it anywhere, but never before 10."""
    checked_at: list[int] = []

    def enough(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> bool:
        checked_at.append(len(ours))
        return len(ours) >= 40

    found = paired(Made(clock, 1e-4), Made(clock, 1e-4), enough=enough, budget_s=100)
    assert (checked_at, len(found.candidate)) == ([10, 20, 40], 40)
    found = paired(Made(clock, 1.0), Made(clock, 1.0), enough=never, budget_s=0.1)
    assert len(found.candidate) == FEWEST_BLOCKS
    found = paired(Made(clock, 1e-6), Made(clock, 1e-6), enough=never, budget_s=100)
    assert len(found.candidate) == MOST_BLOCKS


def test_warm_is_what_is_steady(clock: Clock) -> None:
    """A thing whose time falls is run until it does not; one that never settles ends by time and is told."""

    class Falling(Made):
        def seconds(self) -> float:
            self.own = 1e-3 * (1 + max(0.0, 1 - self.calls / 100))
            return super().seconds()

    falling = Falling(clock, 1e-3)
    assert warmed([falling])
    assert falling.calls > 100
    assert not warmed([Made(clock, 1e-3, drift=100.0)])


def test_copies_fill_the_cache_five_times() -> None:
    """As many calls as it takes, within what a graph holds."""
    assert copies_needed(2**20, 50 * 2**20) == 250
    assert copies_needed(2**30, 50 * 2**20) == FEWEST
    assert copies_needed(100, 50 * 2**20) == MOST
    assert copies_needed(0, 50 * 2**20) == MOST


def test_each_call_has_inputs_of_its_own_while_there_is_room() -> None:
    """No two sets share memory; with too little room some come again, and that is told."""
    x = torch.arange(8.0)
    sets, cold = rotated({"x": x, "eps": 1e-6}, 4, room=2**20)
    assert cold
    assert len({s["x"].data_ptr() for s in sets} | {x.data_ptr()}) == 5
    assert all(torch.equal(s["x"], x) and s["eps"] == 1e-6 for s in sets)
    assert {(s["x"].untyped_storage().nbytes(), s["x"].storage_offset()) for s in sets} == {(32, 0)}
    sets, cold = rotated({"x": x}, 4, room=2 * 32)
    assert (len(sets), len({s["x"].data_ptr() for s in sets}), cold) == (4, 2, False)


def test_copies_keep_their_layout() -> None:
    """Another layout would be another case; only elements that share a place get places of their own."""
    x = torch.arange(24.0).view(4, 6)
    given = {"gaps": x[:, ::2], "turned": x.T, "wide": x[0].expand(3, 6), "windows": x.as_strided((3, 4), (2, 1))}
    (made,), _ = rotated(given, 1, 1 << 20)

    assert all(torch.equal(made[name], t) for name, t in given.items())
    assert (made["gaps"].stride(), made["turned"].stride()) == ((6, 2), (1, 6))
    assert made["windows"].stride() == (4, 1)
    made["gaps"].fill_(-1.0)
    assert all(torch.equal(made[name], t) for name, t in given.items() if name != "gaps")
    assert torch.equal(twin(x[:, ::2]), x[:, ::2])
    assert [twin(t).dtype for t in (x.bool(), x.to(torch.complex64), x[:0])] == [torch.bool, torch.complex64, x.dtype]
