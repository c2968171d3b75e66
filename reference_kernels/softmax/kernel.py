"""Fused softmax: scale, additive bias, masks, maximum, exponential, sum, division and dropout in one launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._common import (
    FLOATS,
    Rows,
    RowTile,
    broadcasts,
    check_tensor,
    covered,
    placed,
    row_offset,
    row_tile,
)
from reference_kernels._dropout import check_dropout
from reference_kernels._powers import exponential, finite, joined, raised
from reference_kernels.softmax.backward import bias_gradient, input_gradient
from reference_kernels.softmax.logits import Masking, masked_jit, masked_logits, surviving


def config(width: int) -> RowTile:
    """Tile for rows of ``width`` elements. Up to 16384 a row stays in registers and is read once; beyond, it is read
    twice, the second time from what L2 still holds: in steps of 8192, and 16384 past 32768. Steps and 8192 at 16
    elements a thread, others at 32: of 16384, two programs share a multiprocessor."""
    tile = row_tile(width, whole=16384, step=8192 if width <= 32768 else 16384)
    return replace(tile, warps=max(4, tile.columns // 512)) if tile.loop or tile.columns == 8192 else tile


@masked_jit
def _softmax_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    keep_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale: tl.tensor,
    diagonal: tl.tensor,
    queries: tl.tensor,
    seed: tl.tensor,
    threshold: tl.tensor,
    factor: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    keep_stride0: tl.tensor,
    keep_stride1: tl.tensor,
    keep_stride2: tl.tensor,
    keep_step: tl.tensor,
    bias_stride0: tl.tensor,
    bias_stride1: tl.tensor,
    bias_stride2: tl.tensor,
    bias_step: tl.tensor,
    HAS_KEEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    LOOP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of ``BLOCK_ROWS`` rows. ``y`` is contiguous ``(rows, width)``; the inputs have strides of their own."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    if DROPOUT:  # read by fours, as the words of Philox come: in vectors of more they would have to change threads
        column = tl.max_contiguous(column, [1, 4])
    x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
    keep_row = keep_ptr
    bias_row = bias_ptr
    if HAS_KEEP:
        keep_row = keep_ptr + row_offset(row, size1, size2, keep_stride0, keep_stride1, keep_stride2)
    if HAS_BIAS:
        bias_row = bias_ptr + row_offset(row, size1, size2, bias_stride0, bias_stride1, bias_stride2)
    y_row = y_ptr + row * width
    end = width
    last = row
    if CAUSAL:  # a row's last column; no block beyond the last of all rows is looked at
        last = row % queries + diagonal
        end = tl.minimum(tl.max(last), width - 1) + 1

    if LOOP:
        group: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth  # so many a thread loads at once
        top = tl.full([BLOCK_ROWS, BLOCK_COLUMNS // group], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS // group], tl.float32)
        for start in range(0, end, BLOCK_COLUMNS):
            at = start + column
            inside = covered(row, rows, at, width, EVEN)
            logits, _, _ = masked_logits(
                x_row,
                keep_row,
                bias_row,
                at,
                inside,
                last,
                scale,
                x_step,
                keep_step,
                bias_step,
                HAS_KEEP,
                HAS_BIAS,
                CAUSAL,
                "evict_last",
            )
            top, shrink, powers = raised(top, logits, group)
            total = total * shrink + tl.sum(powers, axis=2)
        top, shrink = joined(top)
        shift = finite(top)
        share = 1.0 / tl.sum(total * shrink, axis=1, keep_dims=True)
        blocks = (width + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
        for done in range(blocks):  # what was read last is nearest: backwards
            behind = (blocks - 1 - done) * BLOCK_COLUMNS
            at = behind + column
            inside = covered(row, rows, at, width, EVEN)
            logits, _, _ = masked_logits(
                x_row,
                keep_row,
                bias_row,
                at,
                inside,
                last,
                scale,
                x_step,
                keep_step,
                bias_step,
                HAS_KEEP,
                HAS_BIAS,
                CAUSAL,
                "evict_first",
            )
            y = exponential(logits - shift) * share
            if DROPOUT:
                kept = surviving(row, behind, width, seed, threshold, BLOCK_ROWS, BLOCK_COLUMNS)
                y = tl.where(kept, y * factor, 0.0)
            tl.store(y_row + at, y, mask=inside, eviction_policy="evict_first")
    else:
        inside = covered(row, rows, column, width, EVEN)
        logits, _, _ = masked_logits(
            x_row,
            keep_row,
            bias_row,
            column,
            inside,
            last,
            scale,
            x_step,
            keep_step,
            bias_step,
            HAS_KEEP,
            HAS_BIAS,
            CAUSAL,
            "",
        )
        power = exponential(logits - tl.max(logits, axis=1, keep_dims=True))
        y = power * (1.0 / tl.sum(power, axis=1, keep_dims=True))
        if DROPOUT:
            kept = surviving(row, 0, width, seed, threshold, BLOCK_ROWS, BLOCK_COLUMNS)
            y = tl.where(kept, y * factor, 0.0)
        tl.store(y_row + column, y, mask=inside)


@torch.library.custom_op("reference_kernels::softmax", mutates_args=())
def _softmax(
    x: torch.Tensor,
    scale: float,
    keep: torch.Tensor | None,
    bias: torch.Tensor | None,
    diagonal: int | None,
    seed: int,
    p: float,
) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    masking = Masking(keep, bias, scale, diagonal, seed, p)
    rows = Rows.of(*masking.as_rows(x))
    tile = config(rows.width)
    with placed(x.device):
        _softmax_kernel[(triton.cdiv(rows.count, tile.rows),)](
            y,
            *rows.tensors,
            *masking.numbers(x),
            rows.count,
            rows.width,
            *rows.layout,
            **masking.flags(),
            HAS_BIAS=bias is not None,
            LOOP=tile.loop,
            EVEN=rows.width % tile.columns == 0,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return y


@_softmax.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("reference_kernels::softmax_backward", mutates_args=())
def _softmax_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    keep: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    diagonal: int | None,
    seed: int,
    p: float,
    of_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by ``x`` and by ``bias``; the latter is empty where it is not needed."""
    dx, dbias = _gradients(x, bias if of_bias else None)
    if x.numel() == 0:
        return dx, dbias.zero_()
    masking = Masking(keep, bias, scale, diagonal, seed, p)
    statistics = input_gradient(dx, dy, x, masking, of_bias)
    if statistics is not None and bias is not None:
        bias_gradient(dbias, statistics, dy, x, masking)
    return dx, dbias


