"""Error statistics of one or many results against the same exact value."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_fusion.oracle.rounding import U32
from pytest_fusion.oracle.tolerance.spread import Deviation

# Below this many elements an average says no more than the worst element does.
ENOUGH = 16
# From here on the share of elements that went to another neighbour is worth counting.
MANY = 64


@dataclass(slots=True)
class Statistics:
    """Per result (B): in units of the granted deviation ``max``, ``rms``, worst ``row`` and ``col`` rms.

    ``scale`` is the relative error common to all elements (the matched filter ``sum(y d / s^2) / sum(y^2 / s^2)`` for
    an eps, a divisor or a tail gone wrong), ``flip`` what one element's last bit is worth in it. ``row`` and ``col``
    are None where the shape has too few. ``moved``, for 16-bit outputs, is the share of elements that are not what
    rounding the exact value, give or take six deviations of the arithmetic before it, results in.
    """

    max: Tensor
    rms: Tensor
    row: Tensor | None
    col: Tensor | None
    scale: Tensor
    flip: Tensor
    moved: Tensor | None

    def named(self) -> dict[str, Tensor]:
        """The statistics that are compared by size, without ``scale``."""
        found = {"max": self.max, "rms": self.rms, "row": self.row, "col": self.col, "moved": self.moved}
        return {name: value for name, value in found.items() if value is not None}


def statistics_of(
    error: Tensor,
    deviation: Deviation,
    centre: Tensor,
    step: Tensor,
    shape: tuple[int, ...],
    used: Tensor | None,
    dtype: torch.dtype,
) -> Statistics:
    """Statistics of absolute errors (B, N) of outputs of ``dtype``; ``used`` (B or 1, N) masks elements."""
    if used is not None:
        error = torch.where(used, error, 0.0)
        centre = torch.where(used, centre, 0.0)
    score = error / deviation.mean
    worst = (error / deviation.single).abs_().amax(-1)
    square = score.square()
    pull = centre / deviation.mean
    power = pull.square().sum(-1)
    some = power > 0
    power = torch.where(some, power, 1.0)
    scale = torch.where(some, (pull * score).sum(-1) / power, 0.0)
    flip = torch.where(some, (pull / deviation.mean).abs_().mul_(step).amax(-1) / power, 0.0)
    count = error.shape[-1] if used is None else used.sum(-1).clamp_min(1)
    row, col = _slices(square, shape, used)
    moved = None
    if dtype.itemsize == 2 and error.shape[-1] >= MANY:
        before = (deviation.mean.square() - step.square() / 12).clamp_min(0) + (4 * U32 * centre).square()
        excess = error.abs() - step / 2
        moved = (excess > 6 * before.sqrt()).to(error.dtype).sum(-1) / count
    return Statistics(worst, (square.sum(-1) / count).sqrt(), row, col, scale, flip, moved)


def repetition(centre: Tensor, deviation: Tensor) -> float:
    """How much wider ``scale`` scatters because equal elements are equally wrong; 1 where all ``centre`` differ.

    An elementwise kernel makes the same error wherever it meets the same input, and 16-bit inputs repeat: 2^17 of them
    are a few thousand different ones. With unit scores that are one within a group of equal exact values the variance
    of the matched filter grows from ``sum(pull^2)`` to ``sum over groups of (sum of pull)^2``, over the same power.
    """
    finite = torch.isfinite(centre)
    pull = torch.where(finite, centre / deviation, 0.0)
    power = float(pull.square().sum())
    if not power:
        return 1.0
    values, group = torch.unique(centre[finite], return_inverse=True)
    together = torch.zeros_like(values).index_add_(0, group, pull[finite])
    return max(1.0, math.sqrt(float(together.square().sum()) / power))


def common_bias(centre: Tensor, deviation: Tensor, step: Tensor) -> float:
    """The part of ``scale`` due to roundings in one direction, as to the same neighbour of 1 in ``1 - (x / |x|)^2``.

    They happen in elements that are small differences: rounding to nearest errs alike in all of them, by up to half a
    deviation, and no number of elements averages that away. Values of 64 deviations and more have mixed digits.
    """
    before = (deviation.square() - step.square() / 12).clamp_min((1e-6 * step).square()).sqrt()
    pull = torch.where(torch.isfinite(centre), (centre / before).abs(), 0.0)
    power = float(pull.square().sum())
    return float(torch.where(pull < 64, pull, 0.0).sum()) / (2 * power) if power else 0.0


def _slices(square: Tensor, shape: tuple[int, ...], used: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if len(shape) < 2:
        return None, None
    columns = shape[-1]
    rows = square.shape[-1] // columns
    table = square.reshape(square.shape[0], rows, columns)
    row = col = None
    if columns >= 8 and rows > 1:
        row = _rms(table, used, -1).amax(-1)
    if rows >= 8 and columns > 1:
        col = _rms(table, used, -2).amax(-1)
    return row, col


def _rms(table: Tensor, used: Tensor | None, dim: int) -> Tensor:
    if used is None:
        return table.mean(dim).sqrt()
    # Half of the slice's length at least: the few usable elements of a slice do not make an average.
    count = used.reshape(-1, *table.shape[1:]).sum(dim).clamp_min(max(table.shape[dim] // 2, 1))
    return (table.sum(dim) / count).sqrt()
