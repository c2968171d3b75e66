"""`benchmarks.canary.overhead`: its loops run, and its percentiles are those of the samples."""

from __future__ import annotations

from benchmarks.canary.overhead import added_ns, percentile
from pytest_fusion.canary import Policy


def test_both_loops_are_run() -> None:
    """One difference for each pair of loops, whatever it is."""
    assert len(added_ns(Policy(state="off"), calls=10, loops=3)) == 3


def test_percentiles() -> None:
    """Of a hundred samples the 99th percentile is the last but none above it."""
    samples = [float(i) for i in range(100)]
    assert [percentile(samples, share) for share in (0.0, 0.5, 0.99, 1.0)] == [0.0, 50.0, 99.0, 99.0]
