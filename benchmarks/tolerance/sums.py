"""The ways in which honest and dishonest kernels add things up."""

from __future__ import annotations

import torch
from torch import Tensor


def low_precision(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an accumulator that was not widened."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def strict_sum(x: Tensor) -> Tensor:
    """A strictly sequential float32 sum over the last dim."""
    total = torch.zeros(x.shape[:-1])
    for column in x.unbind(-1):
        total = total + column
    return total


def blocked_sum(x: Tensor, stored: torch.dtype | None = None, block: int = 16) -> Tensor:
    """Blocks of the last dim added to a running sum, which is kept in ``stored`` between blocks."""
    total = torch.zeros(x.shape[:-1])
    for part in torch.split(x, block, -1):
        total = total + part.sum(-1)
        if stored is not None:
            total = total.to(stored).float()
    return total


def online_sum_of_exponentials(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Running maximum and rescaled sum of exponentials of float32 rows, both (rows, 1)."""
    top = torch.full((x.shape[0], 1), -torch.inf)
    total = torch.zeros(x.shape[0], 1)
    for part in torch.split(x, block, -1):
        higher = torch.maximum(top, part.amax(-1, True))
        total = total * (top - higher).exp() + (part - higher).exp().sum(-1, True)
        top = higher
    return top, total


def welford(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations of rows by merging blocks."""
    mean, squares, seen = torch.zeros(x.shape[0]), torch.zeros(x.shape[0]), 0
    for part in torch.split(x, block, -1):
        size = part.shape[-1]
        own = part.mean(-1)
        step, total = own - mean, seen + size
        squares = squares + (part - own[:, None]).square().sum(-1) + step * step * (seen * size / total)
        mean, seen = mean + step * (size / total), total
    return mean, squares


def blocked_product(
    a: Tensor, b: Tensor, block: int, stored: torch.dtype | None = None, backwards: bool = False
) -> Tensor:
    """``a @ b`` over blocks of K, the accumulator kept in ``stored`` between blocks."""
    total = torch.zeros(a.shape[0], b.shape[1])
    starts = list(range(0, a.shape[1], block))
    for start in reversed(starts) if backwards else starts:
        total = total + a[:, start : start + block] @ b[start : start + block]
        if stored is not None:
            total = total.to(stored).float()
    return total


def as_tf32(x: Tensor) -> Tensor:
    """float32 values with 10 bits of fraction, rounded to nearest."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
