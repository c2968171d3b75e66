"""Fused pointwise chains: relu, scale and bias by column; add, multiply and activation. Both with their gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl

from reference_kernels._activations import activated, slope
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
)
from reference_kernels._elementwise import launch, place, tile_of
from reference_kernels._sums import summed_parts

Activation = Literal["relu", "gelu", "silu"]


def config(width: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED) -> RowTile:
    """Tile of relu_scale_bias: four rows share each column's scale and bias, which then cost a quarter of ``x``."""
    return tile_of(width, dtype, loads=4, rows=4, interpreted=interpreted)


def backward_config(
    rows: int, width: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED
) -> tuple[RowTile, int]:
    """Tile of its backward, and how many rows (a multiple of the tile's) each program takes, one tile after the other.

    Some 1000 programs keep every multiprocessor of an H200 busy; each leaves one partial sum a column, so more of them
    would move more. Depends on sizes alone: the order of a sum is the same on every device.
    """
    tile, programs = tile_of(width, dtype, rows=4, interpreted=interpreted), 1024
    if interpreted:  # few programs, so that the rows of small cases take several turns of each
        tile, programs = replace(tile, rows=8), 4 if rows <= 2048 else 64
    splits = max(1, programs // triton.cdiv(width, tile.columns))
    return tile, triton.cdiv(triton.cdiv(rows, splits), tile.rows) * tile.rows


@jit
def _relu_scale_bias_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    column_blocks: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    scale_step: tl.tensor,
    bias_step: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of ``y``, contiguous ``(rows, width)``."""
    row, column = place(column_blocks, False, BLOCK_ROWS, BLOCK_COLUMNS)
    known = column < width
    inside = (row < rows) & known
    x_at = row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2) + column * x_step
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + column * scale_step, mask=known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column * bias_step, mask=known, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + column, activated(x, "relu", tl.float32) * scale + bias, mask=inside)


@jit
def _relu_scale_bias_backward_kernel(
    dx_ptr: tl.tensor,
    dscale_ptr: tl.tensor,
    dbias_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    rows_each: tl.tensor,
    width: tl.tensor,
    column_blocks: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    dy_stride0: tl.tensor,
    dy_stride1: tl.tensor,
    dy_stride2: tl.tensor,
    dy_step: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    scale_step: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """``dx`` of ``rows_each`` rows of one block of columns, and their part of the other gradients' sums.

    ``dx`` is contiguous ``(rows, width)``; the partial sums are float32, one row of ``width`` for each group of rows.
    """
    program = tl.program_id(0).to(tl.int64)
    group = program // column_blocks
    column = program % column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    known = column < width
    scale = tl.load(scale_ptr + column * scale_step, mask=known, other=0.0).to(tl.float32)
    # Each row of the tile sums for itself until the end: no reduction over threads within the loop.
    dscale = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, rows_each, BLOCK_ROWS):
        row = group * rows_each + start + tl.arange(0, BLOCK_ROWS)[:, None]
        inside = (row < rows) & known
        dy_at = row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2) + column * dy_step
        x_at = row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2) + column * x_step
        dy = tl.load(dy_ptr + dy_at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
        # A choice, not a product with the slope: torch too gives 0 where relu is closed, whatever dy is.
        tl.store(dx_ptr + row * width + column, tl.where(x <= 0, 0.0, dy * scale), mask=inside)
        dscale += dy * activated(x, "relu", tl.float32)
        dbias += dy
    sums_at = group * width + column
    tl.store(dscale_ptr + sums_at, tl.sum(dscale, axis=0, keep_dims=True), mask=known)
    tl.store(dbias_ptr + sums_at, tl.sum(dbias, axis=0, keep_dims=True), mask=known)


@jit
def _add_mul_act_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    z_ptr: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    column_blocks: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    y_stride0: tl.tensor,
    y_stride1: tl.tensor,
    y_stride2: tl.tensor,
    y_step: tl.tensor,
    z_stride0: tl.tensor,
    z_stride1: tl.tensor,
    z_stride2: tl.tensor,
    z_step: tl.tensor,
    ACTIVATION: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of the result, contiguous ``(rows, width)``."""
    row, column = place(column_blocks, FLAT, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows) & (column < width)
    x_at = row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2) + column * x_step
    y_at = row_offset(row, size1, size2, y_stride0, y_stride1, y_stride2) + column * y_step
    z_at = row_offset(row, size1, size2, z_stride0, z_stride1, z_stride2) + column * z_step
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + y_at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + z_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, activated((x + y) * z, ACTIVATION, out_ptr.dtype.element_ty), mask=inside)


