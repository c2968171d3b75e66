"""What a shadow run hands over: the reference's own result, its exact value, and its randomly rounded values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["E", "F"]


class Drawn(enum.Flag):
    """Which random numbers a function drew: of a generator that it passed, or of torch's own."""

    NONE = 0
    PASSED = 1
    OWN = 2


@dataclass(slots=True)
class OutputLanes:
    """One result tensor of the reference, three ways, all of the same trailing shape.

    ``native`` is what the reference returned. ``oracle`` is its value in float64 without any rounding (in the native
    dtype where that is an integer or bool). ``lanes`` is ``(K, *shape)``: float64 values *before* the last rounding to
    the native dtype, so that the judge rounds them exactly as an honest kernel does; integers stay integers. ``moved``
    is true where nothing before the last operation could round: numbers were taken, compared and moved, or combined
    once.
    """

    native: Tensor
    oracle: Tensor
    lanes: Tensor
    moved: bool = False


@dataclass(slots=True)
class LaneRun:
    """All results of one shadow run of a reference.

    ``fallbacks`` names the operations whose rounding is not modelled: their lanes come from running the operation
    itself on each lane's values, or from the native value alone. ``drawn`` says which random numbers the reference
    drew; the lanes share the native draw. ``numbers`` are Python's that it multiplied by.
    """

    outputs: list[OutputLanes]
    fallbacks: tuple[str, ...]
    drawn: Drawn
    numbers: frozenset[float] = frozenset()
