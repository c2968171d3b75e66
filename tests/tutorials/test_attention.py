"""Tutorial 06, forward: flash attention v2 by pointers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tutorials.attention import HEAD_DIM, SCALE, assert_attends, heads, key_range, rescale_and_add
from tests.tutorials.common import each_float

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def inner_by_pointers(
    acc,
    l_i,
    m_i,
    q,
    K,
    V,
    qk_scale,
    start_m,
    N_CTX,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STAGE: tl.constexpr,
):
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    lo, hi = key_range(start_m, N_CTX, BLOCK_M, STAGE)
    for start_n in range(lo, hi, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = tl.load(K + offs_n[None, :] * HEAD_DIM + offs_d[:, None], mask=offs_n[None, :] < N_CTX, other=0.0)
        v = tl.load(V + offs_n[:, None] * HEAD_DIM + offs_d[None, :], mask=offs_n[:, None] < N_CTX, other=0.0)
        keep = (offs_n < N_CTX)[None, :]
        if STAGE == 2:
            keep &= offs_m[:, None] >= offs_n[None, :]
        acc, l_i, m_i = rescale_and_add(acc, l_i, m_i, tl.dot(q, k) * qk_scale, v, keep)
    return acc, l_i, m_i


@triton.jit
def attention_by_pointers(
    Q,
    K,
    V,
    sm_scale,
    M,
    Out,
    stride_z,
    stride_h,
    H,
    N_CTX,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STAGE: tl.constexpr,
):
    tl.static_assert(BLOCK_M % BLOCK_N == 0)
    start_m = tl.program_id(0)
    off_hz = tl.program_id(1)
    offset = (off_hz // H).to(tl.int64) * stride_z + (off_hz % H).to(tl.int64) * stride_h
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = offset + offs_m[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    qk_scale = sm_scale * 1.44269504  # 1 / log(2)
    q = tl.load(Q + tile, mask=offs_m[:, None] < N_CTX, other=0.0)
    K += offset
    V += offset
    # Stage 3 is causal: first the blocks that need no mask, then those on the diagonal.
    if STAGE & 1:
        acc, l_i, m_i = inner_by_pointers(
            acc, l_i, m_i, q, K, V, qk_scale, start_m, N_CTX, BLOCK_M, BLOCK_N, HEAD_DIM, 4 - STAGE
        )
    if STAGE & 2:
        acc, l_i, m_i = inner_by_pointers(
            acc, l_i, m_i, q, K, V, qk_scale, start_m, N_CTX, BLOCK_M, BLOCK_N, HEAD_DIM, 2
        )
    tl.store(M + off_hz * N_CTX + offs_m, m_i + tl.math.log2(l_i), mask=offs_m < N_CTX)
    tl.store(Out + tile, (acc / l_i[:, None]).to(Out.type.element_ty), mask=offs_m[:, None] < N_CTX)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    Z, H, N_CTX, _ = q.shape
    o, m = torch.empty_like(q), torch.empty(Z, H, N_CTX)
    attention_by_pointers[lambda meta: (triton.cdiv(N_CTX, meta["BLOCK_M"]), Z * H)](
        q,
        k,
        v,
        SCALE,
        m,
        o,
        q.stride(0),
        q.stride(1),
        H,
        N_CTX,
        BLOCK_M=32,
        BLOCK_N=16,
        HEAD_DIM=HEAD_DIM,
        STAGE=3 if causal else 1,
    )
    return o, m


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [1, 64, 75])
@each_float
def test_attention(dtype: torch.dtype, length: int, causal: bool) -> None:
    """Every query meets every key it may see, in whole blocks and in ones that the sequence does not fill."""
    q, k, v = heads(2, 2, length, dtype)
    o, m = attention(q, k, v, causal=causal)
    assert_attends(o, m, q, k, v, causal=causal)
