"""Fused RMS normalisation: mean square, reciprocal root, scaling and weight in one launch."""

from __future__ import annotations

from typing import Literal, get_args

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
)

Convention = Literal["llama", "gemma", "torch"]


def config(width: int) -> RowTile:
    """Tile for rows of ``width`` elements. Up to 16384 a row stays in registers and is read once; beyond, it is read
    twice in steps of 8192, the second time from L2."""
    return row_tile(width, whole=16384, step=8192)


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
    x_ptr: tl.tensor,
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
    weight_step: tl.tensor,
    HAS_WEIGHT: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    OFFSET: tl.constexpr,
    LOOP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of ``BLOCK_ROWS`` rows. ``y`` is contiguous ``(rows, width)``; ``x`` and ``weight`` have strides."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_inside = row < rows
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
    y_row = y_ptr + row * width
    dtype: tl.constexpr = y_ptr.dtype.element_ty

    if LOOP:
        # One partial sum per column keeps each addition a tree away from the last: n / BLOCK_COLUMNS sequential adds.
        squares = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for start in range(0, width, BLOCK_COLUMNS):
            at = start + column
            inside = row_inside & (at < width)
            wide = tl.load(x_row + at * x_step, mask=inside, other=0.0).to(tl.float32)
            squares += wide * wide
        scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / width + eps)
        for start in range(0, width, BLOCK_COLUMNS):
            at = start + column
            inside = row_inside & (at < width)
            wide = tl.load(x_row + at * x_step, mask=inside, other=0.0).to(tl.float32)
            y = _scaled(wide, scale, weight_ptr, at, width, weight_step, dtype, HAS_WEIGHT, ROUND_FIRST, OFFSET)
            tl.store(y_row + at, y, mask=inside)
    else:
        inside = row_inside & (column < width)
        wide = tl.load(x_row + column * x_step, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / width + eps)
        y = _scaled(wide, scale, weight_ptr, column, width, weight_step, dtype, HAS_WEIGHT, ROUND_FIRST, OFFSET)
        tl.store(y_row + column, y, mask=inside)


@torch.library.custom_op("reference_kernels::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, convention: str) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = Rows.of(x)
    tile = config(rows.width)
    with placed(x.device):
        _rms_norm_kernel[(triton.cdiv(rows.count, tile.rows),)](
            y,
            *rows.tensors,
            x if weight is None else weight,
            eps,
            rows.count,
            rows.width,
            *rows.sizes[1:],
            *rows.strides[0],
            1 if weight is None else weight.stride(0),
            HAS_WEIGHT=weight is not None,
            ROUND_FIRST=convention == "llama",
            OFFSET=1.0 if convention == "gemma" else 0.0,
            LOOP=tile.loop,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return y


@_rms_norm.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    convention: Convention = "llama",
) -> torch.Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension; contiguous, of ``x``'s shape and dtype.

    ``x`` is ``(*batch, n)`` and ``weight`` ``(n,)``, in float32, float16 or bfloat16, with any strides. ``convention``
    says where it rounds and whether the weight is offset by one: see `llama_reference`, `gemma_reference` and
    `torch_reference`. Raises `TypeError` for other dtypes, and for a Llama weight whose dtype is not ``x``'s (the
    product would be promoted); `ValueError` for a wrong shape, an unknown convention, or mixed devices.
    """
    if convention not in get_args(Convention):
        known = ", ".join(get_args(Convention))
        raise ValueError(f"rms_norm: convention is {convention!r}, known: {known}")
    check_tensor("rms_norm", "x", x, x, FLOATS)
    if x.ndim == 0:
        raise ValueError("rms_norm: x has no dimension to normalise over; give it at least one")
    if weight is not None:
        check_vector("rms_norm", "weight", weight, x, (x.dtype,) if convention == "llama" else FLOATS)
    y: torch.Tensor = _rms_norm(x, weight, float(eps), convention)
    return y
