"""Products of many float8 rows: tiles by descriptors, scaled and rounded before the one store."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton.language as tl

from reference_kernels._common import Rows, jit
from reference_kernels.dequant_matmul.tiles import config_float8
from reference_kernels.linear.descriptors import block_of, by_rows, launched, matrix_of, result_of
from reference_kernels.linear.products import grouped, halves_of


@jit
def _finish(
    total: tl.tensor,
    y: tl.tensor,
    x_scales_ptr: tl.tensor,
    x_scales_stride: tl.tensor,
    scales_ptr: tl.tensor,
    scales_stride: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    PARTS: tl.constexpr,
) -> None:
    if PARTS > 1:
        left, right = halves_of(total)
        more: tl.constexpr = PARTS // 2
        _finish(left, y, x_scales_ptr, x_scales_stride, scales_ptr, scales_stride, M, N, m, n, more)
        n += left.shape[1]
        _finish(right, y, x_scales_ptr, x_scales_stride, scales_ptr, scales_stride, M, N, m, n, more)
    else:
        row = m + tl.arange(0, total.shape[0]).to(tl.int64)
        column = n + tl.arange(0, total.shape[1]).to(tl.int64)
        x_scale = tl.load(x_scales_ptr + row * x_scales_stride, mask=row < M, other=0.0)
        scale = tl.load(scales_ptr + column * scales_stride, mask=column < N, other=0.0)
        y.store([m, n], (total * scale[None, :] * x_scale[:, None]).to(y.dtype))


@jit
def _float8_tiles_kernel(
    y: tl.tensor,
    x: tl.tensor,
    codes: tl.tensor,
    x_scales_ptr: tl.tensor,
    x_scales_stride: tl.tensor,
    scales_ptr: tl.tensor,
    scales_stride: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    programs: tl.tensor,
    X_TURNED: tl.constexpr,
    CODES_TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Every ``programs``-th tile of ``y = (x * x_scales) @ (codes * scales).T``."""
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    HALF: tl.constexpr = BLOCK_M // 2
    for tile in tl.range(tl.program_id(0), blocks_m * blocks_n, programs, flatten=True):
        block_m, block_n = grouped(tile, blocks_m, blocks_n, GROUP)
        m, n = block_m * BLOCK_M, block_n * BLOCK_N
        upper = tl.zeros([HALF, BLOCK_N], tl.float32)
        lower = tl.zeros([HALF, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            # Hopper's tensor cores keep some 14 bits of a float8 sum: every 128 products it is taken out of them. By
            # halves, whose sums fit into registers beside the whole; not by max_num_imprecise_acc, whose instructions
            # wait for each other.
            weight = tl.trans(block_of(codes, n, k, CODES_TURNED))
            upper += tl.dot(block_of(x, m, k, X_TURNED), weight)
            lower += tl.dot(block_of(x, m + HALF, k, X_TURNED), weight)
        _finish(upper, y, x_scales_ptr, x_scales_stride, scales_ptr, scales_stride, M, N, m, n, PARTS)
        _finish(lower, y, x_scales_ptr, x_scales_stride, scales_ptr, scales_stride, M, N, m + HALF, n, PARTS)


def fp8_by_tiles(
    y: torch.Tensor, x: torch.Tensor, x_scales: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> bool:
    """Fill contiguous ``y`` ``(*batch, n)``, where there are many rows and the layouts have descriptors: whether so.
    ``x_scales`` are ``(*batch, 1)``, ``scales`` ``(n,)``."""
    rows = Rows.of(x, x_scales)
    N, K = codes.shape
    tile = config_float8(rows.count, K)
    if tile is None:
        return False
    half = replace(tile, m=tile.m // 2)
    operands = {
        "y": result_of(y, rows.count, N, half),
        "x": by_rows(rows, half),
        "codes": matrix_of(codes, (tile.n, tile.k)),
    }
    # The tensor cores take float8 of either side along k alone.
    if any(each is not None and each.turned for each in operands.values()):
        return False
    return launched(
        _float8_tiles_kernel,
        operands,
        {"M": rows.count, "N": N, "K": K},
        tile,
        y.device,
        x_scales_ptr=rows.tensors[1],
        x_scales_stride=rows.strides[1][0],
        scales_ptr=scales,
        scales_stride=scales.stride(0),
    )
