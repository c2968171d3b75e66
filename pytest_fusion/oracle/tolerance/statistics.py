"""Error statistics of one or many results against the same exact value."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_fusion.oracle.rounding import U32
from pytest_fusion.oracle.tolerance.spread import Deviation, Spread

# Below this many elements an average shows no more than the worst element.
ENOUGH = 16
# From here on the share of elements at another neighbour is counted.
MANY = 64


def statistics_of(
    error: Tensor, deviation: Deviation, spread: Spread, shape: tuple[int, ...], used: Tensor | None = None
) -> dict[str, Tensor]:
    """Statistics of absolute errors (B, N), each (B); ``used`` (B or 1, N) masks elements.

    In units of the granted deviation: ``max``, ``rms``, and the rms of the worst ``row``, where the shape has enough.
    ``moved``, for 16-bit outputs, is the share of elements that no rounding of the exact value, plus or minus six
    deviations of the arithmetic before it, gives.
    """
    if used is not None:
        error = torch.where(used, error, 0.0)
    count = error.shape[-1] if used is None else used.sum(-1).clamp_min(1)
    square = (error / deviation.mean).square_()
    found = {"max": (error / deviation.single).abs_().amax(-1), "rms": (square.sum(-1) / count).sqrt()}
    if len(shape) > 1 and 8 <= shape[-1] < error.shape[-1]:
        found["row"] = _worst_row(square, shape, used)
    if spread.dtype.itemsize == 2 and error.shape[-1] >= MANY:
        half = spread.step / 2
        before = (deviation.mean.square() - half.square() / 3).clamp_min(0) + (4 * U32 * spread.centre).square()
        found["moved"] = (error.abs() - half > 6 * before.sqrt()).to(error.dtype).sum(-1) / count
    return found


def _worst_row(square: Tensor, shape: tuple[int, ...], used: Tensor | None) -> Tensor:
    table = square.reshape(square.shape[0], -1, shape[-1])
    if used is None:
        return table.mean(-1).sqrt().amax(-1)
    # At least half of the row's length: few usable elements make no average.
    count = used.reshape(-1, *table.shape[1:]).sum(-1).clamp_min(shape[-1] // 2)
    return (table.sum(-1) / count).sqrt().amax(-1)
