"""Products with a thin factor, bound by reading the other one: rows times it, and sums of rows weighed by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from reference_kernels._common import INTERPRETED, Rows, jit, placed, row_offset
from reference_kernels._sums import added_parts
from reference_kernels.linear.products import interpreted_step, product

PROGRAMS = 2 * 132  # of sums over rows, at the most: two for each multiprocessor of an H200


@dataclass(frozen=True, slots=True)
class ThinTile:
    """Rows, and elements of each, that a program reads at a time, warps and pipeline stages; ``splits``: programs that
    share a sum over rows."""

    rows: int
    columns: int
    warps: int
    stages: int
    splits: int = 1


def room_of(rank: int) -> int:
    """What the tile of a thin factor takes for ``rank``."""
    room: int = max(16, triton.next_power_of_2(rank))
    return room


def config_thin(rows: int, depth: int, rank: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED) -> ThinTile:
    """Tile for ``(rows, k)`` times ``(rank, k)``: as high as leaves each multiprocessor of an H200 a tile."""
    if interpreted:
        return ThinTile(32, interpreted_step(depth), warps=4, stages=1)
    high = max(16, min(64, triton.next_power_of_2(rows) // 128))
    deep = 256 // dtype.itemsize // (2 if rank > 64 else 1)
    return ThinTile(high, deep, warps=4, stages=4)


def config_sums(rows: int, columns: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED) -> ThinTile:
    """Tile for ``(rows, rank)``, transposed, times ``(rows, columns)``."""
    if interpreted:
        # Two parts, where there are as many tiles, and more of those that would take over 64 one by one.
        splits = max(1, min(max(2, rows // 2048), triton.cdiv(rows, 32)))
        return ThinTile(32, interpreted_step(columns), warps=4, stages=1, splits=splits)
    high, wide = 64, 128 // dtype.itemsize
    wanted = PROGRAMS // triton.cdiv(columns, wide)
    return ThinTile(high, wide, warps=4, stages=4, splits=max(1, min(wanted, triton.cdiv(rows, 4 * high))))


@jit
def _thin_rows_kernel(
    low_ptr: tl.tensor,
    x_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    scale: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    factor_stride_r: tl.tensor,
    factor_stride_k: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """``BLOCK_M`` rows of ``scale * x @ factor.T``, contiguous ``(M, BLOCK_R)``."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    m_inside = (m < M)[:, None]
    r_inside = (r < R)[None, :]
    total = product(
        tl.zeros([BLOCK_M, BLOCK_R], tl.float32),
        x_ptr + row_offset(m, size1, size2, x_stride0, x_stride1, x_stride2),
        factor_ptr,
        r,
        m_inside,
        r_inside,
        K,
        x_step,
        factor_stride_r,
        factor_stride_k,
        BLOCK_K,
    )
    tl.store(low_ptr + m[:, None] * BLOCK_R + r[None, :], total * scale, mask=m_inside)


@jit
def _thin_sums_kernel(
    parts_ptr: tl.tensor,
    low_ptr: tl.tensor,
    x_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    share: tl.tensor,
    low_row: tl.tensor,
    x_row: tl.tensor,
    x_step: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """A block of columns of ``low.T @ x`` over ``share`` rows; ``parts`` are contiguous ``(splits, BLOCK_R, N)``."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    n_inside = (n < N)[None, :]
    total = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for start in range(0, share, BLOCK_M):
        m = split * share + start + tl.arange(0, BLOCK_M)
        inside = m < M
        x = tl.load(x_ptr + (m * x_row)[:, None] + (n * x_step)[None, :], mask=inside[:, None] & n_inside, other=0.0)
        low = tl.load(low_ptr + r[:, None] + (m * low_row)[None, :], mask=inside[None, :], other=0.0)
        total = tl.dot(low, x, total, input_precision="ieee")
    at = (split * BLOCK_R + r[:, None]) * N + n[None, :]
    tl.store(parts_ptr + at, total, mask=n_inside)


def thin_rows(x: torch.Tensor, factor: torch.Tensor, scale: float) -> torch.Tensor:
    """``scale * x @ factor.T``, ``(*batch, k)`` by ``(r, k)``, as rows of `room_of` ``r``; beyond ``r`` they hold
    nothing."""
    rows, room = Rows.of(x), room_of(len(factor))
    low = torch.empty((rows.count, room), dtype=x.dtype, device=x.device)
    tile = config_thin(rows.count, x.shape[-1], room, x.dtype)
    if rows.count:
        with placed(x.device):
            _thin_rows_kernel[(triton.cdiv(rows.count, tile.rows),)](
                low,
                *rows.tensors,
                factor,
                scale,
                rows.count,
                x.shape[-1],
                len(factor),
                *rows.layout,
                *factor.stride(),
                BLOCK_M=tile.rows,
                BLOCK_K=tile.columns,
                BLOCK_R=room,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
    return low


def thin_sums(out: torch.Tensor, low: torch.Tensor, x: torch.Tensor) -> None:
    """Fill ``out`` ``(r, n)`` of any strides with ``low[:, :r].T @ x``; ``low`` as `thin_rows` has it, ``x``
    ``(rows, n)``."""
    if out.numel() == 0:
        return
    (M, N), room = x.shape, low.shape[1]
    tile = config_sums(M, N, x.dtype)
    share = triton.cdiv(triton.cdiv(M, tile.splits), tile.rows) * tile.rows
    splits = triton.cdiv(M, share) if M else 1
    parts = torch.empty((splits, room, N), dtype=torch.float32, device=x.device)
    with placed(x.device):
        _thin_sums_kernel[(triton.cdiv(N, tile.columns), splits)](
            parts,
            low,
            x,
            M,
            N,
            share,
            low.stride(0),
            *x.stride(),
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_R=room,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    added_parts(out, parts)
