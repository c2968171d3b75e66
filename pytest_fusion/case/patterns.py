"""What independent draws never hold and callers pass: certainties. Each in some tensors, as the seed decides."""

from __future__ import annotations

import math

import torch

from pytest_fusion.case import numbers


def rows_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One element for each row of a tensor of at least one dimension."""
    return (*shape[:-1], 1)


def probabilities(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    """Rows that add up to one, float64; in every other tensor three rows of four are unlike a softmax of logits alike.

    One has all at one place, as a label has; one has zeros, which have no logarithm; one elements down to 2^-40, just
    below a clamp at 1e-12, or to 2^-12 in float16, where less is subnormal.
    """
    v = numbers.uniform(shape, seed, device) + 2.0**-10
    if not shape or not shape[-1]:
        return v / v
    if not numbers.mix(seed, "certain") % 2:
        width, rows = shape[-1], rows_of(shape)
        row = torch.arange(math.prod(rows), device=device).reshape(rows) + numbers.mix(seed, "kind") % 4
        kept = numbers.uniform(rows, numbers.mix(seed, "kept"), device).mul(width).long()
        rest = torch.arange(width, device=device) != kept
        some = rest & (numbers.uniform(shape, numbers.mix(seed, "some"), device) < 0.5)
        least = torch.finfo(dtype).smallest_normal if dtype.is_floating_point else 0.5
        depth = min(40.0, -math.log2(least) - 2)
        # Whole exponents: those of any other number differ between devices in their last bit.
        small = torch.exp2(-numbers.uniform(shape, numbers.mix(seed, "small"), device).mul(depth + 1).floor())
        v = torch.where((row % 4 == 1) & rest, 0.0, v)
        v = torch.where((row % 4 == 2) & some, 0.0, v)
        v = torch.where((row % 4 == 3) & some, v * small, v)
    return v / v.sum(-1, keepdim=True)
