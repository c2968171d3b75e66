"""Tutorial 10: products of float8 and float4 values that share a scale in groups along K, by ``tl.dot_scaled``."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.tutorials.common import assert_rounded, each_float

triton = pytest.importorskip("triton")
tl = triton.language
TensorDescriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor

# OCP Microscaling Formats v1.0, table 5: e2m1, of which bit 3 is the sign.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
PACKED = {"e2m1": 2, "e4m3": 1}


@triton.jit
def row_scales_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    c_ptr,
    M,
    N,
    K: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_PACKED: tl.constexpr,
    B_PACKED: tl.constexpr,
    VEC_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = (offs_m < M)[:, None], (offs_n < N)[:, None]
    offs_ak = tl.arange(0, BLOCK_K // A_PACKED)[None, :]
    offs_bk = tl.arange(0, BLOCK_K // B_PACKED)[None, :]
    offs_s = tl.arange(0, BLOCK_K // VEC_SIZE)[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=2):
        a = tl.load(a_ptr + offs_m[:, None] * (K // A_PACKED) + k // A_PACKED + offs_ak, mask=in_m, other=0.0)
        b = tl.load(b_ptr + offs_n[:, None] * (K // B_PACKED) + k // B_PACKED + offs_bk, mask=in_n, other=0.0)
        s = offs_s + k // VEC_SIZE
        a_scale = tl.load(a_scale_ptr + offs_m[:, None] * (K // VEC_SIZE) + s, mask=in_m, other=0.0)
        b_scale = tl.load(b_scale_ptr + offs_n[:, None] * (K // VEC_SIZE) + s, mask=in_n, other=0.0)
        accumulator = tl.dot_scaled(a, a_scale, A_FORMAT, b.T, b_scale, B_FORMAT, accumulator)
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(c_ptrs, accumulator.to(c_ptr.dtype.element_ty), mask=in_m & (offs_n < N)[None, :])


@triton.jit
def shuffled_scales_kernel(
    a_desc,
    a_scale_desc,
    b_desc,
    b_scale_desc,
    c_desc,
    M,
    K,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_PACKED: tl.constexpr,
    B_PACKED: tl.constexpr,
    VEC_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    rep_m: tl.constexpr,
    rep_n: tl.constexpr,
    rep_k: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_M)
    pid_m = pid % num_pid_m
    pid_n = pid // num_pid_m
    offs_k_a, offs_k_b, offs_scale_k = 0, 0, 0
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=NUM_STAGES):
        a = a_desc.load([pid_m * BLOCK_M, offs_k_a])
        b = b_desc.load([pid_n * BLOCK_N, offs_k_b])
        scale_a = a_scale_desc.load([0, pid_m * rep_m, offs_scale_k, 0, 0])
        scale_b = b_scale_desc.load([0, pid_n * rep_n, offs_scale_k, 0, 0])
        scale_a = scale_a.reshape(rep_m, rep_k, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(BLOCK_M, BLOCK_K // VEC_SIZE)
        scale_b = scale_b.reshape(rep_n, rep_k, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(BLOCK_N, BLOCK_K // VEC_SIZE)
        accumulator = tl.dot_scaled(a, scale_a, A_FORMAT, b.T, scale_b, B_FORMAT, accumulator)
        offs_k_a += BLOCK_K // A_PACKED
        offs_k_b += BLOCK_K // B_PACKED
        offs_scale_k += rep_k
    c_desc.store([pid_m * BLOCK_M, pid_n * BLOCK_N], accumulator.to(c_desc.dtype))


@dataclass(frozen=True)
class Scaled:
    """Rows along K in a narrow format: what is stored, the scale of each group, and the values in float64."""

    form: str
    stored: Tensor
    scale: Tensor
    exact: Tensor


def scaled(rows: int, k: int, form: str, group: int, seed: int) -> Scaled:
    """Groups of 32 have powers of two for scales (MX), those of 16 have e4m3 numbers (NVFP4)."""
    generator = torch.Generator().manual_seed(seed)
    if form == "e2m1":
        code = torch.randint(0, 16, (rows, k), generator=generator, dtype=torch.uint8)
        stored, values = code[:, ::2] | code[:, 1::2] << 4, E2M1[code.long()]
    else:
        stored = torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn)
        values = stored.double()
    # Neither kind lets a sum of 256 products overflow float16.
    if group == 32:
        scale = torch.randint(124, 129, (rows, k // group), generator=generator, dtype=torch.uint8)
        factor = torch.exp2(scale.double() - 127)
    else:
        scale = torch.rand(rows, k // group, generator=generator).to(torch.float8_e4m3fn)
        factor = scale.double()
    return Scaled(form, stored, scale, values * factor.repeat_interleave(group, 1))


def matmul_by_row_scales(a: Scaled, b: Scaled, group: int, dtype: torch.dtype) -> Tensor:
    (M, K), N = a.exact.shape, b.exact.shape[0]
    c = torch.empty(M, N, dtype=dtype)
    forms = (a.form, b.form, PACKED[a.form], PACKED[b.form])
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
    row_scales_kernel[grid](a.stored, a.scale, b.stored, b.scale, c, M, N, K, *forms, group, 32, 32, 64)
    return c


def shuffled(scale: Tensor) -> Tensor:
    """Scales in the order in which a Blackwell tensor core takes them: 128 rows by 4 groups at a time, padded."""
    rows, groups = scale.shape
    whole = torch.zeros(-(-rows // 128) * 128, groups, dtype=torch.uint8)
    whole[:rows] = scale.view(torch.uint8)
    blocks = whole.reshape(-1, 4, 32, groups // 4, 4).permute(0, 3, 2, 1, 4)
    return blocks.reshape(1, -1, groups // 4, 2, 256).view(scale.dtype)


def matmul_by_shuffled_scales(a: Scaled, b: Scaled, group: int, dtype: torch.dtype) -> Tensor:
    (M, K), N = a.exact.shape, b.exact.shape[0]
    c = torch.empty(M, N, dtype=dtype)
    BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 128
    rep_m, rep_n, rep_k = BLOCK_M // 128, BLOCK_N // 128, BLOCK_K // group // 4
    shuffled_scales_kernel[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N), 1)](
        TensorDescriptor.from_tensor(a.stored, [BLOCK_M, BLOCK_K // PACKED[a.form]]),
        TensorDescriptor.from_tensor(shuffled(a.scale), [1, rep_m, rep_k, 2, 256]),
        TensorDescriptor.from_tensor(b.stored, [BLOCK_N, BLOCK_K // PACKED[b.form]]),
        TensorDescriptor.from_tensor(shuffled(b.scale), [1, rep_n, rep_k, 2, 256]),
        TensorDescriptor.from_tensor(c, [BLOCK_M, BLOCK_N]),
        M,
        K,
        a.form,
        b.form,
        PACKED[a.form],
        PACKED[b.form],
        group,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        rep_m,
        rep_n,
        rep_k,
        NUM_STAGES=4,
    )
    return c


PAIRS = {
    "mxfp8": (("e4m3", "e4m3"), 32),
    "mxfp4": (("e2m1", "e2m1"), 32),
    "mixed": (("e4m3", "e2m1"), 32),
    "nvfp4": (("e2m1", "e2m1"), 16),
}


def check(c: Tensor, a: Scaled, b: Scaled) -> None:
    """Scaled values have at most 8 significant bits, so products are exact in float32: only K additions round."""
    assert_rounded(c, a.exact @ b.exact.T, roundings=a.exact.shape[1], scale=a.exact.abs() @ b.exact.abs().T)


# NVFP4 compiles for the tiles of a Blackwell tensor core alone, which are larger than these.
@pytest.mark.parametrize("pair", ["mxfp8", "mxfp4", "mixed"])
@each_float
def test_block_scaled_matmul(dtype: torch.dtype, pair: str) -> None:
    """With scales in rows, on tiles that reach over both edges of a result in each dtype."""
    forms, group = PAIRS[pair]
    a, b = scaled(40, 128, forms[0], group, 0), scaled(50, 128, forms[1], group, 1)
    check(matmul_by_row_scales(a, b, group, dtype), a, b)


@pytest.mark.parametrize("pair", PAIRS)
@each_float
def test_block_scaled_matmul_of_shuffled_scales(dtype: torch.dtype, pair: str) -> None:
    """As the tutorial has it: all through descriptors, the scales in the order in which a tensor core takes them."""
    forms, group = PAIRS[pair]
    a, b = scaled(200, 256, forms[0], group, 0), scaled(136, 256, forms[1], group, 1)
    check(matmul_by_shuffled_scales(a, b, group, dtype), a, b)
