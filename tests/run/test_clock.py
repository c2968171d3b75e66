"""Seconds and calls, by phase and by check."""

from __future__ import annotations

import pytest

from pytest_fusion.run import clock
from pytest_fusion.run.clock import FIRST, Clock


def test_what_is_inside_is_taken_out_of_what_is_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second belongs to one phase and one check; calls of the kernel are counted for the check that made them."""
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])
    watch = Clock()

    def spend(seconds: float) -> None:
        now[0] += seconds

    with watch.phase("plugin"):
        spend(1)
        with watch.phase("fused"):
            spend(2)
        with watch.check("gradients"):
            spend(4)
            with watch.phase("fused"):
                spend(8)
            with watch.check("repeat"), watch.phase("fused"):
                spend(16)
        spend(32)

    assert watch.seconds == {"plugin": 37, "fused": 26}
    assert {name: (share.seconds, share.calls) for name, share in watch.checks.items()} == {
        FIRST: (35, 1),
        "gradients": (12, 1),
        "repeat": (16, 1),
    }


def test_a_check_that_raises_is_left_again() -> None:
    """What follows an exception counts for the check around it."""
    watch = Clock()
    with pytest.raises(ValueError, match="planned"), watch.check("gradients"):
        raise ValueError("planned")
    with watch.phase("fused"):
        pass
    assert watch.checks[FIRST].calls == 1


def test_the_end_of_a_slow_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each call of kernel or reference that ends a second or more after the last one told; never without one."""
    now, told = [0.0], []
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])
    watch = Clock(lambda: told.append(now[0]))

    for name, seconds in (("fused", 0.5), ("fused", 0.6), ("reference", 0.7), ("plugin", 5.0), ("fused", 0.1)):
        with watch.phase(name):
            now[0] += seconds

    assert told == pytest.approx([1.1, 6.9])
