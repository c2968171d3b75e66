"""A summary of a tensor's values: eleven numbers, computed on its device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Elements that are read, evenly spaced: a few milliseconds on a CPU, and 20 MiB on a device for a moment.
MOST = 1 << 18
FIELDS = ("seen", "finite", "zeros", "nan", "inf", "ninf", "low", "high", "mean", "rms", "absolute")
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@torch.no_grad()
def summary_of(tensor: Tensor) -> Tensor | None:
    """A float64 row of ``FIELDS`` on the tensor's device; ``None`` for a tensor without elements.

    Counts are of the elements ``seen``; ``low`` to ``absolute`` (the mean magnitude) are of the finite ones among them.
    The range of integers is that of all elements. Complex numbers count as two each. Waits for no device.
    """
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.numel():
        return None
    part = _spaced(values)
    x = (part.to(torch.float32) if part.dtype.itemsize == 1 else part).to(torch.float64)
    finite = torch.isfinite(x)
    count = finite.sum()
    finite_values = torch.where(finite, x, 0.0)
    divisor = count.clamp_min(1)
    if values.dtype in _SIGNED:
        low, high = values.amin(), values.amax()
    else:
        low, high = torch.where(finite, x, math.inf).amin(), torch.where(finite, x, -math.inf).amax()
    found = (
        torch.full((), x.numel(), dtype=torch.float64, device=x.device),
        count,
        (x == 0).sum(),
        torch.isnan(x).sum(),
        (x == math.inf).sum(),
        (x == -math.inf).sum(),
        low,
        high,
        finite_values.sum() / divisor,
        (finite_values.square().sum() / divisor).sqrt(),
        finite_values.abs().sum() / divisor,
    )
    return torch.stack([one.to(torch.float64) for one in found])


def _spaced(values: Tensor) -> Tensor:
    """A view of at most about ``MOST`` elements, evenly spaced."""
    while values.numel() > MOST:
        axis = max(range(values.dim()), key=values.size)
        step = min(-(-values.numel() // MOST), values.size(axis))
        if step < 2:
            break
        values = values[(slice(None),) * axis + (slice(None, None, step),)]
    return values


def read(row: Tensor) -> dict[str, float]:
    """The numbers of a row by name, counts as shares; without a range where nothing is finite."""
    found = dict(zip(FIELDS, row.tolist(), strict=True))
    seen = found["seen"]
    shares = {name: found[name] / seen for name in ("zeros", "nan", "inf", "ninf")}
    if not found["finite"]:
        return {"seen": seen, **shares}
    numbers = {name: found[name] for name in ("low", "high", "mean", "rms", "absolute")}
    return {"seen": seen, **shares, **{name: value for name, value in numbers.items() if math.isfinite(value)}}
