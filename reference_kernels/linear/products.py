"""What the matrix products share: tile sizes, the order of tiles, and the sum over ``k`` of one tile."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from reference_kernels._common import FLOATS, INTERPRETED, check_tensor, jit


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """Tile sizes (elements; powers of two, at least 16, which is what ``tl.dot`` takes), warps, pipeline stages, and
    how many row blocks share a column block of the weight while it is in L2.

    ``resident``: programs that a multiprocessor holds at a time, each of which computes several tiles, where the
    operands have descriptors; 0 for tiles that are read by pointers. ``parts``: in so many the former store a tile.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    parts: int = 1
    resident: int = 0


def interpreted_step(size: int) -> int:
    """How much of a long dim a tile takes where it is interpreted: a step costs some 0.5 ms however much that is, so
    only what is short takes several small ones."""
    return 32 if size <= 512 else 512


def config(rows: int, columns: int, depth: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED) -> MatmulTile:
    """Tile for a ``rows x columns`` result that sums ``depth`` products of ``dtype``.

    Two programs of 128 x 128 x 64 share a multiprocessor, with 112 KiB of shared memory each: one multiplies while the
    other stores. Few rows (decoding) stream the weight through narrow tiles. float32 runs on the ordinary cores, where
    registers bound the tile.
    """
    if interpreted:
        tile = MatmulTile(32, 32, interpreted_step(depth), warps=4, stages=1)
        return tile if dtype == torch.float32 else replace(tile, parts=2, resident=1)
    if dtype == torch.float32:
        return MatmulTile(32 if rows <= 32 else 64, 64, 32, warps=4, stages=3)
    if rows <= 64:
        m = max(16, triton.next_power_of_2(rows))
        return MatmulTile(m, 64, 256 if m == 16 else 128, warps=4, stages=4 if m == 16 else 5)
    if rows * columns < 96 * 128 * 256:  # large tiles for less than three quarters of an H200's 132 multiprocessors
        return MatmulTile(64, 128, 64, warps=4, stages=4)
    return MatmulTile(128, 128, 64, warps=4, stages=3, parts=2, resident=2)


def wide(tile: MatmulTile) -> MatmulTile:
    """Twice the columns for twice the warps, alone on a multiprocessor, of a tile that shares it with another."""
    return replace(tile, n=256, warps=8, resident=1) if tile.resident == 2 else tile


def by_pointers(tile: MatmulTile, warps: int = 4) -> MatmulTile:
    """The tile for operands that have no descriptors: addresses and masks take registers, which 256 columns, or an
    epilogue of some size for 4 ``warps``, do not leave."""
    return replace(tile, n=min(tile.n, 128), warps=warps, parts=1, resident=0) if tile.resident else tile


@jit
def grouped(
    program: tl.tensor, blocks_m: tl.tensor, blocks_n: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The block of rows and of columns of ``program``: ``GROUP`` blocks of rows share one of columns, then the next."""
    first_m = program // (GROUP * blocks_n) * GROUP
    height = min(blocks_m - first_m, GROUP)
    within = program % (GROUP * blocks_n)
    return first_m + within % height, within // height


@jit
def product(
    total: tl.tensor,
    x_rows: tl.tensor,
    weight_ptr: tl.tensor,
    n: tl.tensor,
    m_inside: tl.tensor,
    n_inside: tl.tensor,
    K: tl.tensor,
    x_step: tl.tensor,
    weight_stride_n: tl.tensor,
    weight_stride_k: tl.tensor,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """``total`` and ``x @ weight.T`` of one tile, in float32 without TF32: from ``x_rows`` on, columns ``n``."""
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    x_ptrs = x_rows[:, None] + (k * x_step)[None, :]
    weight_ptrs = weight_ptr + (k * weight_stride_k)[:, None] + (n * weight_stride_n)[None, :]
    for start in range(0, K, BLOCK_K):
        # Both operands are masked along K: a zero in one alone does not silence a NaN beyond the end of the other.
        k_inside = k < K - start
        x = tl.load(x_ptrs, mask=m_inside & k_inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs, mask=k_inside[:, None] & n_inside, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_ptrs += BLOCK_K * x_step
        weight_ptrs += BLOCK_K * weight_stride_k
    return total


@jit
def two_products(
    x_rows: tl.tensor,
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    first_n: tl.tensor,
    second_n: tl.tensor,
    m_inside: tl.tensor,
    first_inside: tl.tensor,
    second_inside: tl.tensor,
    K: tl.tensor,
    x_step: tl.tensor,
    first_stride_n: tl.tensor,
    first_stride_k: tl.tensor,
    second_stride_n: tl.tensor,
    second_stride_k: tl.tensor,
    BLOCK_M: tl.constexpr,
    FIRST_N: tl.constexpr,
    SECOND_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`product` of the same rows with two weights, each tile of ``x`` read once."""
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    x_ptrs = x_rows[:, None] + (k * x_step)[None, :]
    first_ptrs = first_ptr + (k * first_stride_k)[:, None] + (first_n * first_stride_n)[None, :]
    second_ptrs = second_ptr + (k * second_stride_k)[:, None] + (second_n * second_stride_n)[None, :]
    first_total = tl.zeros([BLOCK_M, FIRST_N], tl.float32)
    second_total = tl.zeros([BLOCK_M, SECOND_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k_inside = k < K - start
        x = tl.load(x_ptrs, mask=m_inside & k_inside[None, :], other=0.0)
        first = tl.load(first_ptrs, mask=k_inside[:, None] & first_inside, other=0.0)
        second = tl.load(second_ptrs, mask=k_inside[:, None] & second_inside, other=0.0)
        first_total = tl.dot(x, first, first_total, input_precision="ieee")
        second_total = tl.dot(x, second, second_total, input_precision="ieee")
        x_ptrs += BLOCK_K * x_step
        first_ptrs += BLOCK_K * first_stride_k
        second_ptrs += BLOCK_K * second_stride_k
    return first_total, second_total


@jit
def halves_of(total: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The left half of a tile's columns and the right one. Half a tile is stored before the other half is made ready,
    which keeps an epilogue within the registers: erf of a whole tile of 128 x 256 spills some 200 bytes a thread."""
    left, right = tl.split(tl.permute(tl.reshape(total, [total.shape[0], 2, total.shape[1] // 2]), (0, 2, 1)))
    return left, right


def check_operands(kernel: str, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> None:
    """Raise `TypeError` for ``x`` of a dtype that no kernel takes, or a weight of another; `ValueError` for one on
    another device, and unless ``x`` is ``(*batch, k)`` and each weight ``(n, k)``, as in `torch.nn.Linear`."""
    check_tensor(kernel, "x", x, x, FLOATS)
    for name, weight in weights.items():
        check_tensor(kernel, name, weight, x, (x.dtype,))
        if x.ndim == 0 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{kernel}: x {tuple(x.shape)} and {name} {tuple(weight.shape)} do not fit; "
                f"x is (*batch, k) and {name} (n, k), as in torch.nn.Linear"
            )
