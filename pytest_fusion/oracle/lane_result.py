"""The results of a shadow run: the reference's own, the exact ones, and randomly rounded ones."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["E", "F"]


class Drawn(enum.Flag):
    """Which generator a function drew from: one that it passed, or torch's own."""

    NONE = 0
    PASSED = 1
    OWN = 2


@dataclass(slots=True)
class OutputLanes:
    """One result tensor of the reference, three ways, all of the same trailing shape.

    ``native`` is what the reference returned. ``oracle`` is its value in float64 without rounding (integers and bools
    in their dtype). ``lanes`` (K, *shape) are float64 values *before* the last rounding to the native dtype, so that
    the judge rounds them as a kernel does; integers stay integers. ``moved``: nothing before the last operation could
    round; numbers were only taken, compared, moved, or combined once.
    """

    native: Tensor
    oracle: Tensor
    lanes: Tensor
    moved: bool = False


@dataclass(slots=True)
class LaneRun:
    """All results of one shadow run; ``fallbacks`` names operations whose rounding is not modelled.

    ``drawn``: the generators that were used; lanes share the native draw. ``numbers``: Python numbers that were
    factors.
    """

    outputs: list[OutputLanes]
    fallbacks: tuple[str, ...]
    drawn: Drawn
    numbers: frozenset[float] = frozenset()
