"""Fused softmax: scale, additive bias, boolean mask, maximum, exponential, sum and division in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_kernels._common import FLOATS, Rows, RowTile, broadcasts, check_tensor, jit, placed, row_offset, row_tile


def config(width: int) -> RowTile:
    """Tile for rows of ``width`` elements. Up to 16384 a row stays in registers and is read once; beyond, it is read
    twice in steps of 8192, the second time from L2."""
    return row_tile(width, whole=16384, step=8192)


@jit
def _logits(
    x_row: tl.tensor,
    keep_row: tl.tensor,
    bias_row: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    scale: tl.tensor,
    x_step: tl.tensor,
    keep_step: tl.tensor,
    bias_step: tl.tensor,
    HAS_KEEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """The scaled and masked input of one tile in float32; ``-inf`` outside the row, where it adds nothing."""
    logits = tl.load(x_row + column * x_step, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_BIAS:
        logits += tl.load(bias_row + column * bias_step, mask=inside, other=0.0).to(tl.float32)
    if HAS_KEEP:
        inside = inside & (tl.load(keep_row + column * keep_step, mask=inside, other=0) != 0)
    return tl.where(inside, logits, float("-inf"))


@jit
def _softmax_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    keep_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale: tl.tensor,
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
    LOOP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of ``BLOCK_ROWS`` rows. ``y`` is contiguous ``(rows, width)``; the inputs have strides of their own."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_inside = row < rows
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
    keep_row = keep_ptr
    bias_row = bias_ptr
    if HAS_KEEP:
        keep_row = keep_ptr + row_offset(row, size1, size2, keep_stride0, keep_stride1, keep_stride2)
    if HAS_BIAS:
        bias_row = bias_ptr + row_offset(row, size1, size2, bias_stride0, bias_stride1, bias_stride2)
    y_row = y_ptr + row * width

    if LOOP:
        top = tl.full([BLOCK_ROWS, 1], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS, 1], tl.float32)
        for start in range(0, width, BLOCK_COLUMNS):
            at = start + column
            inside = row_inside & (at < width)
            logits = _logits(
                x_row, keep_row, bias_row, at, inside, scale, x_step, keep_step, bias_step, HAS_KEEP, HAS_BIAS
            )
            new_top = tl.maximum(top, tl.max(logits, axis=1, keep_dims=True))
            # As long as nothing but -inf was seen, -inf - -inf would poison rows whose first block is masked.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(logits - shift), axis=1, keep_dims=True)
            top = new_top
        shift = tl.where(top == float("-inf"), 0.0, top)
        for start in range(0, width, BLOCK_COLUMNS):
            at = start + column
            inside = row_inside & (at < width)
            logits = _logits(
                x_row, keep_row, bias_row, at, inside, scale, x_step, keep_step, bias_step, HAS_KEEP, HAS_BIAS
            )
            tl.store(y_row + at, tl.exp(logits - shift) / total, mask=inside)
    else:
        inside = row_inside & (column < width)
        logits = _logits(
            x_row, keep_row, bias_row, column, inside, scale, x_step, keep_step, bias_step, HAS_KEEP, HAS_BIAS
        )
        power = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
        tl.store(y_row + column, power / tl.sum(power, axis=1, keep_dims=True), mask=inside)


@torch.library.custom_op("reference_kernels::softmax", mutates_args=())
def _softmax(x: torch.Tensor, scale: float, keep: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    # A bool is a byte; as uint8 it needs no special pointer type. An absent input stands in by x, never dereferenced.
    rows = Rows.of(
        x,
        x if keep is None else keep.view(torch.uint8).broadcast_to(x.shape),
        x if bias is None else bias.broadcast_to(x.shape),
    )
    tile = config(rows.width)
    with placed(x.device):
        _softmax_kernel[(triton.cdiv(rows.count, tile.rows),)](
            y,
            *rows.tensors,
            scale,
            rows.count,
            rows.width,
            *rows.sizes[1:],
            *rows.strides[0],
            *rows.strides[1],
            *rows.strides[2],
            HAS_KEEP=keep is not None,
            HAS_BIAS=bias is not None,
            LOOP=tile.loop,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return y


@_softmax.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def softmax(
    x: torch.Tensor,
    scale: float = 1.0,
    keep: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale * x + bias)`` over the last dimension where ``keep``; contiguous, of ``x``'s shape and dtype.

    ``x`` is ``(*batch, n)`` in float32, float16 or bfloat16 with any strides; ``keep`` (bool) and ``bias`` (one of
    the same dtypes) broadcast to it. See `softmax_reference` for the rounding and for rows with nothing to keep.
    Raises `TypeError` for other dtypes; `ValueError` for a 0-d ``x``, a mask that does not broadcast, or mixed devices.
    """
    check_tensor("softmax", "x", x, x, FLOATS)
    if x.ndim == 0:
        raise ValueError("softmax: x has no dimension to sum over; give it at least one")
    for name, mask, dtypes in (("keep", keep, (torch.bool,)), ("bias", bias, FLOATS)):
        if mask is None:
            continue
        check_tensor("softmax", name, mask, x, dtypes)
        if not broadcasts(mask.shape, x.shape):
            raise ValueError(f"softmax: {name} of shape {tuple(mask.shape)} does not broadcast to x's {tuple(x.shape)}")
    y: torch.Tensor = _softmax(x, float(scale), keep, bias)
    return y