def _gradients(x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return dx, dx.new_empty(0) if bias is None else torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)


@_softmax_backward.register_fake
def _(
    _dy: torch.Tensor,
    x: torch.Tensor,
    _keep: torch.Tensor | None,
    bias: torch.Tensor | None,
    *options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _gradients(x, bias if options[-1] else None)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- passed by name
    x, scale, keep, bias, *rest = inputs
    ctx.save_for_backward(x, keep, bias)
    ctx.options = scale, *rest


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    of_bias = ctx.needs_input_grad[3]
    dx, dbias = _softmax_backward(dy, *ctx.saved_tensors, *ctx.options, of_bias)
    return dx, None, None, dbias if of_bias else None, None, None, None


_softmax.register_autograd(_differentiate, setup_context=_save)


def softmax(
    x: torch.Tensor,
    scale: float = 1.0,
    keep: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    diagonal: int | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
) -> torch.Tensor:
    """``dropout(softmax(scale * x + bias))`` over the last dimension where ``keep``; contiguous, of ``x``'s shape and
    dtype.

    ``x`` is ``(*batch, n)`` in float32, float16 or bfloat16 with any strides; ``keep`` (bool) and ``bias`` (one of
    the same dtypes) broadcast to it. ``diagonal`` masks as `torch.tril` does: row ``i`` of the last two dimensions
    keeps columns up to ``i + diagonal``, so that 0 is causal attention. ``seed``, from 0 to 2**63 - 1, and an element's
    row and column decide what dropout drops. See `softmax_reference` for the rounding and for rows with nothing to
    keep. Differentiable once by ``x`` and ``bias``.

    Raises `TypeError` for other dtypes or a seed that is no whole number; `ValueError` for too few dimensions, a mask
    that does not broadcast, numbers out of range, or mixed devices.
    """
    check_tensor("softmax", "x", x, x, FLOATS)
    if x.ndim == 0:
        raise ValueError("softmax: x has no dimension to sum over; give it at least one")
    if diagonal is not None and x.ndim < 2:
        raise ValueError(f"softmax: diagonal is {diagonal}, but x of shape {tuple(x.shape)} has no rows and columns")
    if diagonal is not None and not -(2**31) <= diagonal < 2**31:
        raise ValueError(f"softmax: diagonal is {diagonal}, supported: -2**31 to 2**31 - 1")
    check_dropout("softmax", seed, dropout_p, "dropout_p")
    for name, mask, dtypes in (("keep", keep, (torch.bool,)), ("bias", bias, FLOATS)):
        if mask is None:
            continue
        check_tensor("softmax", name, mask, x, dtypes)
        if not broadcasts(mask.shape, x.shape):
            raise ValueError(f"softmax: {name} of shape {tuple(mask.shape)} does not broadcast to x's {tuple(x.shape)}")
    if bias is not None and not _summable(bias.shape, x.shape):
        bias = bias.expand(x.shape)
    y: torch.Tensor = _softmax(x, float(scale), keep, bias, diagonal, seed, float(dropout_p))
    return y


def _summable(shape: torch.Size, whole: torch.Size) -> bool:
    """Whether the sums of a bias's gradient run over whole columns and at most three runs of leading dimensions.

    Others are left to torch, by `torch.Tensor.expand`: one number for a row, whose gradient is 0 but for rounding, and
    broadcasting in every other of four dimensions.
    """
    padded = (1,) * (len(whole) - len(shape)) + tuple(shape)
    broadcast = [size == 1 for size, wanted in zip(padded[:-1], whole[:-1], strict=True) if wanted != 1]
    runs = sum(a != b for a, b in zip(broadcast[1:], broadcast, strict=False))
    return padded[-1] == whole[-1] and runs < 3
