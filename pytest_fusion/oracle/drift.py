"""Sums of equal terms round the same way in step after step, where those of different terms walk at random.

While the partial sum stays between two powers of two, adding ``t`` errs by what ``t`` misses the grid there by: the
same for the same ``t``. After 57 equal terms, one added after the other, a sum was off by 14 units; random errors leave
2.5. Products of equal factors drift too, once they are multiplied in a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Of two terms the sum is rounded once.
_TERMS = 3
# One term in so many that equals the one before it shows that terms repeat.
_SHARE = 8
# Powers of two that partial sums pass through last, and those of the partial sums of as many as 2^5 blocks.
_OCTAVES = 6


def drift(terms: Tensor, total: Tensor, dims: Sequence[int], unit: float) -> Tensor | None:
    """How far the sum of ``terms`` over ``dims`` may be off because they repeat; ``None`` where they do not.

    Both are the oracle's; ``total``, of the result's shape, has kept its dims.
    """
    repeats = _repeats(terms, dims)
    if repeats is None:
        return None
    worst = torch.zeros_like(total)
    for octave in range(_OCTAVES):
        worst = torch.maximum(worst, _missed(terms, _grid(total, unit, octave)).sum(list(dims), True).abs())
    return _finite(worst, repeats)


def running_drift(terms: Tensor, total: Tensor, steps: Tensor, dim: int, unit: float) -> Tensor | None:
    """The same of each prefix along ``dim``, as if all its terms were the last one; ``steps`` counts them."""
    repeats = _repeats(terms, [dim])
    if repeats is None:
        return None
    return _finite(_missed(terms, _grid(total, unit, 0)).abs() * steps, repeats.expand_as(terms))


def factor_drift(factors: Tensor, total: Tensor, dim: int, unit: float, *, running: bool = False) -> Tensor | None:
    """The same of the product of ``factors`` along ``dim``, or of each prefix where it is ``running``.

    A tree squares what it has of equal factors, and all nodes of one of its levels make the same mistake: honest scans
    of 51 equal factors were off by 24 units in the last element and refused, where random roundings leave 2. Powers of
    two multiply without any.
    """
    repeats = _repeats(factors.abs(), [dim])
    if repeats is None:
        return None
    rounds = (torch.frexp(factors).mantissa.abs() != 0.5).to(factors.dtype)
    steps = rounds.cumsum(dim) if running else rounds.sum(dim, True)
    return _finite(total.abs() * steps * unit, repeats.expand_as(steps))


def product_drift(a: Tensor, b: Tensor, total: Tensor, unit: float) -> Tensor | None:
    """The same of ``a @ b`` (..., M, K) and (..., K, N), where a row and a column are constant."""
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
    """How many roundings that are independent an accumulator of ``a @ b`` has as much error of.

    K, or its square where all K of some row and of some column are equal.
    """
    terms = int(a.shape[-1])
    return terms if _constant(a, b) is None else terms * terms


def _constant(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Bool (..., M) and (..., N): the constant rows and columns; ``None`` where either has none."""
    # Two columns rule out a constant row in nearly all products, without reading the operands whole.
    if a.shape[-1] < _TERMS or not bool((a[..., 0] == a[..., 1]).any() and (b[..., 0, :] == b[..., 1, :]).any()):
        return None
    rows, columns = (a == a[..., :1]).all(-1), (b == b[..., :1, :]).all(-2)
    return (rows, columns) if bool(rows.any()) and bool(columns.any()) else None


def _repeats(terms: Tensor, dims: Sequence[int]) -> Tensor | None:
    """Bool, with reduced dims of size 1: whether terms repeat. ``None`` if they do nowhere."""
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
