"""Sums, means, norms, scans and scattered additions, rounded like a float accumulator in any order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.cancellation import at_operands_size
from pytest_fusion.oracle.drift import drift, factor_drift, running_drift
from pytest_fusion.oracle.operand import Operand
from pytest_fusion.oracle.ops.movement import placed
from pytest_fusion.oracle.ops.rule_registry import (
    Op,
    Rule,
    as_float,
    computed,
    count,
    dims_from_end,
    each,
    from_end,
    named,
    rank,
)
from pytest_fusion.oracle.rounding import unit

aten = torch.ops.aten


def total(op: Op, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """The sum of ``x`` over ``dims`` (from the end) with accumulator noise."""
    if not dims:
        return x
    first, whole = x[0], x.sum(dims, True)
    value = op.accumulated(whole, first.square().sum(dims, True), count(x, dims), lambda: first.abs().sum(dims, True))
    value = op.noise.off(value, drift(first, whole[0], dims, op.unit))
    return value if keepdim else value.squeeze(dims)


def average(op: Op, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    terms = count(x, dims) if dims else 1
    value = total(op, x, dims, keepdim) / terms
    return value if terms and math.log2(terms).is_integer() else op.relative(value, 1)


@computed("sum nansum")
def _sum(op: Op, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x, dims = as_float(x), dims_from_end(dim, rank(x))
    return total(op, torch.nan_to_num(x, nan=0.0) if op.name == "nansum" else x, dims, keepdim)


# The largest count for which an update of a mean rounds more coarsely than a sum in any order.
_FEW = 8


@computed("mean")
def _mean(op: Op, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x, dims = as_float(x), dims_from_end(dim, rank(x))
    mean = average(op, x, dims, keepdim)
    return _updated(op, mean, x, dims, keepdim) if dims else mean


def _updated(op: Op, mean: Tensor, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """A mean by ``mean += (x - mean) / count``: every other lane has NaN where a value makes it infinite.

    Welford's and Chan's updates meet ``inf - inf`` there, ATen's on the CPU too. Means of squares are never computed
    that way; squares are not negative, and are computed, so that lanes differ.

    For two values the update rounds their difference, and a sum their sum: for 8 and -8 twice as coarse as any order.
    Honest moments were refused in 3 of 12 calls of 31 rows of two, and for 400 rows in 12 of 40 with three values, in 5
    with four. For more values the noise of the order covers it.
    """
    if 2 <= (terms := count(x, dims)) <= _FEW:
        apart = (x[0].amax(dims, keepdim) - x[0].amin(dims, keepdim)) * (op.unit / terms)
        mean = op.noise.off(mean, torch.where(torch.isfinite(apart), apart, 0.0))
    lost = torch.isinf(mean[0])
    if not bool(lost.any()):
        return mean
    least = x[0].amin(dims, keepdim)
    lost &= torch.isinf(x[0]).sum(dims, keepdim).bool() & ((least < 0) | torch.isinf(least) | (x.shape[0] == 1))
    out = op.noise.spread(mean)
    out[1::2] = torch.where(lost, math.nan, out[1::2])
    return out


def moments(op: Op, x: Tensor, dims: list[int], read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, centred values (of ``x`` as ``read``) and mean square, with their roundings; reduced dims have size 1."""
    mean = _updated(op, average(op, x, dims, True), x, dims, True)
    centred = at_operands_size(op.noise, op.relative(read - mean, 1), x[0].abs(), op.unit)
    return mean, centred, average(op, centred.square(), dims, True)


@computed("var std var_mean std_mean", operands=True)
def _var(op: Op, x: Operand, *args: Any, **kwargs: Any) -> Any:
    given = named(op.function, (x, *args), kwargs)
    correction = given.get("correction", float(given.get("unbiased", True)))
    dims = dims_from_end(given.get("dim"), rank(x.value))
    terms = count(x.value, dims) if dims else 1
    mean, _, second = moments(op, x.value, dims, x.unrounded)
    free = terms - (1 if correction is None else correction)
    value = op.relative(second * (terms / free if free > 0 else math.nan), 1)
    if op.name.startswith("std"):
        value = op.relative(torch.sqrt(value), 2)
    found = [v if given.get("keepdim") or not dims else v.squeeze(dims) for v in (value, mean)]
    return found if op.name.endswith("mean") else found[0]


