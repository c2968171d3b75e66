"""Tutorial 08: several matrix products of different sizes in one launch, found through tables of device pointers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.sweeps import sweep
from tests.tutorials.common import a_float, assert_product, normal

triton = pytest.importorskip("triton")
tl = triton.language
ELEMENTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# Rows of whole 16 bytes, as descriptors and the hints want them; some products have fewer tiles than programs.
SIZES = [(40, 72, 48), (16, 16, 16), (75, 24, 40), (5, 88, 8)]


@triton.jit
def grouped_matmul_kernel(
    group_a_ptrs,
    group_b_ptrs,
    group_c_ptrs,
    group_gemm_sizes,
    g_lds,
    group_size,
    ELEMENT: tl.constexpr,
    NUM_SM: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):
    tile_idx = tl.program_id(0)
    last_problem_end = 0
    for g in range(group_size):
        gm = tl.load(group_gemm_sizes + g * 3)
        gn = tl.load(group_gemm_sizes + g * 3 + 1)
        gk = tl.load(group_gemm_sizes + g * 3 + 2)
        num_n_tiles = tl.cdiv(gn, BLOCK_SIZE_N)
        num_tiles = tl.cdiv(gm, BLOCK_SIZE_M) * num_n_tiles
        while tile_idx >= last_problem_end and tile_idx < last_problem_end + num_tiles:
            lda = tl.load(g_lds + g * 3)
            ldb = tl.load(g_lds + g * 3 + 1)
            ldc = tl.load(g_lds + g * 3 + 2)
            a_ptr = tl.load(group_a_ptrs + g).to(tl.pointer_type(ELEMENT))
            b_ptr = tl.load(group_b_ptrs + g).to(tl.pointer_type(ELEMENT))
            c_ptr = tl.load(group_c_ptrs + g).to(tl.pointer_type(ELEMENT))
            tile_in_problem = tile_idx - last_problem_end
            offs_m = (tile_in_problem // num_n_tiles) * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
            offs_n = (tile_in_problem % num_n_tiles) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
            offs_k = tl.arange(0, BLOCK_SIZE_K)
            a_ptrs = a_ptr + offs_m[:, None] * lda + offs_k[None, :]
            b_ptrs = b_ptr + offs_k[:, None] * ldb + offs_n[None, :]
            accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
            for kk in range(tl.cdiv(gk, BLOCK_SIZE_K)):
                tl.multiple_of(a_ptrs, [16, 16])
                tl.multiple_of(b_ptrs, [16, 16])
                left = gk - kk * BLOCK_SIZE_K
                a = tl.load(a_ptrs, mask=(offs_m[:, None] < gm) & (offs_k[None, :] < left), other=0.0)
                b = tl.load(b_ptrs, mask=(offs_k[:, None] < left) & (offs_n[None, :] < gn), other=0.0)
                accumulator += tl.dot(a, b)
                a_ptrs += BLOCK_SIZE_K
                b_ptrs += BLOCK_SIZE_K * ldb
            c_ptrs = c_ptr + ldc * offs_m[:, None] + offs_n[None, :]
            tl.store(c_ptrs, accumulator.to(ELEMENT), mask=(offs_m[:, None] < gm) & (offs_n[None, :] < gn))
            tile_idx += NUM_SM
        last_problem_end = last_problem_end + num_tiles


@triton.jit
def grouped_matmul_descriptor_kernel(
    group_a_ptrs,
    group_b_ptrs,
    group_c_ptrs,
    group_gemm_sizes,
    g_lds,
    group_size,
    ELEMENT: tl.constexpr,
    NUM_SM: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):
    tile_idx = tl.program_id(0)
    last_problem_end = 0
    for g in range(group_size):
        gm = tl.load(group_gemm_sizes + g * 3)
        gn = tl.load(group_gemm_sizes + g * 3 + 1)
        gk = tl.load(group_gemm_sizes + g * 3 + 2)
        num_n_tiles = tl.cdiv(gn, BLOCK_SIZE_N)
        num_tiles = tl.cdiv(gm, BLOCK_SIZE_M) * num_n_tiles
        if tile_idx >= last_problem_end and tile_idx < last_problem_end + num_tiles:
            lda = tl.load(g_lds + g * 3)
            ldb = tl.load(g_lds + g * 3 + 1)
            ldc = tl.load(g_lds + g * 3 + 2)
            a_desc = tl.make_tensor_descriptor(
                tl.load(group_a_ptrs + g).to(tl.pointer_type(ELEMENT)),
                shape=[gm, gk],
                strides=[lda, 1],
                block_shape=[BLOCK_SIZE_M, BLOCK_SIZE_K],
            )
            b_desc = tl.make_tensor_descriptor(
                tl.load(group_b_ptrs + g).to(tl.pointer_type(ELEMENT)),
                shape=[gn, gk],
                strides=[ldb, 1],
                block_shape=[BLOCK_SIZE_N, BLOCK_SIZE_K],
            )
            c_desc = tl.make_tensor_descriptor(
                tl.load(group_c_ptrs + g).to(tl.pointer_type(ELEMENT)),
                shape=[gm, gn],
                strides=[ldc, 1],
                block_shape=[BLOCK_SIZE_M, BLOCK_SIZE_N],
            )
            while tile_idx >= last_problem_end and tile_idx < last_problem_end + num_tiles:
                tile_in_problem = tile_idx - last_problem_end
                offs_m = (tile_in_problem // num_n_tiles) * BLOCK_SIZE_M
                offs_n = (tile_in_problem % num_n_tiles) * BLOCK_SIZE_N
                accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
                for kk in range(tl.cdiv(gk, BLOCK_SIZE_K)):
                    a = a_desc.load([offs_m, kk * BLOCK_SIZE_K])
                    b = b_desc.load([offs_n, kk * BLOCK_SIZE_K])
                    accumulator += tl.dot(a, b.T)
                c_desc.store([offs_m, offs_n], accumulator.to(ELEMENT))
                tile_idx += NUM_SM
        last_problem_end = last_problem_end + num_tiles


def group_gemm(group_a: list[Tensor], group_b: list[Tensor], programs: int) -> list[Tensor]:
    """``a @ b`` of each pair."""
    group_c = [torch.empty(a.shape[0], b.shape[1], dtype=a.dtype) for a, b in zip(group_a, group_b, strict=True)]
    sizes = [[c.shape[0], c.shape[1], a.shape[1]] for a, c in zip(group_a, group_c, strict=True)]
    launch(grouped_matmul_kernel, group_a, group_b, group_c, sizes, programs)
    return group_c


def group_gemm_by_descriptors(group_a: list[Tensor], group_bt: list[Tensor], programs: int) -> list[Tensor]:
    """``a @ bt.T`` of each pair."""
    group_c = [torch.empty(a.shape[0], b.shape[0], dtype=a.dtype) for a, b in zip(group_a, group_bt, strict=True)]
    sizes = [[c.shape[0], c.shape[1], a.shape[1]] for a, c in zip(group_a, group_c, strict=True)]
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    launch(grouped_matmul_descriptor_kernel, group_a, group_bt, group_c, sizes, programs)
    return group_c


def launch(
    kernel: triton.runtime.JITFunction,
    group_a: list[Tensor],
    group_b: list[Tensor],
    group_c: list[Tensor],
    sizes: list[list[int]],
    programs: int,
) -> None:
    tables = [torch.tensor([t.data_ptr() for t in group]) for group in (group_a, group_b, group_c)]
    leading = [[t.stride(0) for t in triple] for triple in zip(group_a, group_b, group_c, strict=True)]
    kernel[(programs,)](
        *tables,
        torch.tensor(sizes, dtype=torch.int32),
        torch.tensor(leading, dtype=torch.int32),
        len(group_a),
        ELEMENT=ELEMENTS[group_a[0].dtype],
        NUM_SM=programs,
        BLOCK_SIZE_M=16,
        BLOCK_SIZE_N=32,
        BLOCK_SIZE_K=16,
    )


@sweep("programs", [1, 4, 40])
@a_float
def test_grouped_gemm(dtype: torch.dtype, programs: int) -> None:
    """Each product is right, whether one program does all tiles, some do several each, or many find none."""
    group_a = [normal(m, k, dtype=dtype, seed=i) for i, (m, _, k) in enumerate(SIZES)]
    group_b = [normal(k, n, dtype=dtype, seed=9 + i) for i, (_, n, k) in enumerate(SIZES)]
    for c, a, b in zip(group_gemm(group_a, group_b, programs), group_a, group_b, strict=True):
        assert_product(c, a, b)


@sweep("programs", [4, 40])
@a_float
def test_grouped_gemm_by_descriptors(dtype: torch.dtype, programs: int) -> None:
    """The same with the second matrix transposed, through descriptors made once for each product."""
    group_a = [normal(m, k, dtype=dtype, seed=i) for i, (m, _, k) in enumerate(SIZES)]
    group_bt = [normal(n, k, dtype=dtype, seed=9 + i) for i, (_, n, k) in enumerate(SIZES)]
    for c, a, bt in zip(group_gemm_by_descriptors(group_a, group_bt, programs), group_a, group_bt, strict=True):
        assert_product(c, a, bt.T)
