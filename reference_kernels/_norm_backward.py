"""Gradients of layer and RMS normalisation: by the input row by row, by weight and bias as sums over rows in two steps.

The sums use no atomics: each program keeps those of its own rows, and a last launch adds them up, always in the same
order on the same device.

A row that fits into one program's registers is read once, and its program walks on to others with the sums for weight
and bias in registers (`_rows_backward_kernel`), where these leave room for it with the next two on their way. A longer
one is cut: what a whole row decides, two sums, is found first (`_tilts_kernel`), then all gradients at once by blocks
of columns (`_columns_kernel`), which reads everything again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from reference_kernels._common import (
    INTERPRETED,
    Rows,
    RowTile,
    covered,
    jit,
    placed,
    row_offset,
    row_sums,
    row_tile,
    widened,
)

PROCESSORS = 132  # of an H200, where there is no device to ask: kernels compiled without one


def config_backward(
    width: int, rows: int, itemsize: int, device: torch.device, stages: int, *, interpreted: bool = INTERPRETED
) -> tuple[RowTile, int]:
    """Backward tile, and how many programs share ``rows`` rows of ``width`` elements on ``device``.

    Up to 32 KiB a row stays in registers, and so do a program's sums for weight and bias while it walks through its
    rows. Programs fill the registers of a multiprocessor, by 128 a thread or, from 8 warps on in one of ``stages``, by
    64 (`config_registers`): of two or more, some load while others add up. More would wait for those to end, and leave
    more sums to add up.
    """
    tile = row_tile(width, whole=32768 // itemsize, step=8192, interpreted=interpreted)
    if tile.columns in (1024, 2048) and width % 16 == 0 and not interpreted:
        tile = replace(tile, rows=4096 // tile.columns)
    else:
        tile = replace(tile, warps=max(4, tile.rows * tile.columns // 512))
    together = min(4, (32 if stages == 1 else 16) // tile.warps)
    return tile, min(triton.cdiv(rows, tile.rows), together * _processors(device))


def config_stages(rows: Rows, itemsize: int, *, interpreted: bool = INTERPRETED) -> int:
    """In how many stages a program goes through its rows: in three, two are on their way to shared memory, by copies
    that leave registers alone, while one is worked at.

    A thread then has 128 registers, enough for a row, its sums and the weight, of which nothing is read twice. Wider
    rows leave no room for that (16384 elements at 64 registers), narrow ones have more programs to load meanwhile, and
    only what is read in vectors can be copied so.
    """
    if interpreted:
        return 3 if 64 < rows.width <= 128 else 1
    fits = itemsize == 2 and 2048 < rows.width <= 8192 and rows.width % 16 == 0
    even = all(step == 1 and not any(n % 16 for n in strides) for *strides, step in rows.strides)
    return 3 if fits and even and not any(tensor.data_ptr() % 16 for tensor in rows.tensors) else 1


def config_registers(width: int, warps: int, itemsize: int, stages: int) -> int | None:
    """Registers of a thread that the compiler must do with, so that 1024 threads run, or 512 in several ``stages``: a
    bfloat16 row read in vectors does, with both sums, but would take some more."""
    if stages > 1:
        return min(128, 2048 // warps)
    return 64 if warps >= 8 and width % 16 == 0 and itemsize == 2 else None


def config_columns(width: int, rows: int, device: torch.device) -> tuple[RowTile, int]:
    """Tile of the gradients of a row that is too long to keep in registers, and into how many parts ``rows`` rows are
    cut: eight programs of 4 warps for each multiprocessor, and 256 bytes of a bfloat16 row at a time."""
    tile = RowTile(8, 128, 4, loop=True)
    parts = triton.cdiv(8 * _processors(device), triton.cdiv(width, tile.columns))
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
    EVICT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Upstream gradient and normalised input of one tile in float32; the former is 0 outside, the latter finite unless
    the row's is not anywhere."""
    dy = widened(tl.load(dy_row + column * dy_step, mask=inside, other=0.0, eviction_policy=EVICT))
    wide = widened(tl.load(x_row + column * x_step, mask=inside, other=0.0, eviction_policy=EVICT))
    if CENTRED:
        return dy, (wide - mean) * scale - rest * scale
    else:  # noqa: RET505 -- compiled alone, or not at all
        return dy, wide * scale


