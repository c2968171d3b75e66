"""Sums of equal terms round the same way at each step, where those of different terms walk at random.

While the partial sum is between two powers of two, adding ``t`` errs by the distance of ``t`` from the grid. After 57
equal terms, added in sequence, a sum was off by 14 units; random errors give 2.5. Products of equal factors drift too,
in a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A sum of two terms is rounded once.
_TERMS = 3
# Terms repeat if one in eight equals the one before it.
_SHARE = 8
# The last powers of two that partial sums pass, and those of the partial sums of up to 2^5 blocks.
_OCTAVES = 6


def drift(terms: Tensor, total: Tensor, dims: Sequence[int], unit: float) -> Tensor | None:
    """How far the sum of ``terms`` over ``dims`` may be off because terms repeat; ``None`` where they do not.

    Both are the oracle's; ``total`` keeps the reduced dims.
    """
    repeats = _repeats(terms, dims)
    if repeats is None:
        return None
    worst = torch.zeros_like(total)
    for octave in range(_OCTAVES):
        worst = torch.maximum(worst, _missed(terms, _grid(total, unit, octave)).sum(list(dims), True).abs())
    return _finite(worst, repeats)


def running_drift(terms: Tensor, total: Tensor, steps: Tensor, dim: int, unit: float) -> Tensor | None:
    """`drift` of each prefix along ``dim``, as if all its terms equalled the last; ``steps`` counts them."""
    repeats = _repeats(terms, [dim])
    if repeats is None:
        return None
    return _finite(_missed(terms, _grid(total, unit, 0)).abs() * steps, repeats.expand_as(terms))


def factor_drift(factors: Tensor, total: Tensor, dim: int, unit: float, *, running: bool = False) -> Tensor | None:
    """`drift` of the product of ``factors`` along ``dim``, or if ``running`` of each prefix."""
    # A tree squares products of equal factors, with the same error in all nodes of a level: correct scans of 51 equal
    # factors were off by 24 units and refused, where random roundings give 2. Powers of two multiply exactly.
    repeats = _repeats(factors.abs(), [dim])
    if repeats is None:
        return None
    rounds = (torch.frexp(factors).mantissa.abs() != 0.5).to(factors.dtype)
    steps = rounds.cumsum(dim) if running else rounds.sum(dim, True)
    return _finite(total.abs() * steps * unit, repeats.expand_as(steps))


def product_drift(a: Tensor, b: Tensor, total: Tensor, unit: float) -> Tensor | None:
    """`drift` of ``a @ b`` (..., M, K) and (..., K, N) where a row and a column are constant."""
    found, terms = _constant(a, b), a.shape[-1]
    if found is None:
        return None
    rows, columns = found
    worst = torch.zeros_like(total)
    for octave in range(_OCTAVES):
        missed = _missed(a[..., :1] * b[..., :1, :], _grid(total, unit, octave))
        worst = torch.maximum(worst, missed.abs() * terms)
    return _finite(worst, rows[..., :, None] & columns[..., None, :])


def steps(a: Tensor, b: Tensor) -> int:
    """How many independent roundings the error of ``a @ b`` equals: K, or K^2 for a constant row and column."""
    terms = int(a.shape[-1])
    return terms if _constant(a, b) is None else terms * terms


def _constant(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Bool (..., M) and (..., N): the constant rows and columns; ``None`` where either has none."""
    # Two columns rule out a constant row in nearly all products without reading the operands in full.
    if a.shape[-1] < _TERMS or not bool((a[..., 0] == a[..., 1]).any() and (b[..., 0, :] == b[..., 1, :]).any()):
        return None
    rows, columns = (a == a[..., :1]).all(-1), (b == b[..., :1, :]).all(-2)
    return (rows, columns) if bool(rows.any()) and bool(columns.any()) else None


def _repeats(terms: Tensor, dims: Sequence[int]) -> Tensor | None:
    """Bool, with reduced dims of size 1: whether terms repeat. ``None`` if none do."""
    along = dims[-1]
    size = terms.shape[along]
    if size < _TERMS:
        return None
    same = terms.narrow(along, 1, size - 1) == terms.narrow(along, 0, size - 1)
    share = same.to(torch.float32).mean(list(dims), True)
    repeats = share * _SHARE >= 1
    return repeats if bool(repeats.any()) else None


def _grid(total: Tensor, unit: float, octave: int) -> Tensor:
    """Distance of neighbours at ``total`` over ``2**octave``."""
    _, exponent = torch.frexp(total)
    return torch.ldexp(torch.full_like(total, unit), exponent - octave)


def _missed(terms: Tensor, grid: Tensor) -> Tensor:
    return torch.round(terms / grid) * grid - terms


def _finite(size: Tensor, where: Tensor) -> Tensor:
    return torch.where(where & torch.isfinite(size), size, 0.0)
