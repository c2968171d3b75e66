"""Where errors are in the output and how large: per axis, as text, and as cells of a picture."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from pytest_fusion.diagnosis.text.heat import SCALE
from pytest_fusion.oracle import OutputLanes
from pytest_fusion.oracle.tolerance import excess_by
from pytest_fusion.spec.promises import Tolerance

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
    elif count and all(text == "every index" for text in axes):
        where = f"{count} of {total} elements, scattered over every axis"
    elif not count:
        where = "no single element is beyond what one may be off; all of them together are"
    return {"count": count, "total": total, "axes": axes, "where": where}


def cells(share: torch.Tensor, side: int = 48) -> list[list[float]]:
    """The largest of ``share`` in each cell of a picture at most ``side`` square: rows by the last axis.

    Three significant digits: the picture is on a logarithmic scale. Infinity stays infinity.
    """
    if share.numel() == 0:
        return []
    flat = share.detach().to("cpu", torch.float64).reshape(-1, share.shape[-1] if share.dim() else 1)
    size = (min(side, flat.shape[0]), min(side, flat.shape[1]))
    pooled = torch.nn.functional.adaptive_max_pool2d(flat[None, None], size)[0, 0]
    return [[float(f"{float(value):.3g}") for value in row] for row in pooled]


def marked(name: str, mask: torch.Tensor) -> dict[str, Any]:
    """As :func:`picture`, for elements with wrong bits, which have no tolerance."""
    return {**_drawn(torch.where(mask, torch.inf, 0.0)), "caption": f"elements of {name} that differ"}


def picture(
    evidence: tuple[str, torch.Tensor, OutputLanes | torch.Tensor], tolerance: str | Tolerance
) -> dict[str, Any]:
    """Where and how far off a failing output is, in JSON types (infinity apart).

    ``evidence``: the output's name, the kernel's tensor, and the reference's rounding runs, or its tensor for a fixed
    ``tolerance``. Adds to :func:`error_map` ``cells`` (rows of the largest error in each cell over one element's
    tolerance), ``scale`` (their unit), ``shape`` (rows and columns of the output as a matrix) and ``caption``.
    """
    name, candidate, right = evidence
    return {**_drawn(excess_by(candidate, right, tolerance)), "caption": f"errors of {name}"}


def _drawn(share: torch.Tensor) -> dict[str, Any]:
    columns = share.shape[-1] if share.dim() else 1
    shape = [share.numel() // columns if columns else 0, columns]
    return {**error_map(share > 1), "cells": cells(share), "scale": SCALE, "shape": shape}
