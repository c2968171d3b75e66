"""Batches of calls on a clock that is made up."""

from __future__ import annotations

import pytest

from pytest_fusion.run.measure.timing import pairs
from pytest_fusion.run.measure.timing.pairs import SHORTEST_S, host_timed


@pytest.mark.parametrize(("took", "calls"), [(1.0, 1), (1e-4, 1), (3e-5, 4), (1e-6, 128)])
def test_a_sample_is_long_enough_for_the_clock(monkeypatch: pytest.MonkeyPatch, took: float, calls: int) -> None:
    """Short calls are timed many at a time, long ones alone; a sample is the seconds of one call."""
    now = [0.0]

    def call() -> None:
        now[0] += took

    monkeypatch.setattr(pairs, "perf_counter", lambda: now[0])
    found = host_timed(call)

    assert (found.calls, found.timer) == (calls, "host")
    assert found.seconds() == pytest.approx(took)
    assert found.calls * took >= SHORTEST_S


def test_a_clock_that_stands_still_ends_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may have frozen the clock before the plugin was imported."""
    monkeypatch.setattr(pairs, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(pairs, "_MOST", 64)

    assert host_timed(lambda: None).calls == 64
