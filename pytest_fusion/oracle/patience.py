"""A time limit for lanes of the reference; reaching it is no evidence against the kernel."""

from __future__ import annotations

import time
from typing import Any

from pytest_fusion.oracle.lane_mode import LaneMode
from pytest_fusion.oracle.rounding import Noise
from pytest_fusion.run import pristine


class TooSlow(Exception):
    """A run of the reference in its lanes took longer than one may."""


class Timed(LaneMode):
    """A ``LaneMode`` that raises ``TooSlow`` at the first operation after ``limit_s`` seconds.

    Scores of 1025 rows against as many are 10^6 elements for three inputs of 10^3, in seven lanes of float64. The
    smaller of wall time and processor time counts: neither a loaded machine nor many cores make a reference slow.
    """

    def __init__(self, noise: Noise, limit_s: float) -> None:
        super().__init__(noise)
        self._limit_s, self._began, self._worked = limit_s, pristine.perf_counter(), time.process_time()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # At every operation only the wall's clock is read: 0.1 us beside 0.4 of the processor's.
        late = pristine.perf_counter() - self._began > self._limit_s
        if late and time.process_time() - self._worked > self._limit_s:
            raise TooSlow(f"one run of the reference in its lanes takes more than {self._limit_s:g} s")
        return super().__torch_dispatch__(func, types, args, kwargs)
