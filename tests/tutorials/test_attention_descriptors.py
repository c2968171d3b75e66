"""Tutorial 06, forward: flash attention v2 by tensor descriptors, made by the host or in the kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tutorials.attention import HEAD_DIM, SCALE, assert_attends, heads, key_range, rescale_and_add
from tests.tutorials.common import each_float

triton = pytest.importorskip("triton")
tl = triton.language
TensorDescriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
BLOCK_M = 32
BLOCK_N = 16


@triton.jit
def made_if_pointer(desc_or_ptr, shape, strides, block_shape):
    if isinstance(desc_or_ptr, tl.tensor_descriptor):
        return desc_or_ptr
    else:  # noqa: RET505 - the compiler drops one of the two branches, which it needs to see as such
        return tl.make_tensor_descriptor(desc_or_ptr, shape, strides, block_shape)


@triton.jit
def inner_by_descriptors(
    acc,
    l_i,
    m_i,
    q,
    desc_k,
    desc_v,
    first_row,
    qk_scale,
    start_m,
    N_CTX,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGE: tl.constexpr,
    warp_specialize: tl.constexpr,
):
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    lo, hi = key_range(start_m, N_CTX, BLOCK_M, STAGE)
    for start_n in tl.range(lo, hi, BLOCK_N, warp_specialize=warp_specialize):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = desc_k.load([first_row + start_n, 0]).T
        v = desc_v.load([first_row + start_n, 0])
        keep = (offs_n < N_CTX)[None, :]
        if STAGE == 2:
            keep &= offs_m[:, None] >= offs_n[None, :]
        acc, l_i, m_i = rescale_and_add(acc, l_i, m_i, tl.dot(q, k) * qk_scale, v, keep)
    return acc, l_i, m_i


@triton.jit
def attention_by_descriptors(
    desc_q,
    desc_k,
    desc_v,
    sm_scale,
    M,
    desc_o,
    Z,
    H,
    N_CTX,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STAGE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    warp_specialize: tl.constexpr,
):
    start_m = tl.program_id(0)
    off_hz = tl.program_id(1)
    rows = Z * H * N_CTX
    first_row = off_hz * N_CTX
    if PER_HEAD:
        # A block that reaches over the end of its head is padded and clipped there.
        desc_q += first_row.to(tl.int64) * HEAD_DIM
        desc_k += first_row.to(tl.int64) * HEAD_DIM
        desc_v += first_row.to(tl.int64) * HEAD_DIM
        desc_o += first_row.to(tl.int64) * HEAD_DIM
        rows = N_CTX
        first_row = 0
    desc_q = made_if_pointer(desc_q, [rows, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_M, HEAD_DIM])
    desc_k = made_if_pointer(desc_k, [rows, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_N, HEAD_DIM])
    desc_v = made_if_pointer(desc_v, [rows, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_N, HEAD_DIM])
    desc_o = made_if_pointer(desc_o, [rows, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_M, HEAD_DIM])
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    qk_scale = sm_scale * 1.44269504
    q = desc_q.load([first_row + start_m * BLOCK_M, 0])
    if STAGE & 1:
        acc, l_i, m_i = inner_by_descriptors(
            acc, l_i, m_i, q, desc_k, desc_v, first_row, qk_scale, start_m, N_CTX, BLOCK_M, BLOCK_N, 4 - STAGE,
            warp_specialize,
        )  # fmt: skip
    if STAGE & 2:
        acc, l_i, m_i = inner_by_descriptors(
            acc, l_i, m_i, q, desc_k, desc_v, first_row, qk_scale, start_m, N_CTX, BLOCK_M, BLOCK_N, 2, warp_specialize
        )
    tl.store(M + off_hz * N_CTX + offs_m, m_i + tl.math.log2(l_i), mask=offs_m < N_CTX)
    desc_o.store([first_row + start_m * BLOCK_M, 0], (acc / l_i[:, None]).to(desc_o.dtype))


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, on_host: bool) -> tuple[Tensor, Tensor]:
    Z, H, N_CTX, _ = q.shape
    o, m = torch.empty_like(q), torch.empty(Z, H, N_CTX)

    def given(tensor: Tensor, rows: int) -> TensorDescriptor | Tensor:
        if not on_host:
            return tensor
        return TensorDescriptor(tensor, [Z * H * N_CTX, HEAD_DIM], [HEAD_DIM, 1], [rows, HEAD_DIM])

    # Where the descriptors made in a kernel live on a GPU.
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    attention_by_descriptors[(triton.cdiv(N_CTX, BLOCK_M), Z * H, 1)](
        given(q, BLOCK_M),
        given(k, BLOCK_N),
        given(v, BLOCK_N),
        SCALE,
        m,
        given(o, BLOCK_M),
        Z,
        H,
        N_CTX,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        HEAD_DIM=HEAD_DIM,
        STAGE=3 if causal else 1,
        PER_HEAD=not on_host,
        warp_specialize=False,
    )
    return o, m


# The host's descriptor covers all heads in one: a block over the end of one head would overwrite the next.
@pytest.mark.parametrize(("length", "on_host"), [(64, True), (64, False), (75, False)], ids=["host", "made", "tail"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@each_float
def test_attention_by_descriptors(dtype: torch.dtype, causal: bool, length: int, on_host: bool) -> None:
    """As by pointers; what a descriptor pads with zero beyond its shape is no key, and what is there is not stored."""
    q, k, v = heads(2, 2, length, dtype)
    o, m = attention(q, k, v, causal=causal, on_host=on_host)
    assert_attends(o, m, q, k, v, causal=causal)
