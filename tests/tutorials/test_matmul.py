"""Tutorial 03: matrix product in grouped order with a fused activation; and in block pointers, while they last."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tutorials.common import VERSION, assert_product, each_float, normal

triton = pytest.importorskip("triton")
tl = triton.language

CONFIGS = [
    triton.Config({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 2}, num_stages=3),
    triton.Config({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 8}, num_warps=2),
]


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.autotune(configs=CONFIGS, key=["M", "N", "K"])
@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    num_pid_in_group = GROUP_SIZE_M * num_pid_n
    group_id = pid // num_pid_in_group
    first_pid_m = group_id * GROUP_SIZE_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)
    pid_m = first_pid_m + ((pid % num_pid_in_group) % group_size_m)
    pid_n = (pid % num_pid_in_group) // group_size_m
    tl.assume(pid_m >= 0)
    tl.assume(pid_n >= 0)
    tl.assume(stride_am > 0)
    tl.assume(stride_bn > 0)

    offs_am = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    offs_bn = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + (offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_SIZE_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_SIZE_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_SIZE_K, other=0.0)
        accumulator = tl.dot(a, b, accumulator)
        a_ptrs += BLOCK_SIZE_K * stride_ak
        b_ptrs += BLOCK_SIZE_K * stride_bk
    if ACTIVATION == "leaky_relu":
        accumulator = leaky_relu(accumulator)
    c = accumulator.to(c_ptr.dtype.element_ty)

    offs_cm = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_cn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    c_ptrs = c_ptr + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
    c_mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
    tl.store(c_ptrs, c, mask=c_mask)


def matmul(a: Tensor, b: Tensor, activation: str = "", dtype: torch.dtype | None = None) -> Tensor:
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty(M, N, dtype=dtype or a.dtype)
    matmul_kernel[lambda meta: (triton.cdiv(M, meta["BLOCK_SIZE_M"]) * triton.cdiv(N, meta["BLOCK_SIZE_N"]),)](
        a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), ACTIVATION=activation
    )
    return c


@pytest.mark.parametrize("activation", ["", "leaky_relu"])
@each_float
def test_matmul(dtype: torch.dtype, activation: str) -> None:
    """Tiles that reach over every edge, in a grid whose last group is a row short."""
    a, b = normal(75, 50, dtype=dtype), normal(50, 70, dtype=dtype, seed=1)
    assert_product(matmul(a, b, activation), a, b, leaky=activation != "")


@each_float
def test_matmul_of_transposed_inputs(dtype: torch.dtype) -> None:
    """Both inputs are read through their strides."""
    a, b = normal(50, 75, dtype=dtype).T, normal(70, 50, dtype=dtype, seed=1).T
    assert_product(matmul(a, b), a, b)


def test_matmul_of_float8() -> None:
    """float8_e5m2 inputs, the second one transposed as the tutorial has it, and a float16 result."""
    a, b = normal(75, 50, dtype=torch.float8_e5m2), normal(70, 50, dtype=torch.float8_e5m2, seed=1).T
    assert_product(matmul(a, b, dtype=torch.float16), a, b)


@triton.jit
def block_pointer_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    a_block_ptr = tl.make_block_ptr(
        base=a_ptr,
        shape=(M, K),
        strides=(stride_am, stride_ak),
        offsets=(pid_m * BLOCK_SIZE_M, 0),
        block_shape=(BLOCK_SIZE_M, BLOCK_SIZE_K),
        order=(1, 0),
    )
    b_block_ptr = tl.make_block_ptr(
        base=b_ptr,
        shape=(K, N),
        strides=(stride_bk, stride_bn),
        offsets=(0, pid_n * BLOCK_SIZE_N),
        block_shape=(BLOCK_SIZE_K, BLOCK_SIZE_N),
        order=(1, 0),
    )
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for _ in range(0, K, BLOCK_SIZE_K):
        a = tl.load(a_block_ptr, boundary_check=(0, 1), padding_option="zero")
        b = tl.load(b_block_ptr, boundary_check=(0, 1), padding_option="zero")
        accumulator = tl.dot(a, b, accumulator)
        a_block_ptr = tl.advance(a_block_ptr, (0, BLOCK_SIZE_K))
        b_block_ptr = tl.advance(b_block_ptr, (BLOCK_SIZE_K, 0))
    c_block_ptr = tl.make_block_ptr(
        base=c_ptr,
        shape=(M, N),
        strides=(stride_cm, stride_cn),
        offsets=(pid_m * BLOCK_SIZE_M, pid_n * BLOCK_SIZE_N),
        block_shape=(BLOCK_SIZE_M, BLOCK_SIZE_N),
        order=(1, 0),
    )
    tl.store(c_block_ptr, accumulator.to(c_ptr.dtype.element_ty), boundary_check=(0, 1))


def matmul_by_block_pointers(a: Tensor, b: Tensor) -> Tensor:
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype)
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 32))
    block_pointer_kernel[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), 16, 32, 16)
    return c


@pytest.mark.skipif(VERSION >= (3, 8), reason="Triton 3.8 removed block pointers")
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@each_float
def test_matmul_by_block_pointers(dtype: torch.dtype) -> None:
    """Blocks reaching over every edge are padded with zero and not stored beyond it."""
    a, b = normal(35, 50, dtype=dtype), normal(50, 70, dtype=dtype, seed=1)
    assert_product(matmul_by_block_pointers(a, b), a, b)
