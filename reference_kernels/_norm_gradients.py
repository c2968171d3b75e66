"""Gradients of layer and RMS normalisation: by the input row by row, by weight and bias as sums over rows in two steps.

The sums use no atomics: each program keeps those of its own rows, and a last launch adds them up, always in the same
order on the same device.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from reference_kernels._common import INTERPRETED, Rows, RowTile, jit, placed, row_offset, row_tile

PROCESSORS = 132  # of an H200, where there is no device to ask: kernels compiled without one


def config_backward(width: int, rows: int, device: torch.device) -> tuple[RowTile, int]:
    """Backward tile, and how many programs share ``rows`` rows of ``width`` elements on ``device``.

    Up to 8192 elements a row stays in registers, and so do a program's sums for weight and bias while it walks through
    its rows. That is five values an element: 16 elements a thread take 121 registers (bfloat16, cuobjdump, sm_90), so
    16 warps fill a multiprocessor, and more programs than that would only leave more sums to add up.
    """
    tile = row_tile(width, whole=8192, step=4096)
    tile = replace(tile, warps=max(4, min(16, tile.rows * tile.columns // 512)))
    tiles = triton.cdiv(rows, tile.rows)
    return tile, tiles if tile.loop else min(tiles, _processors(device) * (16 // tile.warps))


def config_columns(width: int, rows: int, device: torch.device) -> tuple[RowTile, int]:
    """Tile of the sums over rows where a row is too long to keep them in registers, and into how many parts the rows
    are cut: four programs of 4 warps for each multiprocessor, and 256 bytes of a bfloat16 row at a time."""
    tile = RowTile(32, 128, 4, loop=True)
    parts = triton.cdiv(4 * _processors(device), triton.cdiv(width, tile.columns))
    return tile, min(parts, triton.cdiv(rows, tile.rows))


def _processors(device: torch.device) -> int:
    """Multiprocessors of ``device``; one where it is interpreted, so that small cases have programs of many rows."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 1 if INTERPRETED else PROCESSORS


@jit
def _upstream(
    dy_row: tl.tensor,
    x_row: tl.tensor,
    mean: tl.tensor,
    rest: tl.tensor,
    scale: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    dy_step: tl.tensor,
    x_step: tl.tensor,
    CENTRED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Upstream gradient and normalised input of one tile in float32, 0 outside."""
    dy = tl.load(dy_row + column * dy_step, mask=inside, other=0.0).to(tl.float32)
    wide = tl.load(x_row + column * x_step, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        wide = (wide - mean) - rest
    return dy, tl.where(inside, wide * scale, 0.0)


@jit
def _statistics(
    statistics_ptr: tl.tensor, row: tl.tensor, rows: tl.tensor, CENTRED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The rows' mean, what its rounding left of it, and reciprocal root; the last is alone where no mean is taken."""
    inside = row < rows
    mean = tl.zeros(row.shape, tl.float32)
    rest = tl.zeros(row.shape, tl.float32)
    scale_row = statistics_ptr + row
    if CENTRED:
        mean = tl.load(statistics_ptr + row, mask=inside, other=0.0)
        rest = tl.load(statistics_ptr + rows + row, mask=inside, other=0.0)
        scale_row += rows + rows
    return mean, rest, tl.load(scale_row, mask=inside, other=0.0)


@jit
def _weighted(
    dy: tl.tensor,
    weight_ptr: tl.tensor,
    column: tl.tensor,
    width: tl.tensor,
    weight_step: tl.tensor,
    HAS_WEIGHT: tl.constexpr,
    ONE_MORE: tl.constexpr,
) -> tl.tensor:
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column * weight_step, mask=column < width, other=0.0).to(tl.float32)
        if ONE_MORE:
            weight += 1.0
        dy = dy * weight
    return dy


