"""Fused normalisation and quantisation: residual, statistics, weight, scales and codes in one launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from reference_kernels._common import (
    FLOATS,
    INTERPRETED,
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
from reference_kernels.norm_quant.reference import FLOOR, LIMITS

Norm = Literal["rms", "layer"]
Codes = Literal["fp8", "int8"]

DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
GROUPS = (16, 32, 64, 128, 256, 512, 1024)
LEAST = tl.constexpr(FLOOR)
# Adding and taking away 1.5 * 2**23 rounds a float32 below 2**22 to the nearest whole number, ties to even.
ROUNDER = tl.constexpr(12582912.0)


def config(width: int, group: int | None, *, interpreted: bool = INTERPRETED) -> RowTile:
    """Tile for rows of ``width`` elements, of whole groups. Up to 16384 a row stays in registers and is read once;
    beyond, it is read three times (layer norm: four; with groups one less) in steps of 8192, later ones from L2.

    Interpreted, rows past 16 elements loop, as most cases of a test have no more than 33.
    """
    tile = row_tile(width, whole=16384, step=8192, interpreted=interpreted)
    if interpreted and 16 < width <= 128:
        tile = RowTile(16, 16, tile.warps, loop=True)
    columns = max(tile.columns, group or 1)
    return replace(tile, columns=columns, rows=max(1, tile.rows * tile.columns // columns))


@jit
def _normalised(
    centred: tl.tensor,
    reciprocal: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    column: tl.tensor,
    width: tl.tensor,
    weight_step: tl.tensor,
    bias_step: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """One tile of the norm in float32; outside of the row 0, by its weight, so that it is no group's largest."""
    known = column < width
    y = centred * reciprocal * tl.load(weight_ptr + column * weight_step, mask=known, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column * bias_step, mask=known, other=0.0).to(tl.float32)
    return y


@jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The larger one, NaN if one of them is: tl.max passes it over on a GPU."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _largest(y: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    return tl.reduce(tl.abs(y), axis, _larger, keep_dims=True)


