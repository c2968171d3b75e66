"""`BenchRequest`: the settings of a bench run, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_fusion.run.measure.tools.again import Again


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """The settings of ``--fusion-bench``. ``targets`` is ``"sm_80,sm_90"``, or empty for none. In ``ci`` a missing
    baseline is a failure. ``family`` is the number of latencies of the whole run, for Holm's correction. ``counters``
    is the test to run again under ncu."""

    targets: str = ""
    folder: Path = Path(".fusion") / "baselines"
    update: str = "none"
    ci: bool = False
    family: int = 1
    counters: Again | None = None
