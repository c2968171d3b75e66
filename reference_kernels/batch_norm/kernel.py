"""Fused batch normalisation: statistics across programs in two steps, then scale, shift, residual and relu in one."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._common import FLOATS, check_apart, check_tensor, jit, placed, row_offset
from reference_kernels.batch_norm.backward import batch_norm_backward
from reference_kernels.batch_norm.layout import (
    by_channel,
    channels_of,
    like,
    number_of,
    place,
    plan_of,
    statistics_of,
    strides_of,
)


def combined(parts: int) -> tuple[int, int]:
    """Parts and channels that a program of `_combine_kernel` reads at a time: at least 32 bytes side by side, and for
    many parts few channels, so that there are many programs."""
    return (32, 32) if parts <= 32 else (128, 8)


@jit
def shift_of(x: tl.tensor, number: tl.tensor, LAST: tl.constexpr) -> tl.tensor:
    """About the mean of a tile's ``number`` elements, for each of its channels: a number that is subtracted from each.

    Around zero the last bits of a whole mean are lost, the same ones from all numbers of few bits, as bfloat16 and
    float16 are: the sum of 1591 was 34 times as wrong as a plain one. So it is rounded to 2^-12 of what the mean of the
    magnitudes is larger by, which is nothing where all have one sign. At most 2^126 is added for that.
    """
    mean = by_channel(x, LAST) / number
    magnitude = by_channel(tl.abs(x), LAST) / number
    coarse = tl.minimum((magnitude - tl.abs(mean)) * 2048, 2.0**126)
    return (mean + coarse) - coarse


@jit
def _moments_kernel(
    parts_ptr: tl.tensor,
    x_ptr: tl.tensor,
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
    LAST: tl.constexpr,
    FOLDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Every ``parts``-th tile of some channels: a shift, how many elements, and the sums of what is left of them and of
    its squares, into ``parts_ptr``, ``(4, parts, channels)``.

    The shift is about the mean of the first tile: it lies within the root of the number of tiles, in standard
    deviations, of the part's mean, so that subtracting the squared mean costs the squares no more than that number of
    units.
    ``FOLDED``: a tile's rows are all in one thread's registers, and added up there.
    """
    block = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    channel = channels_of(block, LAST, BLOCK_COLUMNS)
    if not LAST:
        x_ptr += block * x_channel
    row, column, inside = place(part, block, column_tiles, rows, width, LAST, BLOCK_ROWS, BLOCK_COLUMNS)
    x_at = row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2) + column * x_step
    first = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    number = number_of(part, column_tiles, rows, width, LAST, BLOCK_ROWS, BLOCK_COLUMNS)
    shift = shift_of(first, number.to(tl.float32), LAST)
    count = number * 0
    total = tl.zeros([1 if FOLDED else BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    squares = tl.zeros([1 if FOLDED else BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for tile in range(part, tiles, parts):
        row, column, inside = place(tile, block, column_tiles, rows, width, LAST, BLOCK_ROWS, BLOCK_COLUMNS)
        x_at = row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2) + column * x_step
        x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
        left = tl.where(inside, x - shift, 0.0)
        count += number_of(tile, column_tiles, rows, width, LAST, BLOCK_ROWS, BLOCK_COLUMNS)
        if FOLDED:
            total += tl.sum(left, axis=0, keep_dims=True)
            squares += tl.sum(left * left, axis=0, keep_dims=True)
        else:
            total += left
            squares += left * left
    there = channel < channels
    own, at = parts_ptr + channel, part.to(tl.int64)
    tl.store(own + at * channels, shift, mask=there)
    tl.store(own + (parts + at) * channels, tl.zeros(channel.shape, tl.float32) + count.to(tl.float32), mask=there)
    tl.store(own + (2 * parts + at) * channels, by_channel(total, LAST), mask=there)
    tl.store(own + (3 * parts + at) * channels, by_channel(squares, LAST), mask=there)


@jit
def _part(
    parts_ptr: tl.tensor,
    first: tl.tensor,
    parts: tl.tensor,
    channel: tl.tensor,
    channels: tl.tensor,
    PARTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Shift, number, mean of what is left, and sum of squares around the mean, of ``PARTS`` parts."""
    part = first + tl.arange(0, PARTS)[:, None].to(tl.int64)
    there = (part < parts) & (channel < channels)
    own = parts_ptr + channel
    shift = tl.load(own + part * channels, mask=there, other=0.0)
    count = tl.load(own + (parts + part) * channels, mask=there, other=0.0)
    total = tl.load(own + (2 * parts + part) * channels, mask=there, other=0.0)
    squares = tl.load(own + (3 * parts + part) * channels, mask=there, other=0.0)
    left = total / tl.maximum(count, 1.0)
    return shift, count, left, squares - total * left


@jit
def _combine_kernel(
    statistics_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    var_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    eps: tl.tensor,
    keep: tl.tensor,
    momentum: tl.tensor,
    unbiased: tl.tensor,
    count: tl.tensor,
    parts: tl.tensor,
    channels: tl.tensor,
    mean_step: tl.tensor,
    var_step: tl.tensor,
    HAS_MEAN: tl.constexpr,
    HAS_VAR: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Chan's rule for all parts of some channels at once, around the shift of part 0: ``statistics``, ``(3, channels)``
    (mean, what its rounding left, reciprocal root of the variance), and the running ones where there are any."""
    channel = tl.program_id(0).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    there = channel < channels
    base = tl.load(parts_ptr + channel, mask=there, other=0.0)
    total = tl.zeros([PARTS, CHANNELS], tl.float32)
    for first in range(0, parts, PARTS):
        shift, number, left, _ = _part(parts_ptr, first, parts, channel, channels, PARTS)
        total += tl.where(number > 0, number * ((shift - base) + left), 0.0)
    delta = tl.sum(total, axis=0, keep_dims=True) / count
    around = tl.zeros([PARTS, CHANNELS], tl.float32)
    for first in range(0, parts, PARTS):
        shift, number, left, squares = _part(parts_ptr, first, parts, channel, channels, PARTS)
        apart = (shift - base) + left - delta
        around += tl.where(number > 0, squares + number * apart * apart, 0.0)
    squares = tl.maximum(tl.sum(around, axis=0, keep_dims=True), 0.0, propagate_nan=tl.PropagateNan.ALL)
    mean = base + delta
    back = mean - base
    var = squares / count
    tl.store(statistics_ptr + channel, mean, mask=there)
    tl.store(statistics_ptr + channels + channel, (base - (mean - back)) + (delta - back), mask=there)
    tl.store(statistics_ptr + 2 * channels + channel, tl.rsqrt(var + eps), mask=there)
    if HAS_MEAN:
        old = tl.load(mean_ptr + channel * mean_step, mask=there, other=0.0).to(tl.float32)
        tl.store(mean_ptr + channel * mean_step, old * keep + mean * momentum, mask=there)
    if HAS_VAR:
        old = tl.load(var_ptr + channel * var_step, mask=there, other=0.0).to(tl.float32)
        tl.store(var_ptr + channel * var_step, old * keep + var * unbiased * momentum, mask=there)


@jit
def _batch_norm_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    eps: tl.tensor,
    weight_step: tl.tensor,
    bias_step: tl.tensor,
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
    y_channel: tl.tensor,
    y_stride0: tl.tensor,
    y_stride1: tl.tensor,
    y_stride2: tl.tensor,
    y_step: tl.tensor,
    x_channel: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    residual_channel: tl.tensor,
    residual_stride0: tl.tensor,
    residual_stride1: tl.tensor,
    residual_stride2: tl.tensor,
    residual_step: tl.tensor,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    TRAINING: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Every ``parts``-th tile of some channels, the last one first: what the statistics read last is in L2 still."""
    block = tl.program_id(0).to(tl.int64)
    channel = channels_of(block, LAST, BLOCK_COLUMNS)
    there = channel < channels
    mean, rest, scale = statistics_of(
        mean_ptr, rest_ptr, scale_ptr, mean_step, scale_step, channel, channels, eps, TRAINING
    )
    if HAS_WEIGHT:
        scale *= tl.load(weight_ptr + channel * weight_step, mask=there, other=0.0).to(tl.float32)
    shift = tl.zeros(mean.shape, tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias_ptr + channel * bias_step, mask=there, other=0.0).to(tl.float32)
    if not LAST:
        y_ptr += block * y_channel
        x_ptr += block * x_channel
        residual_ptr += block * residual_channel
    for tile in range(tl.program_id(1), tiles, parts):
        row, column, inside = place(tiles - 1 - tile, block, column_tiles, rows, width, LAST, BLOCK_ROWS, BLOCK_COLUMNS)
        x_at = row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2) + column * x_step
        x = tl.load(x_ptr + x_at, mask=inside, other=0.0)
        y = ((x.to(tl.float32) - mean) - rest) * scale + shift
        if HAS_RESIDUAL:
            at = row_offset(row, size1, size2, residual_stride0, residual_stride1, residual_stride2)
            y += tl.load(residual_ptr + at + column * residual_step, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            y = tl.where(y < 0.0, 0.0, y)  # of NaN, NaN
        at = row_offset(row, size1, size2, y_stride0, y_stride1, y_stride2) + column * y_step
        tl.store(y_ptr + at, y, mask=inside)


@torch.library.custom_op("reference_kernels::batch_norm_statistics", mutates_args=("running_mean", "running_var"))
def _statistics(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """Mean, what its rounding left, and reciprocal root of the variance: float32 ``(3, channels)``; in two launches."""
    channels = x.shape[1]
    statistics = torch.empty((3, channels), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return statistics.zero_()
    plan = plan_of(x)
    tile, parts = plan.tile, plan.parts
    sums = torch.empty((4, parts, channels), dtype=torch.float32, device=x.device)
    count = x.numel() // channels
    with placed(x.device):
        _moments_kernel[(plan.blocks, parts)](
            sums,
            *plan.rows.tensors,
            *plan.numbers,
            *strides_of(plan),
            LAST=plan.last,
            FOLDED=plan.folded(x.element_size()),
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
        together, side = combined(parts)
        _combine_kernel[(triton.cdiv(channels, side),)](
            statistics,
            statistics if running_mean is None else running_mean,
            statistics if running_var is None else running_var,
            sums,
            eps,
            1 - momentum,
            momentum,
            count / max(count - 1, 1),
            count,
            parts,
            channels,
            1 if running_mean is None else running_mean.stride(0),
            1 if running_var is None else running_var.stride(0),
            HAS_MEAN=running_mean is not None,
            HAS_VAR=running_var is not None,
            PARTS=together,
            CHANNELS=side,
            num_warps=4,
        )
    return statistics


@_statistics.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty((3, x.shape[1]), dtype=torch.float32, device=x.device)


@torch.library.custom_op("reference_kernels::batch_norm", mutates_args=())
def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    mean: torch.Tensor,
    rest: torch.Tensor | None,
    scale: torch.Tensor,
    eps: float,
    relu: bool,
) -> torch.Tensor:
    """``rest`` is there in training, and ``scale`` the reciprocal root; without it, in evaluation, the variance."""
    y = like(x)
    if x.numel() == 0:
        return y
    plan = plan_of(y, x, x if residual is None else residual, alone=rest is None)
    tile = plan.tile
    with placed(x.device):
        _batch_norm_kernel[(plan.blocks, plan.parts)](
            *plan.rows.tensors,
            x if weight is None else weight,
            x if bias is None else bias,
            mean,
            mean if rest is None else rest,
            scale,
            eps,
            1 if weight is None else weight.stride(0),
            1 if bias is None else bias.stride(0),
            mean.stride(0),
            scale.stride(0),
            *plan.numbers,
            *strides_of(plan),
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            RELU=relu,
            TRAINING=rest is not None,
            LAST=plan.last,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return y


@_batch_norm.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, _, mean, rest, scale, ctx.eps, relu = inputs
    ctx.dtypes = [None if each is None else each.dtype for each in (weight, bias)]
    ctx.save_for_backward(x, output if relu else None, weight, mean, rest, scale)


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    of_x, of_weight, of_bias, of_residual = ctx.needs_input_grad[:4]
    relu = ctx.saved_tensors[1] is not None
    dx, sums, dresidual = batch_norm_backward(dy, *ctx.saved_tensors, ctx.eps, of_residual and relu)
    dweight, dbias = (
        each.to(dtype, copy=True) if needed else None
        for each, dtype, needed in zip(sums, ctx.dtypes, (of_weight, of_bias), strict=True)
    )
    passed = (dresidual if relu else dy) if of_residual else None
    return dx if of_x else None, dweight, dbias, passed, None, None, None, None, None


_batch_norm.register_autograd(_differentiate, setup_context=_save)


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    relu: bool = False,
) -> torch.Tensor:
    """``relu((x - mean) / sqrt(var + eps) * weight + bias + residual)`` by channel, of ``x``'s shape and dtype.

    ``x`` is ``(batch, channels, *space)`` of 2 to 5 dimensions in float32, float16 or bfloat16, ``residual`` of its
    shape and dtype; the vectors are ``(channels,)``, each in one of the floating dtypes. Any strides; the result is
    dense, with its channels last if those of ``x`` are. In ``training`` the running statistics, where given, are
    written: see `batch_norm_reference`. Differentiable once by ``x``, ``weight``, ``bias`` and ``residual``.

    Raises `TypeError` for other or mixed dtypes; `ValueError` for shapes that do not fit, a single element a channel in
    training, running statistics in the memory of another vector, none of them in evaluation, numbers out of range, or
    mixed devices.
    """
    name = "batch_norm"
    check_tensor(name, "x", x, x, FLOATS)
    if not 2 <= x.ndim <= 5:
        raise ValueError(f"{name}: x has {x.ndim} dimensions, supported: (batch, channels) and up to three of space")
    vectors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    for label, each in vectors.items():
        if each is None:
            continue
        check_tensor(name, label, each, x, FLOATS)
        if each.shape != x.shape[1:2]:
            raise ValueError(f"{name}: {label} has shape {tuple(each.shape)}, x needs ({x.shape[1]},)")
    if residual is not None:
        check_tensor(name, "residual", residual, x, (x.dtype,))
        if residual.shape != x.shape:
            raise ValueError(
                f"{name}: x has shape {tuple(x.shape)}, residual {tuple(residual.shape)}; they must be equal, expand it"
            )
    if not (0 <= momentum <= 1 and eps >= 0):
        raise ValueError(f"{name}: momentum={momentum}, eps={eps}; allowed: momentum from 0 to 1, eps from 0")
    mean, rest, scale = running_mean, None, running_var
    if training:
        if x.shape[1] and x.numel() == x.shape[1]:
            raise ValueError(f"{name}: x has shape {tuple(x.shape)}, one value a channel; training needs more than one")
        check_apart(name, "running_mean", running_mean, weight=weight, bias=bias, running_var=running_var)
        check_apart(name, "running_var", running_var, weight=weight, bias=bias)
        statistics = _statistics(x.detach(), running_mean, running_var, float(momentum), float(eps))
        mean, rest, scale = statistics.unbind(0)
    if mean is None or scale is None:
        raise ValueError(f"{name}: training=False takes running_mean and running_var; one of them is missing")
    y: torch.Tensor = _batch_norm(x, weight, bias, residual, mean, rest, scale, float(eps), relu)
    return y