@jit
def _statistics(
    statistics_ptr: tl.tensor, row: tl.tensor, rows: tl.tensor, CENTRED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The mean of each of ``row``, what its rounding left of it, and the reciprocal root; the last is
    alone where no mean is taken. As columns, but loaded before they are: a column is loaded once for each neighbour in
    a row, 8 times in bfloat16, and kept as often."""
    inside = row < rows
    mean = 0.0
    rest = 0.0
    scale_row = statistics_ptr + row
    if CENTRED:
        mean = tl.load(statistics_ptr + row, mask=inside, other=0.0)[:, None]
        rest = tl.load(statistics_ptr + rows + row, mask=inside, other=0.0)[:, None]
        scale_row += rows + rows
    return mean, rest, tl.load(scale_row, mask=inside, other=0.0)[:, None]


@jit
def _weights(
    weight_ptr: tl.tensor,
    column: tl.tensor,
    width: tl.tensor,
    weight_step: tl.tensor,
    HAS_WEIGHT: tl.constexpr,
    ONE_MORE: tl.constexpr,
    EVICT: tl.constexpr,
) -> tl.tensor:
    """What the normalised input was multiplied by, in float32."""
    weight = 1.0
    if HAS_WEIGHT:
        at = weight_ptr + column * weight_step
        weight = tl.load(at, mask=column < width, other=0.0, eviction_policy=EVICT).to(tl.float32)
        if ONE_MORE:
            weight += 1.0
    return weight


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
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Every ``programs``-th tile of the input's gradient, contiguous ``(rows, width)``, and this program's row of
    ``parts``, ``(2, programs, width)``: its rows' share of the gradients of weight and bias."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    share = 1.0 / width
    if STAGES > 1:
        weight = _weights(weight_ptr, column, width, weight_step, HAS_WEIGHT, ONE_MORE, "")
    for first in tl.range(program * BLOCK_ROWS, rows, programs * BLOCK_ROWS, num_stages=STAGES):
        lane = first + tl.arange(0, BLOCK_ROWS)
        mean, rest, scale = _statistics(statistics_ptr, lane, rows, CENTRED)
        row = lane[:, None]
        inside = covered(row, rows, column, width, EVEN)
        dy_row = dy_ptr + row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2)
        x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
        dy, normalised = _upstream(dy_row, x_row, mean, rest, scale, column, inside, dy_step, x_step, CENTRED, "")
        if SUM_WEIGHT:
            dweight += dy * normalised
        if SUM_BIAS:
            dbias += dy
        if STAGES > 1:
            dy *= weight
        else:
            dy *= _weights(weight_ptr, column, width, weight_step, HAS_WEIGHT, ONE_MORE, "")
        if CENTRED:
            tilt, shift = row_sums(dy * normalised, dy)
            if STAGES == 1:
                # Read again, from L1, rather than kept: beside both sums, that takes 77 instead of 121 registers
                # (bfloat16, 8192 columns). The policy also keeps the compiler from taking the two readings for one.
                dy, normalised = _upstream(
                    dy_row, x_row, mean, rest, scale, column, inside, dy_step, x_step, CENTRED, "evict_first"
                )
                dy *= _weights(weight_ptr, column, width, weight_step, HAS_WEIGHT, ONE_MORE, "evict_last")
            dx = dy * scale - (normalised * (tilt * share * scale) + shift * share * scale)
        else:
            tilt = tl.sum(dy * normalised, axis=1, keep_dims=True)
            dx = dy * scale - normalised * (tilt * share * scale)
        if HAS_DTOTAL:
            dtotal_row = dtotal_ptr + row_offset(row, size1, size2, dtotal_stride0, dtotal_stride1, dtotal_stride2)
            dx += widened(tl.load(dtotal_row + column * dtotal_step, mask=inside, other=0.0))
        tl.store(dx_ptr + row * width + column, dx, mask=inside)
    kept = column < width
    if SUM_WEIGHT:
        tl.store(parts_ptr + program * width + column, tl.sum(dweight, axis=0, keep_dims=True), mask=kept)
    if SUM_BIAS:
        behind = (programs + program) * width
        tl.store(parts_ptr + behind + column, tl.sum(dbias, axis=0, keep_dims=True), mask=kept)


@jit
def _tilts_kernel(
    tilts_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
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
    weight_step: tl.tensor,
    HAS_WEIGHT: tl.constexpr,
    CENTRED: tl.constexpr,
    ONE_MORE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """One of a row's ``BLOCKS`` shares of two sums, ``(2, rows, BLOCKS)``: of the weighted upstream gradient times the
    normalised input, and of the former alone where a mean was taken. A block past the row's end has a share of 0."""
    block = tl.program_id(0)
    column = block.to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    lane = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mean, rest, scale = _statistics(statistics_ptr, lane, rows, CENTRED)
    row = lane[:, None]
    inside = (row < rows) & (column < width)
    dy_row = dy_ptr + row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2)
    x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
    dy, normalised = _upstream(dy_row, x_row, mean, rest, scale, column, inside, dy_step, x_step, CENTRED, "")
    dy *= _weights(weight_ptr, column, width, weight_step, HAS_WEIGHT, ONE_MORE, "")
    at = tilts_ptr + row * BLOCKS + block
    if CENTRED:
        tilt, shift = row_sums(dy * normalised, dy)
        tl.store(at + rows * BLOCKS, shift, mask=row < rows)
    else:
        tilt = tl.sum(dy * normalised, axis=1, keep_dims=True)
    tl.store(at, tilt, mask=row < rows)


