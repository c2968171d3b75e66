"""Tutorial 06, backward: delta, then the gradients of keys and values and that of queries in one kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tutorials.attention import HEAD_DIM, SCALE, exact_attention, heads
from tests.tutorials.common import assert_rounded, each_float, normal

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def preprocess(Out, DO, Delta, N_CTX, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr):
    off_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    off_hz = tl.program_id(1)
    tile = off_hz * HEAD_DIM * N_CTX + off_m[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    o = tl.load(Out + tile, mask=off_m[:, None] < N_CTX, other=0.0).to(tl.float32)
    do = tl.load(DO + tile, mask=off_m[:, None] < N_CTX, other=0.0).to(tl.float32)
    tl.store(Delta + off_hz * N_CTX + off_m, tl.sum(o * do, axis=1), mask=off_m < N_CTX)


@triton.jit
def add_dk_dv(
    dk,
    dv,
    k,
    v,
    Q,
    DO,
    M,
    D,
    qk_scale,
    N_CTX,
    start_n,
    start_m,
    num_steps,
    BLOCK_M1: tl.constexpr,
    BLOCK_N1: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK: tl.constexpr,
):
    offs_n = start_n + tl.arange(0, BLOCK_N1)
    offs_d = tl.arange(0, HEAD_DIM)
    curr_m = start_m
    for _ in range(num_steps):
        offs_m = curr_m + tl.arange(0, BLOCK_M1)
        inside = offs_m < N_CTX
        qT = tl.load(Q + offs_m[None, :] * HEAD_DIM + offs_d[:, None], mask=inside[None, :], other=0.0)
        do = tl.load(DO + offs_m[:, None] * HEAD_DIM + offs_d[None, :], mask=inside[:, None], other=0.0)
        m = tl.load(M + offs_m, mask=inside, other=0.0)
        Di = tl.load(D + offs_m, mask=inside, other=0.0)
        keep = inside[None, :]
        if MASK:
            keep &= offs_m[None, :] >= offs_n[:, None]
        pT = tl.where(keep, tl.math.exp2(tl.dot(k, qT) * qk_scale - m[None, :]), 0.0)
        dv += tl.dot(pT.to(do.dtype), do)
        dpT = tl.dot(v, tl.trans(do)).to(tl.float32)
        dsT = (pT * (dpT - Di[None, :])).to(qT.dtype)
        dk += tl.dot(dsT, tl.trans(qT))
        curr_m += BLOCK_M1
    return dk, dv


@triton.jit
def add_dq(
    dq,
    q,
    K,
    V,
    do,
    m,
    Di,
    qk_scale,
    N_CTX,
    start_m,
    start_n,
    num_steps,
    BLOCK_M2: tl.constexpr,
    BLOCK_N2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK: tl.constexpr,
):
    offs_m = start_m + tl.arange(0, BLOCK_M2)
    offs_n = start_n + tl.arange(0, BLOCK_N2)
    offs_d = tl.arange(0, HEAD_DIM)
    kT_ptrs = K + offs_n[None, :] * HEAD_DIM + offs_d[:, None]
    vT_ptrs = V + offs_n[None, :] * HEAD_DIM + offs_d[:, None]
    tl.static_assert(BLOCK_M2 % BLOCK_N2 == 0)
    curr_n = start_n
    for _ in range(num_steps):
        offs_n = curr_n + tl.arange(0, BLOCK_N2)
        keep = (offs_n < N_CTX)[None, :]
        kT = tl.load(kT_ptrs, mask=keep, other=0.0)
        vT = tl.load(vT_ptrs, mask=keep, other=0.0)
        if MASK:
            keep = keep & (offs_m[:, None] >= offs_n[None, :])
        p = tl.where(keep, tl.math.exp2(tl.dot(q, kT) * qk_scale - m), 0.0)
        dp = tl.dot(do, vT).to(tl.float32)
        ds = (p * (dp - Di[:, None])).to(kT.dtype)
        dq += tl.dot(ds, tl.trans(kT))
        curr_n += BLOCK_N2
        kT_ptrs += BLOCK_N2 * HEAD_DIM
        vT_ptrs += BLOCK_N2 * HEAD_DIM
    return dq


@triton.jit
def attention_bwd(
    Q,
    K,
    V,
    sm_scale,
    DO,
    DQ,
    DK,
    DV,
    M,
    D,
    stride_z,
    stride_h,
    H,
    N_CTX,
    BLOCK_M1: tl.constexpr,
    BLOCK_N1: tl.constexpr,
    BLOCK_M2: tl.constexpr,
    BLOCK_N2: tl.constexpr,
    BLK_SLICE_FACTOR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    tl.static_assert(BLOCK_N1 == BLOCK_M2)
    bhid = tl.program_id(2)
    adj = (stride_h * (bhid % H) + stride_z * (bhid // H)).to(tl.int64)
    pid = tl.program_id(0)
    Q += adj
    K += adj
    V += adj
    DO += adj
    DQ += adj
    DK += adj
    DV += adj
    M += (bhid * N_CTX).to(tl.int64)
    D += (bhid * N_CTX).to(tl.int64)
    qk_scale = sm_scale * 1.44269504  # 1 / log(2)
    offs_d = tl.arange(0, HEAD_DIM)

    # The queries that see this block of keys: a diagonal in slices, which needs the mask, and all later ones.
    start_n = pid * BLOCK_N1
    start_m = 0
    offs_n = start_n + tl.arange(0, BLOCK_N1)
    tile = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    k = tl.load(K + tile, mask=offs_n[:, None] < N_CTX, other=0.0)
    v = tl.load(V + tile, mask=offs_n[:, None] < N_CTX, other=0.0)
    dk = tl.zeros([BLOCK_N1, HEAD_DIM], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N1, HEAD_DIM], dtype=tl.float32)
    if CAUSAL:
        MASK_BLOCK_M1: tl.constexpr = BLOCK_M1 // BLK_SLICE_FACTOR
        start_m = start_n
        num_steps = BLOCK_N1 // MASK_BLOCK_M1
        dk, dv = add_dk_dv(
            dk, dv, k, v, Q, DO, M, D, qk_scale, N_CTX, start_n, start_m, num_steps, MASK_BLOCK_M1, BLOCK_N1, HEAD_DIM,
            MASK=True,
        )  # fmt: skip
        start_m += num_steps * MASK_BLOCK_M1
    num_steps = tl.cdiv(max(N_CTX - start_m, 0), BLOCK_M1)
    dk, dv = add_dk_dv(
        dk, dv, k, v, Q, DO, M, D, qk_scale, N_CTX, start_n, start_m, num_steps, BLOCK_M1, BLOCK_N1, HEAD_DIM,
        MASK=False,
    )  # fmt: skip
    tl.store(DV + tile, dv, mask=offs_n[:, None] < N_CTX)
    tl.store(DK + tile, dk * sm_scale, mask=offs_n[:, None] < N_CTX)

    # The keys that this block of queries sees: the diagonal, and all earlier ones.
    start_m = pid * BLOCK_M2
    start_n = 0
    num_steps = tl.cdiv(N_CTX, BLOCK_N2)
    offs_m = start_m + tl.arange(0, BLOCK_M2)
    inside = offs_m < N_CTX
    tile = offs_m[:, None] * HEAD_DIM + offs_d[None, :]
    q = tl.load(Q + tile, mask=inside[:, None], other=0.0)
    do = tl.load(DO + tile, mask=inside[:, None], other=0.0)
    m = tl.load(M + offs_m, mask=inside, other=0.0)[:, None]
    Di = tl.load(D + offs_m, mask=inside, other=0.0)
    dq = tl.zeros([BLOCK_M2, HEAD_DIM], dtype=tl.float32)
    if CAUSAL:
        MASK_BLOCK_N2: tl.constexpr = BLOCK_N2 // BLK_SLICE_FACTOR
        end_n = start_m + BLOCK_M2
        num_steps = BLOCK_M2 // MASK_BLOCK_N2
        dq = add_dq(
            dq, q, K, V, do, m, Di, qk_scale, N_CTX, start_m, end_n - num_steps * MASK_BLOCK_N2, num_steps, BLOCK_M2,
            MASK_BLOCK_N2, HEAD_DIM, MASK=True,
        )  # fmt: skip
        end_n -= num_steps * MASK_BLOCK_N2
        num_steps = end_n // BLOCK_N2
        start_n = end_n - num_steps * BLOCK_N2
    dq = add_dq(
        dq, q, K, V, do, m, Di, qk_scale, N_CTX, start_m, start_n, num_steps, BLOCK_M2, BLOCK_N2, HEAD_DIM, MASK=False
    )
    tl.store(DQ + tile, dq * sm_scale, mask=inside[:, None])


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, m: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    Z, H, N_CTX, _ = q.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(m)
    preprocess[(triton.cdiv(N_CTX, 16), Z * H)](o, do, delta, N_CTX, BLOCK_M=16, HEAD_DIM=HEAD_DIM)
    sizes = {"BLOCK_M1": 32, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 32, "BLK_SLICE_FACTOR": 2}
    attention_bwd[(triton.cdiv(N_CTX, 32), 1, Z * H)](
        q, k, v, SCALE, do, dq, dk, dv, m, delta, *q.stride()[:2], H, N_CTX, **sizes, HEAD_DIM=HEAD_DIM, CAUSAL=causal
    )
    return dq, dk, dv


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [64, 75])
@each_float
def test_attention_backward(dtype: torch.dtype, length: int, causal: bool) -> None:
    """Gradients of q, k and v against float64, each sum's own magnitudes setting what is allowed.

    The dtype rounds the probabilities for dv; the saved output (inside delta) and ds for dq and dk.
    """
    q, k, v = heads(2, 2, length, dtype)
    do = normal(*q.shape, dtype=dtype, seed=1)
    exact = exact_attention(q, k, v, causal=causal)
    got = backward(do, q, k, v, exact.output.to(dtype), exact.log2_sum.float(), causal=causal)
    q, k, v, do = q.double(), k.double(), v.double(), do.double()
    delta = (exact.output * do).sum(-1, keepdim=True)
    ds = exact.p * (do @ v.mT - delta) * SCALE
    size = exact.p * (do.abs() @ v.abs().mT + (exact.output * do).abs().sum(-1, keepdim=True)) * SCALE
    roundings = 2 * exact.roundings + length
    assert_rounded(got[2], exact.p.mT @ do, roundings=roundings, scale=exact.p.mT @ do.abs(), narrow=1)
    assert_rounded(got[0], ds @ k, roundings=roundings, scale=size @ k.abs(), narrow=2)
    assert_rounded(got[1], ds.mT @ q, roundings=roundings, scale=size.mT @ q.abs(), narrow=2)
