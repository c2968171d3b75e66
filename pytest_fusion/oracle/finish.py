"""A computed value as lanes: before and after it is rounded to the dtype of what torch returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_store import Lanes
from pytest_fusion.oracle.rounding import GRIDS, D, Noise


def finished(noise: Noise, value: Tensor, native: Any, terms: int = 1, exact: Tensor | bool = False) -> Lanes:
    """A computed value, rounded to the dtype of its native counterpart (kind F: to float32 at most).

    Where it is ``exact`` float64 holds it.
    """
    dtype = native.dtype
    if dtype.is_complex:
        pairs = torch.view_as_real(value.resolve_conj())
        stored = noise.rounded(pairs, torch.float32 if dtype == torch.complex64 else D)
        return Lanes(value, torch.view_as_complex(stored), terms)
    if dtype not in GRIDS:
        if dtype.is_floating_point:
            return Lanes(value, value.float().to(dtype).to(D), terms)
        # isfinite is a product of two bools, which the rule of products has in float64.
        value = value.to(dtype)
        return Lanes(value, value)
    if dtype == D:
        noisy = noise.rounded(value, dtype)
        if exact is not False:
            noisy = torch.where(torch.as_tensor(exact, device=value.device), value, noisy)
        return Lanes(noisy, noisy, terms)
    grid = torch.float32 if noise.kind == "F" else dtype
    return Lanes(value, noise.rounded(value, grid), terms)
