"""Gradients of softmax: by the input row by row, by the bias as sums over what it is broadcast to.

Forward keeps nothing but its inputs: a row's maximum and sum are found again while it is read, which costs no traffic,
and dropout's mask is drawn again. The sums use no atomics: they are taken in two steps, in an order that depends on
sizes alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
from reference_kernels._powers import exponential, finite, grouped, joined, raised
from reference_kernels._sums import summed_parts
from reference_kernels.softmax.logits import Masking, masked_jit, masked_logits, surviving


def config_backward(width: int) -> RowTile:
    """Backward tile for rows of ``width`` elements: two tensors are in registers, so half as wide as forward's, at 32
    elements a thread."""
    tile = row_tile(width, whole=8192, step=4096)
    return replace(tile, warps=max(4, min(16, tile.rows * tile.columns // (512 if tile.loop else 1024))))


@dataclass(frozen=True, slots=True)
class SumTile:
    """``groups`` elements of a bias's column times ``repeats`` of the rows each is broadcast to, by ``columns``."""

    groups: int
    repeats: int
    columns: int
    warps: int = 4


def config_bias(groups: int, repeats: int, width: int, *, interpreted: bool = INTERPRETED) -> tuple[SumTile, int]:
    """Tile of the bias's sums, and into how many parts the repeats are cut: some 1000 programs keep every
    multiprocessor of an H200 busy, and each leaves a partial sum. Depends on sizes alone."""
    elements, widest, programs = (1024, 64, 4) if interpreted else (2048, 256, 1024)
    columns = min(widest, max(16, triton.next_power_of_2(width)))
    lanes = elements // columns
    deep = min(lanes, triton.next_power_of_2(repeats))
    tile = SumTile(lanes // deep, deep, columns)
    blocks = triton.cdiv(groups, tile.groups) * triton.cdiv(width, columns)
    return tile, min(triton.cdiv(repeats, deep), max(1, programs // blocks))


@jit
def _upstream(
    dy_at: tl.tensor,
    read: tl.tensor,
    seen: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    seed: tl.tensor,
    threshold: tl.tensor,
    factor: tl.tensor,
    DROPOUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """What comes back through dropout to one tile, in float32; 0 where nothing took part, whatever came."""
    dy = widened(tl.load(dy_at, mask=read, other=0.0))
    if DROPOUT:
        seen = seen & surviving(row, start, width, seed, threshold, BLOCK_ROWS, BLOCK_COLUMNS)
        dy = dy * factor
    return tl.where(seen, dy, 0.0)


@masked_jit
def _input_kernel(
    dx_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    x_ptr: tl.tensor,
    keep_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    dy_ptr: tl.tensor,
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
    dy_stride0: tl.tensor,
    dy_stride1: tl.tensor,
    dy_stride2: tl.tensor,
    dy_step: tl.tensor,
    HAS_KEEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    STATISTICS: tl.constexpr,
    LOOP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of ``dx``, contiguous ``(rows, width)``, and if needed the rows' ``statistics``, ``(3, rows)``: the
    maximum, the sum of powers, and the mean of the upstream gradient that softmax takes."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_inside = row < rows
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    if DROPOUT:  # read by fours, as the words of Philox come: in vectors of more they would have to change threads
        column = tl.max_contiguous(column, [1, 4])
    x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
    dy_row = dy_ptr + row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2)
    keep_row = keep_ptr
    bias_row = bias_ptr
    if HAS_KEEP:
        keep_row = keep_ptr + row_offset(row, size1, size2, keep_stride0, keep_stride1, keep_stride2)
    if HAS_BIAS:
        bias_row = bias_ptr + row_offset(row, size1, size2, bias_stride0, bias_stride1, bias_stride2)
    dx_row = dx_ptr + row * width
    end = width
    last = row
    if CAUSAL:
        last = row % queries + diagonal
        end = tl.minimum(tl.max(last), width - 1) + 1

    if LOOP:
        # Sum and dot product follow the running maximum alike, so that one reading of the row finds all three.
        group: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth  # so many a thread loads at once
        top = tl.full([BLOCK_ROWS, BLOCK_COLUMNS // group], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS // group], tl.float32)
        dot = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS // group], tl.float32)
        for start in range(0, end, BLOCK_COLUMNS):
            at = start + column
            inside = covered(row, rows, at, width, EVEN)
            logits, read, seen = masked_logits(
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
                "",
            )
            dy = _upstream(
                dy_row + at * dy_step,
                read,
                seen,
                row,
                start,
                width,
                seed,
                threshold,
                factor,
                DROPOUT,
                BLOCK_ROWS,
                BLOCK_COLUMNS,
            )
            top, shrink, powers = raised(top, logits, group)
            total = total * shrink + tl.sum(powers, axis=2)
            dot = dot * shrink + tl.sum(powers * grouped(dy, group), axis=2)
        top, shrink = joined(top)
        top = finite(top)
        total, dot = row_sums(total * shrink, dot * shrink)
        share = 1.0 / total
        mean = dot * share
        blocks = (width + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
        for done in range(blocks):  # backwards: what was read last is nearest
            behind = (blocks - 1 - done) * BLOCK_COLUMNS
            at = behind + column
            inside = covered(row, rows, at, width, EVEN)
            logits, read, seen = masked_logits(
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
                "",
            )
            dy = _upstream(
                dy_row + at * dy_step,
                read,
                seen,
                row,
                behind,
                width,
                seed,
                threshold,
                factor,
                DROPOUT,
                BLOCK_ROWS,
                BLOCK_COLUMNS,
            )
            dlogits = exponential(logits - top) * share * (dy - mean)
            # A choice: what is masked has no gradient, even in a row that is NaN.
            tl.store(dx_row + at, tl.where(seen, dlogits * scale, 0.0), mask=inside)
    else:
        inside = covered(row, rows, column, width, EVEN)
        logits, read, seen = masked_logits(
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
        dy = _upstream(
            dy_row + column * dy_step,
            read,
            seen,
            row,
            0,
            width,
            seed,
            threshold,
            factor,
            DROPOUT,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
        )
        top = tl.max(logits, axis=1, keep_dims=True)
        power = exponential(logits - top)
        total, dot = row_sums(power, power * dy)
        share = 1.0 / total
        mean = dot * share
        dlogits = power * share * (dy - mean)
        tl.store(dx_row + column, tl.where(seen, dlogits * scale, 0.0), mask=inside)
    if STATISTICS:
        tl.store(statistics_ptr + row, top, mask=row_inside)
        tl.store(statistics_ptr + rows + row, total, mask=row_inside)
        tl.store(statistics_ptr + rows + rows + row, mean, mask=row_inside)


@masked_jit
def _bias_kernel(
    parts_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    x_ptr: tl.tensor,
    keep_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    scale: tl.tensor,
    diagonal: tl.tensor,
    queries: tl.tensor,
    seed: tl.tensor,
    threshold: tl.tensor,
    factor: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    groups: tl.tensor,
    repeats: tl.tensor,
    repeats_each: tl.tensor,
    parts: tl.tensor,
    column_blocks: tl.tensor,
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
    dy_stride0: tl.tensor,
    dy_stride1: tl.tensor,
    dy_stride2: tl.tensor,
    dy_step: tl.tensor,
    own_stride0: tl.tensor,
    own_stride1: tl.tensor,
    own_stride2: tl.tensor,
    HAS_KEEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_REPEATS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of one of ``parts``, ``(parts, groups, width)``: the bias's gradient summed over ``repeats_each`` rows.

    Rows come here sorted by the bias's own: ``repeats`` in a row share one. The ``own`` strides give a row's number as
    all others count it, which the statistics, the diagonal and dropout go by.
    """
    program = tl.program_id(0).to(tl.int64)
    start = program % column_blocks * BLOCK_COLUMNS
    column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
    part = program // column_blocks % parts
    lane = tl.arange(0, BLOCK_GROUPS * BLOCK_REPEATS)[:, None].to(tl.int64)
    group = program // column_blocks // parts * BLOCK_GROUPS + lane // BLOCK_REPEATS
    end = tl.minimum(repeats, (part + 1) * repeats_each)
    dbias = tl.zeros([BLOCK_GROUPS * BLOCK_REPEATS, BLOCK_COLUMNS], tl.float32)
    for first in range(part * repeats_each, end, BLOCK_REPEATS):
        repeat = first + lane % BLOCK_REPEATS
        row_inside = (group < groups) & (repeat < end)
        row = group * repeats + repeat
        own = row_offset(row, size1, size2, own_stride0, own_stride1, own_stride2)
        x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
        bias_row = bias_ptr + row_offset(row, size1, size2, bias_stride0, bias_stride1, bias_stride2)
        dy_row = dy_ptr + row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2)
        keep_row = keep_ptr
        if HAS_KEEP:
            keep_row = keep_ptr + row_offset(row, size1, size2, keep_stride0, keep_stride1, keep_stride2)
        top = tl.load(statistics_ptr + own, mask=row_inside, other=0.0)
        total = tl.load(statistics_ptr + rows + own, mask=row_inside, other=1.0)
        mean = tl.load(statistics_ptr + rows + rows + own, mask=row_inside, other=0.0)
        inside = row_inside & (column < width)
        last = own % queries + diagonal
        logits, read, seen = masked_logits(
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
            True,
            CAUSAL,
            "",
        )
        dy = _upstream(
            dy_row + column * dy_step,
            read,
            seen,
            own,
            start,
            width,
            seed,
            threshold,
            factor,
            DROPOUT,
            BLOCK_GROUPS * BLOCK_REPEATS,
            BLOCK_COLUMNS,
        )
        dbias += tl.where(seen, exponential(logits - top) / total * (dy - mean), 0.0)
    sums = tl.sum(tl.reshape(dbias, [BLOCK_GROUPS, BLOCK_REPEATS, BLOCK_COLUMNS]), axis=1)
    group = program // column_blocks // parts * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[:, None]
    tl.store(parts_ptr + (part * groups + group) * width + column, sums, mask=(group < groups) & (column < width))


def input_gradient(
    dx: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    masking: Masking,
    statistics: bool,
) -> torch.Tensor | None:
    """Write the gradient by ``x`` into the contiguous ``dx``, at least one element of them; return the rows'
    statistics, float32 ``(3, rows)``, for `bias_gradient` if needed."""
    rows = Rows.of(*masking.as_rows(x), dy)
    tile = config_backward(rows.width)
    found = torch.empty((3, rows.count), dtype=torch.float32, device=x.device) if statistics else None
    with placed(x.device):
        _input_kernel[(triton.cdiv(rows.count, tile.rows),)](
            dx,
            dx if found is None else found,
            *rows.tensors,
            *masking.numbers(x),
            rows.count,
            rows.width,
            *rows.layout,
            **masking.flags(),
            HAS_BIAS=masking.bias is not None,
            STATISTICS=statistics,
            LOOP=tile.loop,
            EVEN=rows.width % tile.columns == 0,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return found


def bias_gradient(
    dbias: torch.Tensor,
    statistics: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    masking: Masking,
) -> None:
    """Write the gradient by ``bias`` into the contiguous ``dbias``; reads ``x``, ``dy`` and the masks once more."""
    rows, groups = _sorted(dbias, statistics, dy, x, masking)
    repeats = rows.count // groups
    tile, parts = config_bias(groups, repeats, rows.width)
    repeats_each = triton.cdiv(triton.cdiv(repeats, parts), tile.repeats) * tile.repeats
    parts = triton.cdiv(repeats, repeats_each)
    blocks = triton.cdiv(rows.width, tile.columns)
    sums = dbias
    if parts > 1:
        sums = torch.empty((1, parts, dbias.numel()), dtype=torch.float32, device=x.device)
    with placed(x.device):
        _bias_kernel[(triton.cdiv(groups, tile.groups) * parts * blocks,)](
            sums,
            statistics,
            *rows.tensors[:4],
            *masking.numbers(x),
            rows.count,
            rows.width,
            groups,
            repeats,
            repeats_each,
            parts,
            blocks,
            *rows.sizes[1:],
            *(stride for four in rows.strides[:4] for stride in four),
            *rows.strides[4][:3],
            **masking.flags(),
            BLOCK_GROUPS=tile.groups,
            BLOCK_REPEATS=tile.repeats,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    if parts > 1:
        summed_parts(dbias, dbias, sums, (True, False))


def _sorted(
    dbias: torch.Tensor, statistics: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, masking: Masking
) -> tuple[Rows, int]:
    """The tensors with their leading dimensions sorted, those that the bias has before those it is broadcast to; and
    the product of the former. Last comes one whose offsets are the rows' numbers before they were sorted."""
    padded = (1,) * (x.ndim - dbias.ndim) + tuple(dbias.shape)
    order = sorted(range(x.ndim - 1), key=lambda axis: padded[axis] != x.shape[axis])
    numbered = statistics[0].view(x.shape[:-1]).unsqueeze(-1)
    tensors = *masking.as_rows(x), dy
    for copied in (False, True):
        # Copied in the order they have, they fold; a copy made after sorting would give the numbers new places.
        parts = [t.contiguous() if copied else t for t in tensors]
        rows = Rows.of(*(t.permute(*order, -1) for t in (*parts, numbered)))
        if rows.tensors[-1].data_ptr() == numbered.data_ptr():
            break
    return rows, math.prod(padded[:-1])
