"""Fused linear layer: tiled matrix product on tensor cores, bias and activation before the one store."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from reference_kernels._activations import activated
from reference_kernels._common import Rows, check_tensor, jit, placed, row_offset
from reference_kernels.linear.descriptors import linear_by_tiles
from reference_kernels.linear.products import by_pointers, check_operands, config, grouped, product

Activation = Literal["relu", "gelu", "silu"]


@jit
def _linear_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    weight_stride_n: tl.tensor,
    weight_stride_k: tl.tensor,
    bias_step: tl.tensor,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
    total = product(
        tl.zeros([BLOCK_M, BLOCK_N], tl.float32),
        x_rows,
        weight_ptr,
        n,
        m_inside,
        n_inside,
        K,
        x_step,
        weight_stride_n,
        weight_stride_k,
        BLOCK_K,
    )
    if HAS_BIAS:
        total += tl.load(bias_ptr + n * bias_step, mask=n < N, other=0.0).to(tl.float32)[None, :]
    total = activated(total, ACTIVATION, y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None] * N + n[None, :], total, mask=m_inside & n_inside)


@torch.library.custom_op("reference_kernels::linear", mutates_args=())
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    N, K = weight.shape
    y = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = Rows.of(x)
    tile = config(rows.count, N, K, x.dtype)
    if tile.resident and linear_by_tiles(y, rows, weight, bias, activation, tile):
        return y
    tile = by_pointers(tile, warps=4 if activation is None else 8)
    with placed(x.device):
        _linear_kernel[(triton.cdiv(rows.count, tile.m) * triton.cdiv(N, tile.n),)](
            y,
            *rows.tensors,
            weight,
            x if bias is None else bias,
            rows.count,
            N,
            K,
            *rows.layout,
            *weight.stride(),
            1 if bias is None else bias.stride(0),
            HAS_BIAS=bias is not None,
            ACTIVATION=activation,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            GROUP=tile.group,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return y


@_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)``: ``(*batch, k)`` by ``(n, k)`` to contiguous ``(*batch, n)``.

    All operands share one dtype (float32, float16 or bfloat16) and may have any strides. Sums in float32 without TF32
    and rounds once, see `linear_reference`. Raises `TypeError` for other or mixed dtypes; `ValueError` for shapes that
    do not fit, an unknown activation, or mixed devices.
    """
    if activation is not None and activation not in get_args(Activation):
        raise ValueError(f"linear: activation is {activation!r}, known: None, {', '.join(get_args(Activation))}")
    check_operands("linear", x, {"weight": weight})
    if bias is not None:
        check_tensor("linear", "bias", bias, x, (x.dtype,))
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"linear: bias has shape {tuple(bias.shape)}, weight needs ({weight.shape[0]},)")
    y: torch.Tensor = _linear(x, weight, bias, activation)
    return y
