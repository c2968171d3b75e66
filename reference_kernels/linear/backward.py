"""Gradients that the linear layers have in common: by an input that meets several weights, by weights and by biases."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from reference_kernels._common import jit, placed
from reference_kernels.linear.descriptors import summed_by_tiles
from reference_kernels.linear.kernel import _linear
from reference_kernels.linear.products import by_pointers, config, grouped, product


@jit
def _summed_products_kernel(
    y_ptr: tl.tensor,
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    third_ptr: tl.tensor,
    first_weight_ptr: tl.tensor,
    second_weight_ptr: tl.tensor,
    third_weight_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    first_K: tl.tensor,
    second_K: tl.tensor,
    third_K: tl.tensor,
    first_row: tl.tensor,
    first_step: tl.tensor,
    second_row: tl.tensor,
    second_step: tl.tensor,
    third_row: tl.tensor,
    third_step: tl.tensor,
    first_stride_k: tl.tensor,
    first_stride_n: tl.tensor,
    second_stride_k: tl.tensor,
    second_stride_n: tl.tensor,
    third_stride_k: tl.tensor,
    third_stride_n: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One tile of ``y``, contiguous ``(M, N)``: the sum of two or three products, each ``(M, K)`` by ``(K, N)``."""
    block_m, block_n = grouped(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_inside = (m < M)[:, None]
    n_inside = (n < N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = product(
        total,
        first_ptr + m * first_row,
        first_weight_ptr,
        n,
        m_inside,
        n_inside,
        first_K,
        first_step,
        first_stride_n,
        first_stride_k,
        BLOCK_K,
    )
    total = product(
        total,
        second_ptr + m * second_row,
        second_weight_ptr,
        n,
        m_inside,
        n_inside,
        second_K,
        second_step,
        second_stride_n,
        second_stride_k,
        BLOCK_K,
    )
    if COUNT > 2:
        total = product(
            total,
            third_ptr + m * third_row,
            third_weight_ptr,
            n,
            m_inside,
            n_inside,
            third_K,
            third_step,
            third_stride_n,
            third_stride_k,
            BLOCK_K,
        )
    tl.store(y_ptr + m[:, None] * N + n[None, :], total, mask=m_inside & n_inside)


@torch.library.custom_op("reference_kernels::summed_products", mutates_args=())
def _summed_products(upstreams: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    dx = upstreams[0].new_empty((upstreams[0].shape[0], weights[0].shape[1]))
    if dx.numel() == 0:
        return dx
    (rows, columns), depths = dx.shape, [len(weight) for weight in weights]
    tile = config(rows, columns, sum(depths), dx.dtype)
    if tile.resident and summed_by_tiles(dx, upstreams, weights, tile):
        return dx
    tile = by_pointers(tile)
    spare = 3 - len(weights)
    operands = [*upstreams, *upstreams[:1] * spare], [*weights, *weights[:1] * spare]
    with placed(dx.device):
        _summed_products_kernel[(triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n),)](
            dx,
            *operands[0],
            *operands[1],
            rows,
            columns,
            *depths,
            *[0] * spare,
            *(stride for kind in operands for tensor in kind for stride in tensor.stride()),
            COUNT=len(weights),
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            GROUP=tile.group,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return dx


@_summed_products.register_fake
def _(upstreams: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    return upstreams[0].new_empty((upstreams[0].shape[0], weights[0].shape[1]))


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """``x`` of ``(*batch, n)`` as ``(rows, n)``, which ``reshape(-1, n)`` cannot tell where there are no columns."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def input_gradient(x: torch.Tensor, upstreams: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    """The gradient by ``x`` of two or three products ``x @ weight.T``, in one sum; upstreams are ``(rows, n)``."""
    dx: torch.Tensor = _summed_products(upstreams, weights)
    return dx.view(x.shape)


def weight_gradient(upstream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The gradient by the weight of ``rows @ weight.T``: ``(rows, n)`` and ``(rows, k)`` to contiguous ``(n, k)``.

    By the suite's own product: cuBLAS takes some 10 % less time, and may add up its parts in 16 bits.
    """
    dweight: torch.Tensor = _linear(upstream.t(), rows.t(), None, None)
    return dweight


def bias_gradient(upstream: torch.Tensor) -> torch.Tensor:
    """The sum over rows in float32, rounded once: ``(rows, n)`` to ``(n,)``."""
    return upstream.sum(0, dtype=torch.float32).to(upstream.dtype)
