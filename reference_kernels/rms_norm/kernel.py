"""Fused RMS normalisation: sum with a residual, mean square, reciprocal root and weight in one launch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl

from reference_kernels._common import (
    FLOATS,
    Rows,
    RowTile,
    check_tensor,
    check_vector,
    jit,
    placed,
    row_offset,
    row_tile,
    summed,
)
from reference_kernels._norm_backward import input_gradient
from reference_kernels._sums import summed_parts

Convention = Literal["llama", "gemma", "torch"]


def config(width: int, residual: bool = False) -> RowTile:
    """Tile for rows of ``width`` elements. Up to 16384 a row stays in registers and is read once; beyond, it is read
    twice in steps of 8192, the second time from what L2 still holds: by 32 warps, so that few rows share it."""
    tile = row_tile(width, whole=16384, step=8192)
    if tile.loop:
        return replace(tile, warps=32)
    each = {4096: 16, 8192: 8 if residual else 16, 16384: 32 if residual else 64}.get(tile.columns)
    return tile if each is None else replace(tile, warps=tile.columns // (32 * each))


@jit
def _scaled(
    wide: tl.tensor,
    scale: tl.tensor,
    weight_ptr: tl.tensor,
    column: tl.tensor,
    width: tl.tensor,
    weight_step: tl.tensor,
    dtype: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    OFFSET: tl.constexpr,
) -> tl.tensor:
    """One tile of the result in float32: normalised, rounded to ``dtype`` if the convention says so, weighted."""
    normalised = wide * scale
    if ROUND_FIRST:
        normalised = normalised.to(dtype).to(tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column * weight_step, mask=column < width, other=0.0).to(tl.float32)
        normalised = normalised * (weight + OFFSET)
    return normalised


@jit
def _rms_norm_kernel(
    y_ptr: tl.tensor,
    total_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
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
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    OFFSET: tl.constexpr,
    LOOP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """``BLOCK_ROWS`` rows: ``y`` and ``total``, contiguous ``(rows, width)``, and ``statistics`` of ``(1, rows)`` for
    backward, the reciprocal root of the mean square."""
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
    dtype: tl.constexpr = y_ptr.dtype.element_ty

    if LOOP:
        # One partial sum per column keeps each addition a tree away from the last: n / BLOCK_COLUMNS sequential adds.
        squares = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for start in range(0, width, BLOCK_COLUMNS):
            at = start + column
            inside = row_inside & (at < width)
            wide = summed(x_row, residual_row, at, inside, x_step, residual_step, HAS_RESIDUAL, "evict_last")
            squares += wide * wide
            if HAS_RESIDUAL:
                tl.store(total_row + at, wide, mask=inside)
        scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / width + eps)
        blocks = (width + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
        for done in range(blocks):  # backwards: what was read last is nearest
            at = (blocks - 1 - done) * BLOCK_COLUMNS + column
            inside = row_inside & (at < width)
            wide = summed(x_row, residual_row, at, inside, x_step, residual_step, HAS_RESIDUAL, "evict_first")
            y = _scaled(wide, scale, weight_ptr, at, width, weight_step, dtype, HAS_WEIGHT, ROUND_FIRST, OFFSET)
            tl.store(y_row + at, y, mask=inside, eviction_policy="evict_first")
    else:
        inside = row_inside & (column < width)
        wide = summed(x_row, residual_row, column, inside, x_step, residual_step, HAS_RESIDUAL, "")
        if HAS_RESIDUAL:
            tl.store(total_row + column, wide, mask=inside)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / width + eps)
        y = _scaled(wide, scale, weight_ptr, column, width, weight_step, dtype, HAS_WEIGHT, ROUND_FIRST, OFFSET)
        tl.store(y_row + column, y, mask=inside)
    tl.store(statistics_ptr + row, scale, mask=row_inside)


def _forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float, convention: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``y``, the residual sum (``y`` again where there is none), and the statistics, float32 ``(1, rows)``."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    statistics = _statistics(x)
    if y.numel() == 0:
        return y, total, statistics.zero_()
    rows = Rows.of(x, x if residual is None else residual)
    tile = config(rows.width, residual is not None)
    with placed(x.device):
        _rms_norm_kernel[(triton.cdiv(rows.count, tile.rows),)](
            y,
            total,
            statistics,
            *rows.tensors,
            x if weight is None else weight,
            eps,
            rows.count,
            rows.width,
            *rows.layout,
            1 if weight is None else weight.stride(0),
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            ROUND_FIRST=convention == "llama",
            OFFSET=1.0 if convention == "gemma" else 0.0,
            LOOP=tile.loop,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return y, total, statistics


def _statistics(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((1, math.prod(x.shape[:-1])), dtype=torch.float32, device=x.device)


@torch.library.custom_op("reference_kernels::rms_norm", mutates_args=())
def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, convention: str
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, statistics = _forward(x, None, weight, eps, convention)
    return y, statistics


@_rms_norm.register_fake
def _(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), _statistics(x)


@torch.library.custom_op("reference_kernels::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, convention: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward(x, residual, weight, eps, convention)


@_add_rms_norm.register_fake
def _(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return y, total, _statistics(x)


@torch.library.custom_op("reference_kernels::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
    convention: str,
    of_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by ``x`` and by the weight; the latter is empty where it is not needed.

    The same for all conventions but for Gemma's ``1 + weight``: roundings on the way are passed over.
    """
    sums = (of_weight, False)
    dx, dweight = _gradients(x, weight if of_weight else None)
    if x.numel() == 0:
        return dx, dweight.zero_()
    parts = input_gradient(dx, dy, x, dtotal, weight, statistics, sums, one_more=convention == "gemma")
    if of_weight:
        summed_parts(dweight, dweight, parts, sums)
    return dx, dweight