@computed("linalg_vector_norm norm")
def _norm(op: Op, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x, power = as_float(x), 2.0 if ord is None else float(ord)
    dims = dims_from_end(dim, rank(x))
    if not dims:
        return x.abs() if power else (x != 0).to(x.dtype)
    if power == 0 or math.isinf(power):
        return torch.linalg.vector_norm(x, power, dims, keepdim)  # type: ignore[no-any-return]
    if power == 1:
        return total(op, x.abs(), dims, keepdim)
    if power == 2:
        return op.relative(torch.sqrt(total(op, x.square(), dims, keepdim)), 2)
    return op.relative(total(op, op.relative(x.abs().pow(power), 4), dims, keepdim).pow(1 / power), 6)


@computed("prod")
def _prod(op: Op, x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x = as_float(x)
    if not rank(x):
        return x
    flat = x.reshape(x.shape[0], -1) if dim is None else x
    along = -1 if dim is None else from_end(dim, rank(x))
    value = flat.prod(along, True)
    moved = factor_drift(flat[0], value[0], along, op.unit)
    value = op.noise.off(op.relative(value, math.sqrt(flat.shape[along])), moved)
    return value if keepdim and dim is not None else value.squeeze(along)


def _scan(rule: Callable[[Op, Tensor, int, Tensor], Tensor]) -> Rule:
    """The rule of a scan of ``x`` along a dim (from the end); ``rule`` also gets 1..n along that, broadcastable."""

    def scan(op: Op, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
        x, along = as_float(x), from_end(dim, rank(x))
        if not rank(x) or not x.numel():
            return x
        shape = [1] * rank(x)
        shape[along] = n = x.shape[along]
        return rule(op, x, along, torch.arange(1, n + 1, dtype=x.dtype, device=x.device).reshape(shape))

    return scan


@computed("cumsum")
@_scan
def _cumsum(op: Op, x: Tensor, along: int, steps: Tensor) -> Tensor:
    first, whole = x[0], x.cumsum(along)
    value = op.accumulated(whole, first.square().cumsum(along), steps, lambda: first.abs().cumsum(along))
    return op.noise.off(value, running_drift(first, whole[0], steps, along, op.unit))


@computed("cumprod")
@_scan
def _cumprod(op: Op, x: Tensor, along: int, steps: Tensor) -> Tensor:
    out = op.noise.spread(x.cumprod(along))
    lanes = out[1:]
    lanes.add_(lanes * op.noise.normal(tuple(x.shape[1:]), x.device) * (steps.sqrt() * op.unit))
    return op.noise.off(out, factor_drift(x[0], out[0], along, op.unit, running=True))


@computed("logcumsumexp")
@_scan
def _logcumsumexp(op: Op, x: Tensor, along: int, steps: Tensor) -> Tensor:
    out = op.absolute(op.relative(torch.logcumsumexp(x, along), 3), 4)
    # Each step rounds the running exponential sum; the errors walk at random.
    out[1:].add_(op.noise.normal(tuple(x.shape[1:]), x.device) * (steps.sqrt() * (op.unit / 3)))
    return out


def _scattered(op: Op, add: Callable[[Tensor, Tensor], Tensor], into: Tensor, values: Tensor) -> Tensor:
    """``add(into, values)`` for additions at given places, with as many roundings as each place has terms."""
    into, values = as_float(into), as_float(values)
    value, first_into, first = add(into, values), into[:1], values[:1]
    squares = add(first_into.square(), first.square())[0]
    terms = add((first_into != 0).to(first.dtype), torch.ones_like(first))[0]
    # Atomic additions round each partial sum to the stored dtype (kind E), or to float32 (F).
    stored = op.unit if op.noise.kind == "F" else unit(op.outs[0].dtype)
    noisy = op.accumulated(value, squares, terms, unit_roundoff=stored)
    return torch.where(terms > 1, noisy, value)


@computed("index_add")
def _index_add(op: Op, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    return _scattered(op, lambda a, b: each(aten.index_add, a, dim, index, b), x, source * alpha)


@computed("scatter_add scatter_reduce")
def _scatter_add(
    op: Op, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str = "sum", **kwargs: Any
) -> Tensor:
    def add(a: Tensor, b: Tensor) -> Tensor:
        return each(aten.scatter_reduce, a, dim, index, b, reduce, **kwargs)  # type: ignore[no-any-return]

    if reduce == "sum":
        return _scattered(op, add, x, source)
    value = add(as_float(x), as_float(source))
    return value if reduce in ("amax", "amin") else op.relative(value, 8)


@computed("index_put _index_put_impl _unsafe_index_put")
def _index_put(
    op: Op, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *_: Any
) -> Tensor:
    chosen, floating = placed(op, indices), op.outs[0].is_floating_point()
    x, values = (as_float(x), as_float(values)) if floating else (x, values)
    if not (accumulate and floating):
        return each(aten.index_put, x, chosen, values, accumulate)  # type: ignore[no-any-return]
    places = aten.index(x[0], [None if i is None else i[0] for i in chosen])
    wide = values.reshape(values.shape[0], *(1,) * (places.dim() - rank(values)), *values.shape[1:])
    wide = wide.expand(values.shape[0], *places.shape)
    return _scattered(op, lambda a, b: each(aten.index_put, a, chosen, b, True), x, wide)


@computed("embedding_dense_backward")
def _embedding_backward(op: Op, grad: Tensor, index: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
    def add(a: Tensor, b: Tensor) -> Tensor:
        return a + each(aten.embedding_dense_backward, b, index, rows, padding, False)  # type: ignore[no-any-return]

    grad = as_float(grad)
    into = grad.new_zeros((1, rows, grad.shape[-1]))
    value = _scattered(op, add, into, grad)
    if not by_frequency:
        return value
    # ATen scales every term by a rounded reciprocal; one division at the end is as good.
    return op.relative(value / add(into, torch.ones_like(grad[:1])).clamp_min(1), 2)


@computed("bincount")
def _bincount(op: Op, index: Tensor, weights: Tensor, minlength: int = 0) -> Tensor:
    def add(a: Tensor, b: Tensor) -> Tensor:
        return a + each(aten.bincount, index, b, minlength)  # type: ignore[no-any-return]

    weights = as_float(weights)
    return _scattered(op, add, weights.new_zeros((1, *op.outs[0].shape)), weights)
