"""The verdict on the values of one output, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pytest_fusion.oracle.lane_result import OutputLanes

Grade = Literal["A", "B", "C", "D"]


def index_of(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of element ``flat`` of a contiguous tensor."""
    return tuple(map(int, np.unravel_index(flat, tuple(shape))))


@dataclass(frozen=True, slots=True)
class ValuesVerdict:
    """The comparison of one candidate tensor with the lanes of its reference.

    ``statistic`` is the one nearest to its limit: ``max`` (one element), ``rms`` (all), ``row``, ``moved`` (16-bit
    values at another neighbour), ``nonfinite`` (NaN or infinity where no lane has any), ``code`` (fp8, integer or bool
    values), ``exact``, ``shape``. ``ratio`` is that statistic, measured over allowed, for passes too. ``index``,
    ``got``, ``expected`` and ``allowed`` (absolute) describe the worst element; ``mismatched`` of ``total`` elements
    are beyond the limit of a single one. ``statistical``: a failure that fresh values must repeat. ``ok`` is grade
    ``A`` or ``B``, which only differ on request; ``C`` is less accurate than the reference but inside of the fence,
    ``D`` wrong. ``by`` are the lanes that showed it: others allow other errors. ``swallowed`` says which elements lost
    NaN or infinity; the others are judged without them.
    """

    ok: bool
    grade: Grade | None
    statistic: str
    ratio: float
    index: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    allowed: float | None = None
    mismatched: int = 0
    total: int = 0
    statistical: bool = False
    reason: str = ""
    by: OutputLanes | None = field(default=None, repr=False, compare=False)
    swallowed: str = ""