@jit
def _rows_backward_kernel(
    dx_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    dtotal_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    programs: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
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
    dtotal_stride0: tl.tensor,
    dtotal_stride1: tl.tensor,
    dtotal_stride2: tl.tensor,
    dtotal_step: tl.tensor,
    weight_step: tl.tensor,
    HAS_DTOTAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CENTRED: tl.constexpr,
    ONE_MORE: tl.constexpr,
    SUM_WEIGHT: tl.constexpr,
    SUM_BIAS: tl.constexpr,
    LOOP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Every ``programs``-th tile of the input's gradient, contiguous ``(rows, width)``, and unless ``LOOP`` this
    program's row of ``parts``, ``(2, programs, width)``: its rows' share of the gradients of weight and bias."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, rows, programs * BLOCK_ROWS):
        row = first + program * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        row_inside = row < rows
        mean, rest, scale = _statistics(statistics_ptr, row, rows, CENTRED)
        dy_row = dy_ptr + row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2)
        x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
        dtotal_row = dtotal_ptr
        if HAS_DTOTAL:
            dtotal_row = dtotal_ptr + row_offset(row, size1, size2, dtotal_stride0, dtotal_stride1, dtotal_stride2)
        dx_row = dx_ptr + row * width
        if LOOP:
            shifts = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
            slopes = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
            for start in range(0, width, BLOCK_COLUMNS):
                at = start + column
                inside = row_inside & (at < width)
                dy, normalised = _upstream(dy_row, x_row, mean, rest, scale, at, inside, dy_step, x_step, CENTRED)
                dy = _weighted(dy, weight_ptr, at, width, weight_step, HAS_WEIGHT, ONE_MORE)
                if CENTRED:
                    shifts += dy
                slopes += dy * normalised
            shift = tl.sum(shifts, axis=1, keep_dims=True) / width
            tilt = tl.sum(slopes, axis=1, keep_dims=True) / width
            for start in range(0, width, BLOCK_COLUMNS):
                at = start + column
                inside = row_inside & (at < width)
                dy, normalised = _upstream(dy_row, x_row, mean, rest, scale, at, inside, dy_step, x_step, CENTRED)
                dy = _weighted(dy, weight_ptr, at, width, weight_step, HAS_WEIGHT, ONE_MORE)
                if CENTRED:
                    dy -= shift
                dx = (dy - normalised * tilt) * scale
                if HAS_DTOTAL:
                    dx += tl.load(dtotal_row + at * dtotal_step, mask=inside, other=0.0).to(tl.float32)
                tl.store(dx_row + at, dx, mask=inside)
        else:
            inside = row_inside & (column < width)
            dy, normalised = _upstream(dy_row, x_row, mean, rest, scale, column, inside, dy_step, x_step, CENTRED)
            if SUM_WEIGHT:
                dweight += dy * normalised
            if SUM_BIAS:
                dbias += dy
            dy = _weighted(dy, weight_ptr, column, width, weight_step, HAS_WEIGHT, ONE_MORE)
            tilt = tl.sum(dy * normalised, axis=1, keep_dims=True) / width
            if CENTRED:
                dy -= tl.sum(dy, axis=1, keep_dims=True) / width
            dx = (dy - normalised * tilt) * scale
            if HAS_DTOTAL:
                dx += tl.load(dtotal_row + column * dtotal_step, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx_row + column, dx, mask=inside)
    if not LOOP:
        kept = column < width
        if SUM_WEIGHT:
            tl.store(parts_ptr + program * width + column, tl.sum(dweight, axis=0, keep_dims=True), mask=kept)
        if SUM_BIAS:
            behind = (programs + program) * width
            tl.store(parts_ptr + behind + column, tl.sum(dbias, axis=0, keep_dims=True), mask=kept)


@jit
def _columns_kernel(
    parts_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
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
    CENTRED: tl.constexpr,
    SUM_WEIGHT: tl.constexpr,
    SUM_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One block of columns of one of ``parts``, ``(2, parts, width)``: every ``parts``-th tile of rows, added up."""
    part = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, rows, parts * BLOCK_ROWS):
        row = first + part * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        mean, rest, scale = _statistics(statistics_ptr, row, rows, CENTRED)
        dy_row = dy_ptr + row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2)
        x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
        inside = (row < rows) & (column < width)
        dy, normalised = _upstream(dy_row, x_row, mean, rest, scale, column, inside, dy_step, x_step, CENTRED)
        dweight += dy * normalised
        dbias += dy
    kept = column < width
    if SUM_WEIGHT:
        tl.store(parts_ptr + part * width + column, tl.sum(dweight, axis=0, keep_dims=True), mask=kept)
    if SUM_BIAS:
        tl.store(parts_ptr + (parts + part) * width + column, tl.sum(dbias, axis=0, keep_dims=True), mask=kept)


def input_gradient(
    dx: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    dtotal: torch.Tensor | None,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
    sums: tuple[bool, bool],
    one_more: bool = False,
) -> torch.Tensor | None:
    """Write the gradient by ``x`` into the contiguous ``dx``, at least one element of them; ``dtotal`` is added to it.

    ``statistics`` are float32: ``(3, rows)`` of a layer norm, ``(1, rows)`` of an RMS norm, which takes no mean;
    ``one_more`` than the weight is what the input was multiplied by.

    Returns the partial sums for weight and bias, float32 ``(2, parts, width)``, without the bias's ``(1, parts,
    width)``, of which those asked for by ``sums`` are written; ``None`` where nothing is asked for, or a row is too
    long to sum along the way (`sums_over_rows`).
    """
    rows = Rows.of(dy, x, dy if dtotal is None else dtotal)
    tile, programs = config_backward(rows.width, rows.count, x.device)
    along = any(sums) and not tile.loop
    parts = torch.empty((1 + sums[1], programs, rows.width), dtype=torch.float32, device=x.device) if along else None
    with placed(x.device):
        _rows_backward_kernel[(programs,)](
            dx,
            dx if parts is None else parts,
            statistics,
            *rows.tensors,
            x if weight is None else weight,
            programs,
            rows.count,
            rows.width,
            *rows.layout,
            1 if weight is None else weight.stride(0),
            HAS_DTOTAL=dtotal is not None,
            HAS_WEIGHT=weight is not None,
            CENTRED=len(statistics) > 1,
            ONE_MORE=one_more,
            SUM_WEIGHT=along and sums[0],
            SUM_BIAS=along and sums[1],
            LOOP=tile.loop,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return parts


def sums_over_rows(
    dy: torch.Tensor, x: torch.Tensor, statistics: torch.Tensor, sums: tuple[bool, bool]
) -> torch.Tensor:
    """The partial sums of `input_gradient` by a launch of their own, which reads both tensors once more."""
    rows = Rows.of(dy, x)
    tile, count = config_columns(rows.width, rows.count, x.device)
    parts = torch.empty((1 + sums[1], count, rows.width), dtype=torch.float32, device=x.device)
    with placed(x.device):
        _columns_kernel[(triton.cdiv(rows.width, tile.columns), count)](
            parts,
            statistics,
            *rows.tensors,
            count,
            rows.count,
            rows.width,
            *rows.layout,
            CENTRED=len(statistics) > 1,
            SUM_WEIGHT=sums[0],
            SUM_BIAS=sums[1],
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return parts
