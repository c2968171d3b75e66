"""Where in the output the errors sit: per axis, in words and as data."""

from __future__ import annotations

import itertools
from typing import Any

import torch

_MAX_LISTED = 6


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    """Consecutive indices as inclusive ranges."""
    found: list[tuple[int, int]] = []
    for i in indices:
        if found and i == found[-1][1] + 1:
            found[-1] = (found[-1][0], i)
        else:
            found.append((i, i))
    return found


def _describe_axis(indices: list[int], size: int) -> str:
    if len(indices) == size:
        return "every index"
    runs = _runs(indices)
    if len(indices) == 1:
        i = indices[0]
        place = " (the first)" if i == 0 else " (the last)" if i == size - 1 else ""
        return f"index {i} of {size}{place}"
    if len(runs) == 1:
        low, high = runs[0]
        place = " (the start)" if low == 0 else " (the end)" if high == size - 1 else ""
        return f"indices {low}..{high} of {size}{place}"
    steps = {b - a for a, b in itertools.pairwise(indices)}
    if len(steps) == 1 and len(indices) > 2:
        return f"one index in {steps.pop()} from {indices[0]} on, of {size}"
    listed = ", ".join(f"{a}" if a == b else f"{a}..{b}" for a, b in runs[:_MAX_LISTED])
    return f"{len(indices)} of {size} indices ({listed}{', ...' if len(runs) > _MAX_LISTED else ''})"


def error_map(mask: torch.Tensor) -> dict[str, Any]:
    """``{"count", "total", "axes": [text per axis], "where": one sentence}`` of a boolean mask of wrong elements."""
    count, total = int(mask.sum()), mask.numel()
    axes: list[str] = []
    for axis in range(mask.dim()):
        others = [i for i in range(mask.dim()) if i != axis]
        hit = mask.amax(dim=others) if others else mask
        axes.append(_describe_axis([int(i) for i in hit.nonzero()[:, 0]], mask.shape[axis]))
    where = "; ".join(f"axis {i}: {text}" for i, text in enumerate(axes)) or "the only element"
    if count == total:
        where = "everywhere"
    return {"count": count, "total": total, "axes": axes, "where": where}


def cells(mask: torch.Tensor, side: int = 48) -> list[list[float]]:
    """The share of wrong elements per cell of a picture at most ``side`` square: rows by the last axis."""
    if mask.numel() == 0:
        return []
    flat = mask.detach().to("cpu", torch.float64).reshape(-1, mask.shape[-1] if mask.dim() else 1)
    picture = flat[None, None]
    size = (min(side, flat.shape[0]), min(side, flat.shape[1]))
    pooled = torch.nn.functional.adaptive_avg_pool2d(picture, size)[0, 0]
    return [[round(float(value), 4) for value in row] for row in pooled]
