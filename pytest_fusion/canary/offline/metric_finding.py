"""`Finding`: what is said of one metric, and the `Timing` of one size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "worse", "better", "nodata", "error"]
Role = Literal["critical", "ordinary", "muted"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One metric in words; ``value`` is a log ratio or a count, ``low`` to ``high`` its interval."""

    metric: str
    status: Status
    role: Role
    words: str
    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """log(candidate / incumbent) of a size's latency: the median over blocks of pairs and its 99 % interval.

    ``share`` is the part of the recorded calls that the size stands for, 0 where nothing was recorded.
    """

    text: str
    ratio: float
    low: float
    high: float
    candidate_s: float = 0.0
    incumbent_s: float = 0.0
    share: float = 0.0


def times(log: float) -> str:
    """A log ratio in words."""
    return f"{math.exp(log):.3g} x"
