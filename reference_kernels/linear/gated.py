"""Two products of one input, one of them activated and multiplied with the other before the one store."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from reference_kernels._activations import activated, slope
from reference_kernels._common import INTERPRETED, Rows, jit, placed, row_offset
from reference_kernels.linear.descriptors import gated_by_tiles
from reference_kernels.linear.products import MatmulTile, by_pointers, config, grouped, two_products, wide


def config_gated(
    rows: int, columns: int, depth: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED
) -> MatmulTile:
    """The tile of a product twice as wide, whose columns the two weights share."""
    tile = wide(config(rows, 2 * columns, depth, dtype, interpreted=interpreted))
    return replace(tile, n=max(16, tile.n // 2))


@jit
def _gated_kernel(
    y_ptr: tl.tensor,
    gate_out_ptr: tl.tensor,
    up_out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    gate_stride_n: tl.tensor,
    gate_stride_k: tl.tensor,
    up_stride_n: tl.tensor,
    up_stride_k: tl.tensor,
    ACTIVATION: tl.constexpr,
    ROUNDED: tl.constexpr,
    KEEP: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One ``BLOCK_M x BLOCK_N`` tile of ``y``, ``KEEP``: and both halves; ``BACKWARD``: their gradients from ``y``, the
    gradient. All of these are contiguous ``(M, N)``; the other operands have strides of their own."""
    block_m, block_n = grouped(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + row_offset(m, size1, size2, x_stride0, x_stride1, x_stride2)
    m_inside = (m < M)[:, None]
    n_inside = (n < N)[None, :]
    gate, up = two_products(
        x_rows,
        gate_ptr,
        up_ptr,
        n,
        n,
        m_inside,
        n_inside,
        n_inside,
        K,
        x_step,
        gate_stride_n,
        gate_stride_k,
        up_stride_n,
        up_stride_k,
        BLOCK_M,
        BLOCK_N,
        BLOCK_N,
        BLOCK_K,
    )
    at = m[:, None] * N + n[None, :]
    inside = m_inside & n_inside
    if ROUNDED:
        gate = gate.to(y_ptr.dtype.element_ty).to(tl.float32)
        up = up.to(y_ptr.dtype.element_ty).to(tl.float32)
    if BACKWARD:
        dy = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(gate_out_ptr + at, dy * up * slope(gate, ACTIVATION), mask=inside)
        tl.store(up_out_ptr + at, dy * activated(gate, ACTIVATION, y_ptr.dtype.element_ty), mask=inside)
    else:
        if KEEP:
            tl.store(gate_out_ptr + at, gate, mask=inside)
            tl.store(up_out_ptr + at, up, mask=inside)
        tl.store(y_ptr + at, activated(gate, ACTIVATION, y_ptr.dtype.element_ty) * up, mask=inside)


def gated(
    y: torch.Tensor,
    halves: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str,
    *,
    rounded: bool = False,
    keep: bool = False,
    backward: bool = False,
) -> None:
    """Fill contiguous ``y`` ``(*batch, n)`` with ``activation(x @ gate_weight.T) * (x @ up_weight.T)``.

    ``rounded``: of products that were rounded to the dtype. ``keep``: and fill ``halves``, of the same shape, with both
    products. ``backward``: leave ``y``, which is the gradient by the result, and fill ``halves`` with those by the two
    products, which are computed again. ``halves`` are not touched otherwise.
    """
    if y.numel() == 0:
        return
    N, K = gate_weight.shape
    rows = Rows.of(x)
    tile = config_gated(rows.count, N, K, x.dtype)
    constants = {"ACTIVATION": activation, "ROUNDED": rounded, "KEEP": keep, "BACKWARD": backward}
    if tile.resident and gated_by_tiles(y, halves, rows, gate_weight, up_weight, tile, **constants):
        return
    if tile.resident:
        tile = replace(by_pointers(tile, warps=8), k=tile.k // 2, stages=5)
    with placed(x.device):
        _gated_kernel[(triton.cdiv(rows.count, tile.m) * triton.cdiv(N, tile.n),)](
            y,
            *halves,
            *rows.tensors,
            gate_weight,
            up_weight,
            rows.count,
            N,
            K,
            *rows.layout,
            *gate_weight.stride(),
            *up_weight.stride(),
            **constants,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            GROUP=tile.group,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def check_gated(kernel: str, gate_weight: torch.Tensor, up_weight: torch.Tensor) -> None:
    """Raise `ValueError` unless both weights have one shape."""
    if gate_weight.shape != up_weight.shape:
        raise ValueError(
            f"{kernel}: gate_weight has shape {tuple(gate_weight.shape)}, up_weight {tuple(up_weight.shape)}; "
            "they must be equal, since their products are multiplied with each other"
        )
