"""Sums in parts: the second of two steps, the same for gradients of weight and bias, and for products.

The first step leaves float32 partial sums, of each program that walked through some of the rows or columns; here they
are added up, always in the same order: no atomics, the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_kernels._common import RowTile, jit, placed

SUMMED = RowTile(32, 64, 4, loop=True)  # partial sums that a program adds up at a time
ADDED, ADDED_WARPS = 1024, 4  # elements of a product that a program adds up


@jit
def _parts_kernel(
    dweight_ptr: tl.tensor,
    dbias_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    parts: tl.tensor,
    width: tl.tensor,
    SUM_WEIGHT: tl.constexpr,
    SUM_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """A block of the gradients of weight and bias, ``(width,)``: the sum of their ``parts``, ``(2, parts, width)``."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    lane = tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, parts, BLOCK_ROWS):
        part = first + lane
        inside = (part < parts) & (column < width)
        if SUM_WEIGHT:
            dweight += tl.load(parts_ptr + part * width + column, mask=inside, other=0.0)
        if SUM_BIAS:
            dbias += tl.load(parts_ptr + (parts + part) * width + column, mask=inside, other=0.0)
    if SUM_WEIGHT:
        tl.store(dweight_ptr + column, tl.sum(dweight, axis=0, keep_dims=True), mask=column < width)
    if SUM_BIAS:
        tl.store(dbias_ptr + column, tl.sum(dbias, axis=0, keep_dims=True), mask=column < width)


def summed_parts(dweight: torch.Tensor, dbias: torch.Tensor, parts: torch.Tensor, sums: tuple[bool, bool]) -> None:
    """Add up ``parts`` of ``(2, count, width)``, or of ``(1, count, width)`` without the bias's, into those of the
    ``(width,)`` gradients that ``sums`` requires."""
    _, count, width = parts.shape
    with placed(parts.device):
        _parts_kernel[(triton.cdiv(width, SUMMED.columns),)](
            dweight,
            dbias,
            parts,
            count,
            width,
            SUM_WEIGHT=sums[0],
            SUM_BIAS=sums[1],
            BLOCK_ROWS=SUMMED.rows,
            BLOCK_COLUMNS=SUMMED.columns,
            num_warps=SUMMED.warps,
        )


@jit
def _added_kernel(
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    parts: tl.tensor,
    numel: tl.tensor,
    width: tl.tensor,
    apart: tl.tensor,
    out_stride0: tl.tensor,
    out_stride1: tl.tensor,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``BLOCK`` elements of the sum of parts that are ``apart`` from each other. ``FLAT``: ``out`` is contiguous."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        total += tl.load(parts_ptr + tl.cast(part, tl.int64) * apart + at, mask=inside, other=0.0)
    out_at = at
    if not FLAT:
        out_at = at // width * out_stride0 + at % width * out_stride1
    tl.store(out_ptr + out_at, total, mask=inside)


def added_parts(out: torch.Tensor, parts: torch.Tensor) -> None:
    """Fill ``out`` ``(rows, width)``, of any strides and with elements, with the sum of contiguous float32 ``parts``
    ``(count, rows or more, width)``."""
    count, rows, width = parts.shape
    with placed(out.device):
        _added_kernel[(triton.cdiv(out.numel(), ADDED),)](
            out,
            parts,
            count,
            out.numel(),
            width,
            rows * width,
            *out.stride(),
            FLAT=out.is_contiguous(),
            BLOCK=ADDED,
            num_warps=ADDED_WARPS,
        )