@jit
def _scale(largest: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    largest = tl.where(largest < LEAST, LEAST, largest)
    return tl.where(largest == float("inf"), float("nan"), largest) / LIMIT


@jit
def _coded(y: tl.tensor, scale: tl.tensor, dtype: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """The codes of ``y``. A product with the reciprocal: it moves only what is within an ulp of a tie."""
    scaled = y * (1.0 / scale)
    # The casts of torch and of the hardware differ beyond the limit.
    scaled = tl.clamp(scaled, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.int8:
        scaled = tl.where(scaled == scaled, scaled, 0.0)
        scaled = (scaled + ROUNDER) - ROUNDER
    return scaled.to(dtype)


@jit
def _store_tile(
    codes_row: tl.tensor,
    scales_row: tl.tensor,
    y: tl.tensor,
    row_scale: tl.tensor,
    column: tl.tensor,
    start: tl.tensor,
    row_inside: tl.tensor,
    width: tl.tensor,
    groups: tl.tensor,
    LIMIT: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Quantise one tile by ``row_scale``, or by the scales of its groups, which it stores."""
    dtype: tl.constexpr = codes_row.dtype.element_ty
    if GROUP > 0:
        count: tl.constexpr = y.shape[1] // GROUP
        parts = tl.reshape(y, [y.shape[0], count, GROUP])
        scale = _scale(_largest(parts, 2), LIMIT)
        codes = tl.reshape(_coded(parts, scale, dtype, LIMIT), [y.shape[0], y.shape[1]])
        group = start // GROUP + tl.arange(0, count)[None, :]
        inside = row_inside & (group < groups)
        tl.store(scales_row + group, tl.reshape(scale, [y.shape[0], count]), mask=inside)
    else:
        codes = _coded(y, row_scale, dtype, LIMIT)
    tl.store(codes_row + column, codes, mask=row_inside & (column < width))


@jit
def _norm_quant_kernel(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    summed_ptr: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    eps: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    groups: tl.tensor,
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
    LAYER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUP: tl.constexpr,
    LOOP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of ``BLOCK_ROWS`` rows. ``codes`` and ``summed`` are contiguous ``(rows, width)``, ``scales`` ``(rows,
    groups)``; the inputs have strides. ``GROUP`` 0: one scale for a row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_inside = row < rows
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
    residual_row = residual_ptr
    if HAS_RESIDUAL:
        residual_row += row_offset(row, size1, size2, residual_stride0, residual_stride1, residual_stride2)
    codes_row = codes_ptr + row * width
    scales_row = scales_ptr + row * groups
    mean = tl.zeros([BLOCK_ROWS, 1], tl.float32)
    row_scale = tl.zeros([BLOCK_ROWS, 1], tl.float32)

    if LOOP:
        # One partial result per column keeps each addition a tree away from the last.
        if LAYER:
            total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
            for start in range(0, width, BLOCK_COLUMNS):
                at = start + column
                inside = row_inside & (at < width)
                total += summed(x_row, residual_row, at, inside, x_step, residual_step, HAS_RESIDUAL, "")
            mean = tl.sum(total, axis=1, keep_dims=True) / width
        squares = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for start in range(0, width, BLOCK_COLUMNS):
            at = start + column
            inside = row_inside & (at < width)
            wide = summed(x_row, residual_row, at, inside, x_step, residual_step, HAS_RESIDUAL, "")
            centred = tl.where(inside, wide - mean, 0.0)
            squares += centred * centred
        reciprocal = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / width + eps)
        if GROUP == 0:
            largest = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
            for start in range(0, width, BLOCK_COLUMNS):
                at = start + column
                inside = row_inside & (at < width)
                wide = summed(x_row, residual_row, at, inside, x_step, residual_step, HAS_RESIDUAL, "")
                y = _normalised(
                    wide - mean, reciprocal, weight_ptr, bias_ptr, at, width, weight_step, bias_step, HAS_BIAS
                )
                largest = _larger(largest, tl.abs(y))
            row_scale = _scale(_largest(largest, 1), LIMIT)
        for start in range(0, width, BLOCK_COLUMNS):
            at = start + column
            inside = row_inside & (at < width)
            wide = summed(x_row, residual_row, at, inside, x_step, residual_step, HAS_RESIDUAL, "")
            if HAS_RESIDUAL:
                tl.store(summed_ptr + row * width + at, wide, mask=inside)
            y = _normalised(wide - mean, reciprocal, weight_ptr, bias_ptr, at, width, weight_step, bias_step, HAS_BIAS)
            _store_tile(codes_row, scales_row, y, row_scale, at, start, row_inside, width, groups, LIMIT, GROUP)
    else:
        inside = row_inside & (column < width)
        wide = summed(x_row, residual_row, column, inside, x_step, residual_step, HAS_RESIDUAL, "")
        if HAS_RESIDUAL:
            tl.store(summed_ptr + row * width + column, wide, mask=inside)
        if LAYER:
            mean = tl.sum(wide, axis=1, keep_dims=True) / width
            wide = tl.where(inside, wide - mean, 0.0)
        reciprocal = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / width + eps)
        y = _normalised(wide, reciprocal, weight_ptr, bias_ptr, column, width, weight_step, bias_step, HAS_BIAS)
        if GROUP == 0:
            row_scale = _scale(_largest(y, 1), LIMIT)
        _store_tile(codes_row, scales_row, y, row_scale, column, 0, row_inside, width, groups, LIMIT, GROUP)
    if GROUP == 0:
        tl.store(scales_row, row_scale, mask=row_inside)


def _outputs(
    x: torch.Tensor, residual: torch.Tensor | None, codes: str, group: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and the sum with the residual; without one, an empty tensor in its place."""
    groups = 1 if group is None else (x.shape[-1] + group - 1) // group
    return (
        torch.empty(x.shape, dtype=DTYPES[codes], device=x.device),
        torch.empty((*x.shape[:-1], groups), dtype=torch.float32, device=x.device),
        torch.empty((0,) if residual is None else x.shape, dtype=x.dtype, device=x.device),
    )


@torch.library.custom_op("reference_kernels::norm_quant", mutates_args=())
def _norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    layer: bool,
    codes: str,
    group: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if codes == "fp8" and x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 9):
        raise ValueError(f"norm_quant: {x.device} has no float8, which begins with capability 8.9; use codes='int8'")
    out, scales, summed = _outputs(x, residual, codes, group)
    if x.numel() == 0:
        return out, scales.fill_(FLOOR / LIMITS[codes]) if scales.numel() else scales, summed
    # An absent input stands in by another one, never dereferenced.
    rows = Rows.of(x, x if residual is None else residual)
    tile = config(rows.width, group)
    with placed(x.device):
        _norm_quant_kernel[(triton.cdiv(rows.count, tile.rows),)](
            out,
            scales,
            x if residual is None else summed,
            *rows.tensors,
            weight,
            weight if bias is None else bias,
            eps,
            rows.count,
            rows.width,
            scales.shape[-1],
            *rows.layout,
            weight.stride(0),
            1 if bias is None else bias.stride(0),
            LAYER=layer,
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            LIMIT=LIMITS[codes],
            GROUP=group or 0,
            LOOP=tile.loop,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return out, scales, summed


@_norm_quant.register_fake
def _(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,  # noqa: ARG001 -- the operator's signature
    bias: torch.Tensor | None,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    layer: bool,  # noqa: ARG001
    codes: str,
    group: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _outputs(x, residual, codes, group)


def norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm: Norm = "rms",
    codes: Codes = "fp8",
    group: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the rms or layer norm of ``x`` over its last dimension, both contiguous.

    ``x`` is ``(*batch, n)``, ``weight`` and ``bias`` ``(n,)``, each in float32, float16 or bfloat16, with any strides.
    Codes are float8_e4m3fn or int8 of ``x``'s shape, scales float32: ``(*batch, 1)``, or ``(*batch, ceil(n / group))``.
    In float32 throughout, rounded to codes alone: see `norm_quant_reference`. Has no gradient. Raises `TypeError` for
    other dtypes; `ValueError` for a wrong shape, an unknown norm, codes or group, mixed devices, or float8 on a GPU
    that has none.
    """
    _check("norm_quant", x, weight, bias, norm, codes, group)
    found, scales, _ = _norm_quant(x, None, weight, bias, float(eps), norm == "layer", codes, group)
    return found, scales


def add_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm: Norm = "rms",
    codes: Codes = "fp8",
    group: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`norm_quant` of ``x + residual`` rounded to their dtype, and that sum, contiguous: ``(codes, scales, summed)``.

    ``residual`` has the shape and dtype of ``x``. Raises as `norm_quant` does.
    """
    _check("add_norm_quant", x, weight, bias, norm, codes, group)
    check_tensor("add_norm_quant", "residual", residual, x, (x.dtype,))
    if residual.shape != x.shape:
        raise ValueError(
            f"add_norm_quant: x has shape {tuple(x.shape)}, residual {tuple(residual.shape)}; they must be equal, "
            "expand one of them"
        )
    found, scales, summed = _norm_quant(x, residual, weight, bias, float(eps), norm == "layer", codes, group)
    return found, scales, summed


def _check(
    kernel: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: str,
    codes: str,
    group: int | None,
) -> None:
    for name, value, known in (("norm", norm, get_args(Norm)), ("codes", codes, get_args(Codes))):
        if value not in known:
            raise ValueError(f"{kernel}: {name} is {value!r}, known: {', '.join(known)}")
    if group is not None and group not in GROUPS:
        raise ValueError(f"{kernel}: group is {group}, supported: None (one scale a row) and {GROUPS}")
    check_tensor(kernel, "x", x, x, FLOATS)
    if x.ndim == 0:
        raise ValueError(f"{kernel}: x has no dimension to normalise over; give it at least one")
    check_vector(kernel, "weight", weight, x)
    if bias is not None:
        check_vector(kernel, "bias", bias, x)