@jit
def _add_mul_act_backward_kernel(
    dsum_ptr: tl.tensor,
    dz_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    z_ptr: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    column_blocks: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    dout_stride0: tl.tensor,
    dout_stride1: tl.tensor,
    dout_stride2: tl.tensor,
    dout_step: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    y_stride0: tl.tensor,
    y_stride1: tl.tensor,
    y_stride2: tl.tensor,
    y_step: tl.tensor,
    z_stride0: tl.tensor,
    z_stride1: tl.tensor,
    z_stride2: tl.tensor,
    z_step: tl.tensor,
    ACTIVATION: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of the gradients by ``x + y`` and by ``z``, contiguous ``(rows, width)``."""
    row, column = place(column_blocks, FLAT, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows) & (column < width)
    dout_at = row_offset(row, size1, size2, dout_stride0, dout_stride1, dout_stride2) + column * dout_step
    x_at = row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2) + column * x_step
    y_at = row_offset(row, size1, size2, y_stride0, y_stride1, y_stride2) + column * y_step
    z_at = row_offset(row, size1, size2, z_stride0, z_stride1, z_stride2) + column * z_step
    dout = tl.load(dout_ptr + dout_at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + y_at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + z_at, mask=inside, other=0.0).to(tl.float32)
    both = x + y
    dproduct = dout * slope(both * z, ACTIVATION)
    at = row * width + column
    tl.store(dsum_ptr + at, dproduct * z, mask=inside)
    tl.store(dz_ptr + at, dproduct * both, mask=inside)


@torch.library.custom_op("reference_kernels::relu_scale_bias", mutates_args=())
def _relu_scale_bias(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = Rows.of(x)
    tile = config(rows.width, x.dtype)
    blocks = triton.cdiv(rows.width, tile.columns)
    with placed(x.device):
        _relu_scale_bias_kernel[(triton.cdiv(rows.count, tile.rows) * blocks,)](
            y,
            *rows.tensors,
            scale,
            bias,
            rows.count,
            rows.width,
            blocks,
            *rows.layout,
            scale.stride(0),
            bias.stride(0),
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return y


@_relu_scale_bias.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("reference_kernels::relu_scale_bias_backward", mutates_args=())
def _relu_scale_bias_backward(
    dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.empty if x.numel() else torch.zeros  # no rows: sums of nothing
    dx, dscale, dbias = (make(t.shape, dtype=t.dtype, device=t.device) for t in (x, scale, bias))
    if x.numel() == 0:
        return dx, dscale, dbias
    rows = Rows.of(dy, x)
    tile, rows_each = backward_config(rows.count, rows.width, x.dtype)
    blocks, groups = triton.cdiv(rows.width, tile.columns), triton.cdiv(rows.count, rows_each)
    partial = torch.empty((2, groups, rows.width), dtype=torch.float32, device=x.device)
    with placed(x.device):
        _relu_scale_bias_backward_kernel[(groups * blocks,)](
            dx,
            *partial,
            *rows.tensors,
            scale,
            rows.count,
            rows_each,
            rows.width,
            blocks,
            *rows.layout,
            scale.stride(0),
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    summed_parts(dscale, dbias, partial, (True, True))
    return dx, dscale, dbias


@_relu_scale_bias_backward.register_fake
def _(_: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dscale, dbias = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs)
    return dx, dscale, dbias


@torch.library.custom_op("reference_kernels::add_mul_act", mutates_args=())
def _add_mul_act(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        launch(_add_mul_act_kernel, (out,), (x, y, z), ACTIVATION=activation)
    return out


@_add_mul_act.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("reference_kernels::add_mul_act_backward", mutates_args=())
def _add_mul_act_backward(
    dout: torch.Tensor, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dsum, dz = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if dout.numel():
        launch(_add_mul_act_backward_kernel, (dsum, dz), (dout, x, y, z), ACTIVATION=activation)
    return dsum, dz


@_add_mul_act_backward.register_fake
def _(_: torch.Tensor, x: torch.Tensor, *__: object) -> tuple[torch.Tensor, torch.Tensor]:
    dsum, dz = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return dsum, dz


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- passed by name
    ctx.save_for_backward(*inputs[:3])
    ctx.activation = inputs[3:]


def _differentiate_relu_scale_bias(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return (*_relu_scale_bias_backward(dy, *ctx.saved_tensors),)


def _differentiate_add_mul_act(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    dsum, dz = _add_mul_act_backward(dout, *ctx.saved_tensors, *ctx.activation)
    return dsum, dsum, dz, None  # x and y have one gradient, as those of torch's own sum


_relu_scale_bias.register_autograd(_differentiate_relu_scale_bias, setup_context=_save)
_add_mul_act.register_autograd(_differentiate_add_mul_act, setup_context=_save)


def relu_scale_bias(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``relu(x) * scale + bias``; contiguous, of ``x``'s shape and dtype.

    ``x`` is ``(*batch, n)``, ``scale`` and ``bias`` ``(n,)``, each in float32, float16 or bfloat16, with any strides.
    In float32 throughout, rounded once: see `relu_scale_bias_reference`. Differentiable once by all three. Raises
    `TypeError` for other dtypes; `ValueError` for shapes that do not fit, or mixed devices.
    """
    check_tensor("relu_scale_bias", "x", x, x, FLOATS)
    if x.ndim == 0:
        raise ValueError("relu_scale_bias: x has no dimension; give it at least one")
    check_vector("relu_scale_bias", "scale", scale, x)
    check_vector("relu_scale_bias", "bias", bias, x)
    y: torch.Tensor = _relu_scale_bias(x, scale, bias)
    return y


def add_mul_act(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, activation: Activation = "relu") -> torch.Tensor:
    """``activation((x + y) * z)``: three tensors of one shape to a contiguous one of their dtype.

    float32, float16 or bfloat16, one dtype for all, with any strides. In float32 throughout, rounded once: see
    `add_mul_act_reference`. Differentiable once by all three, in one launch. Raises `TypeError` for other or mixed
    dtypes; `ValueError` for shapes that differ, no dimension, an unknown activation, or mixed devices.
    """
    if activation not in get_args(Activation):
        raise ValueError(f"add_mul_act: activation is {activation!r}, known: {', '.join(get_args(Activation))}")
    check_tensor("add_mul_act", "x", x, x, FLOATS)
    if x.ndim == 0:
        raise ValueError("add_mul_act: x has no dimension; give it at least one")
    for name, tensor in (("y", y), ("z", z)):
        check_tensor("add_mul_act", name, tensor, x, (x.dtype,))
        if tensor.shape != x.shape:
            raise ValueError(
                f"add_mul_act: x has shape {tuple(x.shape)}, {name} {tuple(tensor.shape)}; they must be equal, "
                "expand one of them"
            )
    out: torch.Tensor = _add_mul_act(x, y, z, activation)
    return out
