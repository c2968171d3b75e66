"""Fused SwiGLU up-projection: both halves of a feed-forward layer from one reading of its input, multiplied before the
one store."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from reference_kernels._activations import activated
from reference_kernels._common import INTERPRETED, Rows, jit, placed, row_offset
from reference_kernels.linear.products import MatmulTile, check_operands, config, grouped, two_products


def config_gate_up(
    rows: int, columns: int, depth: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED
) -> MatmulTile:
    """The tile of a product twice as wide, whose columns the two weights share."""
    tile = config(rows, 2 * columns, depth, dtype, interpreted=interpreted)
    return replace(tile, n=max(16, tile.n // 2))


@jit
def _gate_up_kernel(
    y_ptr: tl.tensor,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One ``BLOCK_M x BLOCK_N`` tile of ``y``, contiguous ``(M, N)``; the other operands have strides of their own."""
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
    tl.store(y_ptr + m[:, None] * N + n[None, :], activated(gate, "silu") * up, mask=m_inside & n_inside)


@torch.library.custom_op("reference_kernels::gate_up_linear", mutates_args=())
def _gate_up_linear(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor) -> torch.Tensor:
    N, K = gate_weight.shape
    y = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = Rows.of(x)
    tile = config_gate_up(rows.count, N, K, x.dtype)
    with placed(x.device):
        _gate_up_kernel[(triton.cdiv(rows.count, tile.m) * triton.cdiv(N, tile.n),)](
            y,
            *rows.tensors,
            gate_weight,
            up_weight,
            rows.count,
            N,
            K,
            *rows.sizes[1:],
            *rows.strides[0],
            *gate_weight.stride(),
            *up_weight.stride(),
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            GROUP=tile.group,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return y


@_gate_up_linear.register_fake
def _(x: torch.Tensor, gate_weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], gate_weight.shape[0]), dtype=x.dtype, device=x.device)


def gate_up_linear(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor) -> torch.Tensor:
    """``silu(x @ gate_weight.T) * (x @ up_weight.T)``: ``(*batch, k)`` by two ``(n, k)`` to contiguous ``(*batch, n)``.

    All operands share one dtype (float32, float16 or bfloat16) and may have any strides. Sums in float32 without TF32
    and rounds once, the halves not at all: see `gate_up_linear_reference`. Raises `TypeError` for other or mixed
    dtypes; `ValueError` for shapes that do not fit, or mixed devices.
    """
    check_operands("gate_up_linear", x, {"gate_weight": gate_weight, "up_weight": up_weight})
    if gate_weight.shape != up_weight.shape:
        raise ValueError(
            f"gate_up_linear: gate_weight has shape {tuple(gate_weight.shape)}, up_weight {tuple(up_weight.shape)}; "
            "they must be equal, since their products are multiplied with each other"
        )
    y: torch.Tensor = _gate_up_linear(x, gate_weight, up_weight)
    return y