@jit
def _columns_kernel(
    dx_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    tilts_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    dtotal_ptr: tl.tensor,
    weight_ptr: tl.tensor,
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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """A block of columns of every ``parts``-th tile of rows: the input's gradient, and a row of ``parts``, ``(2, parts,
    width)``, for the gradients of weight and bias."""
    part = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    block = tl.arange(0, BLOCKS)[None, :]
    weight = _weights(weight_ptr, column, width, weight_step, HAS_WEIGHT, ONE_MORE, "")
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(part * BLOCK_ROWS, rows, parts * BLOCK_ROWS):
        lane = first + tl.arange(0, BLOCK_ROWS)
        mean, rest, scale = _statistics(statistics_ptr, lane, rows, CENTRED)
        row = lane[:, None]
        dy_row = dy_ptr + row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2)
        x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
        inside = (row < rows) & (column < width)
        dy, normalised = _upstream(dy_row, x_row, mean, rest, scale, column, inside, dy_step, x_step, CENTRED, "")
        # After what takes long to come: threads meet in a sum, and none goes on to read before.
        shares = tilts_ptr + row * BLOCKS + block
        tilt = tl.sum(tl.load(shares, mask=row < rows, other=0.0), axis=1, keep_dims=True) / width
        if SUM_WEIGHT:
            dweight += dy * normalised
        if SUM_BIAS:
            dbias += dy
        dy *= weight
        if CENTRED:
            shift = tl.sum(tl.load(shares + rows * BLOCKS, mask=row < rows, other=0.0), axis=1, keep_dims=True)
            dy -= shift / width
        dx = (dy - normalised * tilt) * scale
        if HAS_DTOTAL:
            dtotal_row = dtotal_ptr + row_offset(row, size1, size2, dtotal_stride0, dtotal_stride1, dtotal_stride2)
            dx += tl.load(dtotal_row + column * dtotal_step, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * width + column, dx, mask=inside)
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
) -> torch.Tensor:
    """Write the gradient by ``x`` into the contiguous ``dx``, at least one element of them; ``dtotal`` is added to it.

    ``statistics`` are float32: ``(3, rows)`` of a layer norm, ``(1, rows)`` of an RMS norm, which takes no mean;
    ``one_more`` than the weight is what the input was multiplied by.

    Returns the partial sums for weight and bias, float32 ``(2, parts, width)``, without the bias's ``(1, parts,
    width)``, of which those needed by ``sums`` are written; nothing in them where none is.
    """
    rows = Rows.of(dy, x, dy if dtotal is None else dtotal)
    stages = config_stages(rows, x.element_size())
    tile, programs = config_backward(rows.width, rows.count, x.element_size(), x.device, stages)
    if tile.loop:
        return _by_columns(dx, rows, tile, dtotal is not None, weight, statistics, sums, one_more)
    parts = _partial(programs if any(sums) else 0, rows.width, sums, x.device)
    with placed(x.device):
        _rows_backward_kernel[(programs,)](
            dx,
            parts,
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
            SUM_WEIGHT=sums[0],
            SUM_BIAS=sums[1],
            STAGES=stages,
            EVEN=rows.width % tile.columns == 0,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
            maxnreg=config_registers(rows.width, tile.warps, x.element_size(), stages),
        )
    return parts


def _partial(count: int, width: int, sums: tuple[bool, bool], device: torch.device) -> torch.Tensor:
    return torch.empty((1 + sums[1], count, width), dtype=torch.float32, device=device)


def _by_columns(
    dx: torch.Tensor,
    rows: Rows,
    tile: RowTile,
    has_dtotal: bool,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
    sums: tuple[bool, bool],
    one_more: bool,
) -> torch.Tensor:
    """`input_gradient` of rows longer than a program; ``tile`` is that of their shares of the two sums."""
    dy, x, _ = rows.tensors
    below, count = config_columns(rows.width, rows.count, x.device)
    parts = _partial(count if any(sums) else 0, rows.width, sums, x.device)
    blocks = triton.next_power_of_2(triton.cdiv(rows.width, tile.columns))
    tilts = torch.empty((len(statistics), rows.count, blocks), dtype=torch.float32, device=x.device)
    weighting = x if weight is None else weight, 1 if weight is None else weight.stride(0)
    flags = {"HAS_WEIGHT": weight is not None, "CENTRED": len(statistics) > 1, "ONE_MORE": one_more, "BLOCKS": blocks}
    with placed(x.device):
        _tilts_kernel[(blocks, triton.cdiv(rows.count, tile.rows))](
            tilts,
            statistics,
            dy,
            x,
            weighting[0],
            rows.count,
            rows.width,
            *rows.layout[:10],
            weighting[1],
            **flags,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
        _columns_kernel[(triton.cdiv(rows.width, below.columns), count)](
            dx,
            parts,
            tilts,
            statistics,
            *rows.tensors,
            weighting[0],
            count,
            rows.count,
            rows.width,
            *rows.layout,
            weighting[1],
            HAS_DTOTAL=has_dtotal,
            **flags,
            SUM_WEIGHT=sums[0],
            SUM_BIAS=sums[1],
            BLOCK_ROWS=below.rows,
            BLOCK_COLUMNS=below.columns,
            num_warps=below.warps,
        )
    return parts
