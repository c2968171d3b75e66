"""Gradients of batch normalisation: two sums a channel, in two steps, then those of the input and the residual."""

from __future__ import annotations

import torch
import triton.language as tl

from reference_kernels._common import jit, placed, row_offset
from reference_kernels._sums import summed_parts
from reference_kernels.batch_norm.layout import by_channel, channels_of, like, place, plan_of, statistics_of, strides_of


@jit
def _upstream(
    dy_ptr: tl.tensor, y_ptr: tl.tensor, dy_at: tl.tensor, y_at: tl.tensor, inside: tl.tensor, RELU: tl.constexpr
) -> tl.tensor:
    """The gradient before the relu, which was closed where its result is 0 (and open for NaN, as torch's)."""
    dy = tl.load(dy_ptr + dy_at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        y = tl.load(y_ptr + y_at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.where(y <= 0.0, 0.0, dy)
    return dy


@jit
def _sums_kernel(
    parts_ptr: tl.tensor,
    x_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    y_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    eps: tl.tensor,
    mean_step: tl.tensor,
    scale_step: tl.tensor,
    parts: tl.tensor,
    tiles: tl.tensor,
    column_tiles: tl.tensor,
    channels: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_channel: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    dy_channel: tl.tensor,
    dy_stride0: tl.tensor,
    dy_stride1: tl.tensor,
    dy_stride2: tl.tensor,
    dy_step: tl.tensor,
    y_channel: tl.tensor,
    y_stride0: tl.tensor,
    y_stride1: tl.tensor,
    y_stride2: tl.tensor,
    y_step: tl.tensor,
    RELU: tl.constexpr,
    TRAINING: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Every ``parts``-th tile of some channels: their share of the gradients of weight and bias, ``(2, parts,
    channels)``."""
    block = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    channel = channels_of(block, LAST, BLOCK_COLUMNS)
    mean, rest, scale = statistics_of(
        mean_ptr, rest_ptr, scale_ptr, mean_step, scale_step, channel, channels, eps, TRAINING
    )
    if not LAST:
        x_ptr += block * x_channel
        dy_ptr += block * dy_channel
        y_ptr += block * y_channel
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for tile in range(part, tiles, parts):
        row, column, inside = place(tile, block, column_tiles, rows, width, LAST, BLOCK_ROWS, BLOCK_COLUMNS)
        x_at = row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2) + column * x_step
        dy_at = row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2) + column * dy_step
        y_at = row_offset(row, size1, size2, y_stride0, y_stride1, y_stride2) + column * y_step
        x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
        dy = _upstream(dy_ptr, y_ptr, dy_at, y_at, inside, RELU)
        normalised = ((x - mean) - rest) * scale
        dweight += tl.where(inside, dy * normalised, 0.0)
        dbias += dy
    own, at = parts_ptr + channel, part.to(tl.int64)
    tl.store(own + at * channels, by_channel(dweight, LAST), mask=channel < channels)
    tl.store(own + (parts + at) * channels, by_channel(dbias, LAST), mask=channel < channels)


@jit
def _input_kernel(
    dx_ptr: tl.tensor,
    dresidual_ptr: tl.tensor,
    x_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    eps: tl.tensor,
    count: tl.tensor,
    weight_step: tl.tensor,
    mean_step: tl.tensor,
    scale_step: tl.tensor,
    parts: tl.tensor,
    tiles: tl.tensor,
    column_tiles: tl.tensor,
    channels: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    dx_channel: tl.tensor,
    dx_stride0: tl.tensor,
    dx_stride1: tl.tensor,
    dx_stride2: tl.tensor,
    dx_step: tl.tensor,
    dresidual_channel: tl.tensor,
    dresidual_stride0: tl.tensor,
    dresidual_stride1: tl.tensor,
    dresidual_stride2: tl.tensor,
    dresidual_step: tl.tensor,
    x_channel: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    dy_channel: tl.tensor,
    dy_stride0: tl.tensor,
    dy_stride1: tl.tensor,
    dy_stride2: tl.tensor,
    dy_step: tl.tensor,
    y_channel: tl.tensor,
    y_stride0: tl.tensor,
    y_stride1: tl.tensor,
    y_stride2: tl.tensor,
    y_step: tl.tensor,
    HAS_WEIGHT: tl.constexpr,
    OF_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    TRAINING: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Every ``parts``-th tile of some channels, of the gradients of ``x`` and of the residual, the last one first: what
    the sums read last is in L2 still."""
    block = tl.program_id(0).to(tl.int64)
    channel = channels_of(block, LAST, BLOCK_COLUMNS)
    there = channel < channels
    mean, rest, scale = statistics_of(
        mean_ptr, rest_ptr, scale_ptr, mean_step, scale_step, channel, channels, eps, TRAINING
    )
    tilt = tl.zeros(mean.shape, tl.float32)
    shift = tl.zeros(mean.shape, tl.float32)
    if TRAINING:
        tilt = tl.load(sums_ptr + channel, mask=there, other=0.0) / count
        shift = tl.load(sums_ptr + channels + channel, mask=there, other=0.0) / count
    factor = scale
    if HAS_WEIGHT:
        factor *= tl.load(weight_ptr + channel * weight_step, mask=there, other=0.0).to(tl.float32)
    if not LAST:
        dx_ptr += block * dx_channel
        dresidual_ptr += block * dresidual_channel
        x_ptr += block * x_channel
        dy_ptr += block * dy_channel
        y_ptr += block * y_channel
    for tile in range(tl.program_id(1), tiles, parts):
        row, column, inside = place(tiles - 1 - tile, block, column_tiles, rows, width, LAST, BLOCK_ROWS, BLOCK_COLUMNS)
        dy_at = row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2) + column * dy_step
        y_at = row_offset(row, size1, size2, y_stride0, y_stride1, y_stride2) + column * y_step
        dy = _upstream(dy_ptr, y_ptr, dy_at, y_at, inside, RELU)
        if OF_RESIDUAL:
            at = row_offset(row, size1, size2, dresidual_stride0, dresidual_stride1, dresidual_stride2)
            tl.store(dresidual_ptr + at + column * dresidual_step, dy, mask=inside)
        if TRAINING:
            x_at = row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2) + column * x_step
            x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
            dy = (dy - shift) - ((x - mean) - rest) * scale * tilt
        at = row_offset(row, size1, size2, dx_stride0, dx_stride1, dx_stride2) + column * dx_step
        tl.store(dx_ptr + at, dy * factor, mask=inside)


@torch.library.custom_op("reference_kernels::batch_norm_backward", mutates_args=())
def batch_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rest: torch.Tensor | None,
    scale: torch.Tensor,
    eps: float,
    of_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by ``x``, by weight and bias, float32 ``(2, channels)``, and by the residual, which is empty unless
    needed. ``y`` is there if it went through a relu."""
    dx, sums, dresidual = _gradients(x, of_residual)
    if x.numel() == 0:
        return dx, sums.zero_(), dresidual
    channels = x.shape[1]
    given = x, dy, x if y is None else y
    statistics = mean, mean if rest is None else rest, scale
    flags = {"RELU": y is not None, "TRAINING": rest is not None}
    plan = plan_of(*given, backward=True)
    tile = plan.tile
    found = torch.empty((2, plan.parts, channels), dtype=torch.float32, device=x.device)
    with placed(x.device):
        _sums_kernel[(plan.blocks, plan.parts)](
            found,
            *plan.rows.tensors,
            *statistics,
            eps,
            mean.stride(0),
            scale.stride(0),
            *plan.numbers,
            *strides_of(plan),
            **flags,
            LAST=plan.last,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
        summed_parts(sums[0], sums[1], found, (True, True))
        plan = plan_of(dx, dresidual if of_residual else dx, *given, backward=True)
        tile = plan.tile
        _input_kernel[(plan.blocks, plan.parts)](
            *plan.rows.tensors,
            sums,
            x if weight is None else weight,
            *statistics,
            eps,
            x.numel() // channels,
            1 if weight is None else weight.stride(0),
            mean.stride(0),
            scale.stride(0),
            *plan.numbers,
            *strides_of(plan),
            HAS_WEIGHT=weight is not None,
            OF_RESIDUAL=of_residual,
            **flags,
            LAST=plan.last,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return dx, sums, dresidual


def _gradients(x: torch.Tensor, of_residual: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = like(x)
    sums = torch.empty((2, x.shape[1]), dtype=torch.float32, device=x.device)
    return dx, sums, like(x) if of_residual else dx.new_empty(0)


@batch_norm_backward.register_fake
def _(
    _dy: torch.Tensor,
    x: torch.Tensor,
    _y: torch.Tensor | None,
    _weight: torch.Tensor | None,
    _mean: torch.Tensor,
    _rest: torch.Tensor | None,
    _scale: torch.Tensor,
    _eps: float,
    of_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _gradients(x, of_residual)
