"""What an operation reads: each tensor with its lanes and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_store import Lanes


def rolled(value: Tensor) -> Tensor:
    """``value`` (L, *shape), but every second lane (never the oracle) as another one has it."""
    found = value.clone()
    found[1::2] = found[1::2].roll(1, 0)
    return found


@dataclass(slots=True, eq=False)
class Operand:
    """A tensor that an operation reads: ``native``, its ``lanes``, and ``value`` (L, *shape), what is read of them.

    ``wide``: its last rounding was to float32. The others are known of the factors of a product: ``low``, the 16-bit
    dtype that it has or was converted from; ``source``, that of the numbers that it was computed from; ``codes``, it
    was integers once; ``eighth``, it may go to a GPU's tensor cores as float8.
    """

    native: Tensor
    lanes: Lanes
    value: Tensor
    wide: bool = False
    low: torch.dtype | None = None
    source: torch.dtype | None = None
    codes: bool = False
    eighth: bool = False

    @property
    def single(self) -> bool:
        """Whether nothing was rounded yet."""
        return self.value is self.lanes.raw

    @property
    def loose(self) -> bool:
        """Whether a kernel may leave the last rounding out: it need not round to float32."""
        return self.wide and not self.single

    def mixed(self, way: int = 1, ways: int = 2) -> Tensor:
        """What is read, but every ``ways``-th lane from ``way`` on (never the oracle) before the last rounding."""
        raw, width = self.lanes.raw, max(self.lanes.raw.shape[0], self.value.shape[0])
        found = self.value.expand(width, *self.value.shape[1:]).clone()
        found[way::ways] = raw.expand_as(found)[way::ways]
        return found

    @property
    def unrounded(self) -> Tensor:
        """It as a difference with a reduction of itself may read it: in half of the lanes not yet rounded."""
        return self.mixed() if self.loose else self.value

    @property
    def again(self) -> Tensor:
        """It as a kernel that computes it a second time may have it then."""
        return rolled(self.mixed()) if self.loose else self.value