def _gradients(x: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return dx, dx.new_empty(0) if weight is None else torch.empty(weight.shape, dtype=weight.dtype, device=x.device)


@_rms_norm_backward.register_fake
def _(
    _dy: torch.Tensor,
    _dtotal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    _statistics: torch.Tensor,
    _convention: str,
    of_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _gradients(x, weight if of_weight else None)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Of the plain norm its input, of one with a residual the sum, which is the output before the statistics."""
    *_, weight, _, ctx.convention = inputs
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)  # else torch fills zeros for the statistics, and for a result that nobody used
    ctx.save_for_backward(inputs[0] if len(output) == 2 else output[1], weight, output[-1])


def _differentiate(ctx: Any, dy: torch.Tensor | None, _: object) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 4
    of_weight = ctx.needs_input_grad[1]
    dx, dweight = _rms_norm_backward(dy, None, *ctx.saved_tensors, ctx.convention, of_weight)
    return dx, dweight if of_weight else None, None, None


def _differentiate_sum(ctx: Any, dy: torch.Tensor | None, dtotal: torch.Tensor | None, _: object) -> tuple[Any, ...]:
    if dy is None:
        return dtotal, dtotal, None, None, None
    of_weight = ctx.needs_input_grad[2]
    dx, dweight = _rms_norm_backward(dy, dtotal, *ctx.saved_tensors, ctx.convention, of_weight)
    return dx, dx, dweight if of_weight else None, None, None


_rms_norm.register_autograd(_differentiate, setup_context=_save)
_add_rms_norm.register_autograd(_differentiate_sum, setup_context=_save)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    convention: Convention = "llama",
) -> torch.Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension; contiguous, of ``x``'s shape and dtype.

    ``x`` is ``(*batch, n)`` and ``weight`` ``(n,)``, in float32, float16 or bfloat16, with any strides. ``convention``
    says where it rounds and whether the weight is offset by one: see `llama_reference`, `gemma_reference` and
    `torch_reference`. Differentiable once by both. Raises `TypeError` for other dtypes, and for a Llama weight whose
    dtype is not ``x``'s (the product would be promoted); `ValueError` for a wrong shape, an unknown convention, or
    mixed devices.
    """
    _check("rms_norm", x, weight, convention)
    y: torch.Tensor = _rms_norm(x, weight, float(eps), convention)[0]
    return y


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    convention: Convention = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of ``x + residual``, and that sum, both contiguous and of their dtype.

    ``residual`` has the shape and dtype of ``x``. The sum is rounded to that dtype before it is normalised: see
    `add_rms_norm_reference`. Differentiable once by all tensors. Raises as `rms_norm` does.
    """
    _check("add_rms_norm", x, weight, convention)
    check_tensor("add_rms_norm", "residual", residual, x, (x.dtype,))
    if residual.shape != x.shape:
        raise ValueError(
            f"add_rms_norm: residual has shape {tuple(residual.shape)}, x {tuple(x.shape)}; they must be equal, "
            "expand one of them"
        )
    y, total, _ = _add_rms_norm(x, residual, weight, float(eps), convention)
    return y, total


def _check(kernel: str, x: torch.Tensor, weight: torch.Tensor | None, convention: str) -> None:
    if convention not in get_args(Convention):
        known = ", ".join(get_args(Convention))
        raise ValueError(f"{kernel}: convention is {convention!r}, known: {known}")
    check_tensor(kernel, "x", x, x, FLOATS)
    if x.ndim == 0:
        raise ValueError(f"{kernel}: x has no dimension to normalise over; give it at least one")
    if weight is not None:
        check_vector(kernel, "weight", weight, x, (x.dtype,) if convention == "llama" else FLOATS)
