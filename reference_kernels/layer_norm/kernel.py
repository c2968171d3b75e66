"""Fused layer normalisation: sum with a residual, statistics, scale and shift in one launch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._common import (
    FLOATS,
    Rows,
    RowTile,
    check_tensor,
    jit,
    placed,
    row_offset,
    row_sums,
    row_tile,
    summed,
)
from reference_kernels._norm_backward import input_gradient
from reference_kernels._powers import grouped
from reference_kernels._sums import summed_parts


def config(width: int, residual: bool = False) -> RowTile:
    """Forward tile for rows of ``width`` elements. Up to 32768 (with a residual 16384, else it spills) a row stays in
    registers, at 32 elements a thread (with a residual 16), and is read once; beyond, it is read twice in steps of
    8192, the second time from what L2 still holds: by 32 warps, so that few rows share it."""
    tile = row_tile(width, whole=16384 if residual else 32768, step=8192)
    each = 256 if tile.loop else 512 if residual else 1024
    return replace(tile, warps=max(2, min(32, tile.rows * tile.columns // each)))


@jit
def _store_normalised(
    y_row: tl.tensor,
    normalised: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    width: tl.tensor,
    weight_step: tl.tensor,
    bias_step: tl.tensor,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Scale and shift one tile and put it where the contiguous row ``y_row`` begins."""
    if HAS_WEIGHT:
        normalised *= tl.load(weight_ptr + column * weight_step, mask=column < width, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normalised += tl.load(bias_ptr + column * bias_step, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y_row + column, normalised, mask=inside)


@jit
def _merged(
    count_a: tl.tensor,
    mean_a: tl.tensor,
    rest_a: tl.tensor,
    squares_a: tl.tensor,
    count_b: tl.tensor,
    mean_b: tl.tensor,
    rest_b: tl.tensor,
    squares_b: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Chan's rule: count, mean, what its rounding left of it, and sum of squares around it, of two sets as one.

    mean(x**2) - mean**2 would keep no digit of the variance of numbers far from zero. Knuth's two-sum keeps what the
    mean rounds off.
    """
    count = count_a + count_b
    share = count_b / tl.where(count > 0, count, 1.0)
    step = (mean_b - mean_a) * share
    mean = mean_a + step
    back = mean - mean_a
    rest = rest_a + (rest_b - rest_a) * share + ((mean_a - (mean - back)) + (step - back))
    apart = (mean_b - mean_a) + (rest_b - rest_a)
    # In this order: the square may overflow where one of them is empty, and it counts for nothing.
    return count, mean, rest, squares_a + squares_b + apart * (count_a * share) * apart


@jit
def _layer_norm_kernel(
    y_ptr: tl.tensor,
    total_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    eps: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    residual_stride0: tl.tensor,
    residual_stride1: tl.tensor,
    residual_stride2: tl.tensor,
    residual_step: tl.tensor,
    weight_step: tl.tensor,
    bias_step: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LOOP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """``BLOCK_ROWS`` rows: ``y`` and ``total``, contiguous ``(rows, width)``, and ``statistics`` of ``(3, rows)`` for
    backward: the mean, what its rounding left of it, and the reciprocal root of the variance.

    The mean of numbers far from zero is off by their unit in the last place, which their small differences feel: the
    mean of what is left after subtracting it is subtracted too (Chan, Golub and LeVeque's corrected two passes).
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_inside = row < rows
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
    residual_row = residual_ptr
    if HAS_RESIDUAL:
        residual_row = residual_ptr + row_offset(
            row, size1, size2, residual_stride0, residual_stride1, residual_stride2
        )
    y_row = y_ptr + row * width
    total_row = total_ptr + row * width

    if LOOP:
        # Groups of neighbours that a thread loads at once have moments of their own, so that threads meet only when the
        # row ends; then they are merged as a group's own from tile to tile.
        group: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
        place = tl.arange(0, BLOCK_COLUMNS // group)[None, :] * group
        count = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS // group], tl.float32)
        mean = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS // group], tl.float32)
        rest = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS // group], tl.float32)
        squares = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS // group], tl.float32)
        for start in range(0, width, BLOCK_COLUMNS):
            at = start + column
            inside = row_inside & (at < width)
            wide = summed(x_row, residual_row, at, inside, x_step, residual_step, HAS_RESIDUAL, "evict_last")
            if HAS_RESIDUAL:
                tl.store(total_row + at, wide, mask=inside)
            new = tl.minimum(tl.maximum(width - start - place, 0), group).to(tl.float32)
            each = tl.where(new > 0, 1.0 / new, 0.0)
            held = grouped(inside, group)
            parts = grouped(wide, group)
            new_mean = tl.sum(parts, axis=2) * each
            parts = tl.where(held, parts - new_mean[:, :, None], 0.0)
            new_rest = tl.sum(parts, axis=2) * each
            parts = tl.where(held, parts - new_rest[:, :, None], 0.0)
            new_squares = tl.sum(parts * parts, axis=2)
            count, mean, rest, squares = _merged(count, mean, rest, squares, new, new_mean, new_rest, new_squares)
        _, mean, rest, squares = tl.reduce((count, mean, rest, squares), 1, _merged, keep_dims=True)
        scale = tl.rsqrt(squares / width + eps)
        blocks = (width + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
        for done in range(blocks):  # backwards: what was read last is nearest
            at = (blocks - 1 - done) * BLOCK_COLUMNS + column
            inside = row_inside & (at < width)
            wide = summed(x_row, residual_row, at, inside, x_step, residual_step, HAS_RESIDUAL, "evict_first")
            y = ((wide - mean) - rest) * scale
            _store_normalised(
                y_row, y, weight_ptr, bias_ptr, at, inside, width, weight_step, bias_step, HAS_WEIGHT, HAS_BIAS
            )
    else:
        inside = row_inside & (column < width)
        wide = summed(x_row, residual_row, column, inside, x_step, residual_step, HAS_RESIDUAL, "")
        if HAS_RESIDUAL:
            tl.store(total_row + column, wide, mask=inside)
        mean = tl.sum(wide, axis=1, keep_dims=True) / width
        centred = tl.where(inside, wide - mean, 0.0)
        # Both at once: the rest is so small that taking its square off costs the squares no digits.
        rest, squares = row_sums(centred, centred * centred)
        rest /= width
        scale = tl.rsqrt(tl.maximum(squares / width - rest * rest, 0.0, propagate_nan=tl.PropagateNan.ALL) + eps)
        y = (centred - rest) * scale
        _store_normalised(
            y_row, y, weight_ptr, bias_ptr, column, inside, width, weight_step, bias_step, HAS_WEIGHT, HAS_BIAS
        )
    tl.store(statistics_ptr + row, mean, mask=row_inside)
    tl.store(statistics_ptr + rows + row, rest, mask=row_inside)
    tl.store(statistics_ptr + rows + rows + row, scale, mask=row_inside)


def _forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``y``, the residual sum (``y`` again where there is none), and the statistics, float32 ``(3, rows)``."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    if x.numel() == 0:
        return y, total, _statistics(x).zero_()
    statistics = _statistics(x)
    rows = Rows.of(x, x if residual is None else residual)
    tile = config(rows.width, residual is not None)
    with placed(x.device):
        _layer_norm_kernel[(triton.cdiv(rows.count, tile.rows),)](
            y,
            total,
            statistics,
            *rows.tensors,
            x if weight is None else weight,
            x if bias is None else bias,
            eps,
            rows.count,
            rows.width,
            *rows.layout,
            1 if weight is None else weight.stride(0),
            1 if bias is None else bias.stride(0),
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            LOOP=tile.loop,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return y, total, statistics


def _statistics(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((3, math.prod(x.shape[:-1])), dtype=torch.float32, device=x.device)


@torch.library.custom_op("reference_kernels::layer_norm", mutates_args=())
def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, statistics = _forward(x, None, weight, bias, eps)
    return y, statistics


@_layer_norm.register_fake
def _(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), _statistics(x)


@torch.library.custom_op("reference_kernels::add_layer_norm", mutates_args=())
def _add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward(x, residual, weight, bias, eps)


@_add_layer_norm.register_fake
def _(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return y, total, _statistics(x)


@torch.library.custom_op("reference_kernels::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    statistics: torch.Tensor,
    sum_weight: bool,
    sum_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by ``x``, by weight and by bias; the latter two are empty where their sums are not needed."""
    sums = (sum_weight, sum_bias)
    dx, dweight, dbias = _gradients(x, weight if sum_weight else None, bias if sum_bias else None)
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    parts = input_gradient(dx, dy, x, dtotal, weight, statistics, sums)
    if any(sums):
        summed_parts(dweight, dbias, parts, sums)
    return dx, dweight, dbias


def _gradients(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight, dbias = (
        dx.new_empty(0) if each is None else torch.empty(each.shape, dtype=each.dtype, device=each.device)
        for each in (weight, bias)
    )
    return dx, dweight, dbias


@_layer_norm_backward.register_fake
def _(
    _dy: torch.Tensor,
    _dtotal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    _statistics: torch.Tensor,
    sum_weight: bool,
    sum_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _gradients(x, weight if sum_weight else None, bias if sum_bias else None)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, bias, _ = inputs
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)  # else torch fills zeros for the statistics, and for a result that nobody used
    ctx.save_for_backward(x, weight, bias, output[-1])


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    _, _, weight, bias, _ = inputs
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)  # else torch fills zeros for the statistics, and for a result that nobody used
    ctx.save_for_backward(output[1], weight, bias, output[-1])


def _differentiate(ctx: Any, dy: torch.Tensor | None, _: object) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 4
    sums = ctx.needs_input_grad[1:3]
    dx, *dparameters = _layer_norm_backward(dy, None, *ctx.saved_tensors, *sums)
    return dx, *(d if needed else None for d, needed in zip(dparameters, sums, strict=True)), None


def _differentiate_sum(ctx: Any, dy: torch.Tensor | None, dtotal: torch.Tensor | None, _: object) -> tuple[Any, ...]:
    if dy is None:
        return dtotal, dtotal, None, None, None
    sums = ctx.needs_input_grad[2:4]
    dx, *dparameters = _layer_norm_backward(dy, dtotal, *ctx.saved_tensors, *sums)
    return dx, dx, *(d if needed else None for d, needed in zip(dparameters, sums, strict=True)), None


_layer_norm.register_autograd(_differentiate, setup_context=_save)
_add_layer_norm.register_autograd(_differentiate_sum, setup_context=_save_sum)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension, contiguous, of ``x``'s dtype.

    ``x`` is ``(*batch, n)``, ``weight`` and ``bias`` ``(n,)`` or absent, each float32, float16 or bfloat16, with any
    strides. In float32 throughout, rounded once: see `layer_norm_reference`. Differentiable once by all three. Raises
    `TypeError` for other dtypes; `ValueError` for a wrong shape, no dimension, or mixed devices.
    """
    _check("layer_norm", x, weight, bias)
    y: torch.Tensor = _layer_norm(x, weight, bias, float(eps))[0]
    return y


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm` of ``x + residual``, and that sum, both contiguous and of their dtype.

    ``residual`` has the shape and dtype of ``x``. The sum is rounded to that dtype before it is normalised: see
    `add_layer_norm_reference`. Differentiable once by all tensors. Raises as `layer_norm` does.
    """
    _check("add_layer_norm", x, weight, bias)
    check_tensor("add_layer_norm", "residual", residual, x, (x.dtype,))
    if residual.shape != x.shape:
        raise ValueError(
            f"add_layer_norm: residual has shape {tuple(residual.shape)}, x {tuple(x.shape)}; they must be equal, "
            "expand one of them"
        )
    y, total, _ = _add_layer_norm(x, residual, weight, bias, float(eps))
    return y, total


def _check(kernel: str, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    check_tensor(kernel, "x", x, x, FLOATS)
    if x.ndim == 0:
        raise ValueError(f"{kernel}: x has no dimension to normalise over; give it at least one")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        check_tensor(kernel, name, tensor, x, FLOATS)
        if tensor.shape != x.shape[-1:]:
            raise ValueError(
                f"{kernel}: {name} has shape {tuple(tensor.shape)}, the last dimension of x needs ({x.shape[-1]},)"
            )
