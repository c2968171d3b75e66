"""What an operation reads: each tensor with its lanes and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_store import Lanes


def rolled(value: Tensor) -> Tensor:
    """``value`` (L, *shape) with every second lane, never the oracle, taken from another lane."""
    found = value.clone()
    found[1::2] = found[1::2].roll(1, 0)
    return found


@dataclass(slots=True, eq=False)
class Operand:
    """A tensor that an operation reads: ``native``, its ``lanes``, and the ``value`` (L, *shape) that is read.

    ``wide``: its last rounding was to float32. For factors of a product: ``low``, the 16-bit dtype that it has or was
    converted from; ``source``, one that it was computed from; ``codes``, it was integers once; ``eighth``, it may go to
    tensor cores as float8.
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
        """Whether a kernel may omit the last rounding, which was to float32."""
        return self.wide and not self.single

    def mixed(self, way: int = 1, ways: int = 2) -> Tensor:
        """``value`` with every ``ways``-th lane from ``way`` on, never the oracle, before the last rounding."""
        raw, width = self.lanes.raw, max(self.lanes.raw.shape[0], self.value.shape[0])
        found = self.value.expand(width, *self.value.shape[1:]).clone()
        found[way::ways] = raw.expand_as(found)[way::ways]
        return found

    @property
    def unrounded(self) -> Tensor:
        """``value`` for a difference with its own reduction: in half of the lanes not yet rounded."""
        return self.mixed() if self.loose else self.value

    @property
    def again(self) -> Tensor:
        """``value`` as a kernel may compute it a second time."""
        return rolled(self.mixed()) if self.loose else self.value
