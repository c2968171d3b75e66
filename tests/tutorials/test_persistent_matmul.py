"""Tutorial 09: matrix multiplication by programs that take one tile after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tutorials.common import assert_product, each_float, normal

triton = pytest.importorskip("triton")
tl = triton.language
TensorDescriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
PROGRAMS = 5


@triton.jit
def compute_pid(tile_id, num_pid_in_group, num_pid_m, GROUP_SIZE_M: tl.constexpr):
    group_id = tile_id // num_pid_in_group
    first_pid_m = group_id * GROUP_SIZE_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)
    pid_m = first_pid_m + (tile_id % group_size_m)
    pid_n = (tile_id % num_pid_in_group) // group_size_m
    return pid_m, pid_n


@triton.jit
def persistent_kernel(
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
    NUM_SMS: tl.constexpr,
):
    start_pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    k_tiles = tl.cdiv(K, BLOCK_SIZE_K)
    num_tiles = num_pid_m * num_pid_n
    # A counter of its own for the epilogue, so that the flattened loop can be pipelined.
    tile_id_c = start_pid - NUM_SMS
    offs_k_for_mask = tl.arange(0, BLOCK_SIZE_K)
    num_pid_in_group = GROUP_SIZE_M * num_pid_n
    for tile_id in tl.range(start_pid, num_tiles, NUM_SMS, flatten=True):
        pid_m, pid_n = compute_pid(tile_id, num_pid_in_group, num_pid_m, GROUP_SIZE_M)
        offs_am = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
        offs_bn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        # Untrue in the tiles at the edge: lanes past it go back to 0. The tutorial says so all the same, and gets away
        # with it, because those lanes are not stored and a load is only ever widened along a divisible stride.
        offs_am = tl.where(offs_am < M, offs_am, 0)
        offs_bn = tl.where(offs_bn < N, offs_bn, 0)
        offs_am = tl.max_contiguous(tl.multiple_of(offs_am, BLOCK_SIZE_M), BLOCK_SIZE_M)
        offs_bn = tl.max_contiguous(tl.multiple_of(offs_bn, BLOCK_SIZE_N), BLOCK_SIZE_N)
        accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
        for ki in range(k_tiles):
            offs_k = ki * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
            a_ptrs = a_ptr + (offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak)
            b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)
            a = tl.load(a_ptrs, mask=offs_k_for_mask[None, :] < K - ki * BLOCK_SIZE_K, other=0.0)
            b = tl.load(b_ptrs, mask=offs_k_for_mask[:, None] < K - ki * BLOCK_SIZE_K, other=0.0)
            accumulator = tl.dot(a, b, accumulator)
        tile_id_c += NUM_SMS
        pid_m, pid_n = compute_pid(tile_id_c, num_pid_in_group, num_pid_m, GROUP_SIZE_M)
        offs_cm = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
        offs_cn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        c_ptrs = c_ptr + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
        c_mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
        tl.store(c_ptrs, accumulator.to(c_ptr.dtype.element_ty), mask=c_mask)


@triton.jit
def store_tile(c_desc, offs_cm, offs_cn, accumulator, EPILOGUE_SUBTILE: tl.constexpr):
    """The tile in one store, or in two halves of its columns."""
    BLOCK_SIZE_M: tl.constexpr = accumulator.shape[0]
    BLOCK_SIZE_N: tl.constexpr = accumulator.shape[1]
    if EPILOGUE_SUBTILE:
        acc = tl.reshape(accumulator, (BLOCK_SIZE_M, 2, BLOCK_SIZE_N // 2))
        acc = tl.permute(acc, (0, 2, 1))
        acc0, acc1 = tl.split(acc)
        c_desc.store([offs_cm, offs_cn], acc0.to(c_desc.dtype))
        c_desc.store([offs_cm, offs_cn + BLOCK_SIZE_N // 2], acc1.to(c_desc.dtype))
    else:
        c_desc.store([offs_cm, offs_cn], accumulator.to(c_desc.dtype))


@triton.jit
def tiles_by_descriptors(
    a_desc,
    b_desc,
    c_desc,
    M,
    N,
    K,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    NUM_SMS: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
):
    start_pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    num_pid_in_group = GROUP_SIZE_M * num_pid_n
    for tile_id in tl.range(start_pid, num_pid_m * num_pid_n, NUM_SMS, flatten=True, warp_specialize=False):
        pid_m, pid_n = compute_pid(tile_id, num_pid_in_group, num_pid_m, GROUP_SIZE_M)
        offs_am = pid_m * BLOCK_SIZE_M
        offs_bn = pid_n * BLOCK_SIZE_N
        accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
        for ki in range(tl.cdiv(K, BLOCK_SIZE_K)):
            a = a_desc.load([offs_am, ki * BLOCK_SIZE_K])
            b = b_desc.load([offs_bn, ki * BLOCK_SIZE_K])
            accumulator = tl.dot(a, b.T, accumulator)
        store_tile(c_desc, offs_am, offs_bn, accumulator, EPILOGUE_SUBTILE)


def set_block_shapes(nargs: dict[str, Any]) -> None:
    """The pre-hook of a config: the host's descriptors are made before their blocks' sizes are chosen."""
    m, n, k = (nargs[f"BLOCK_SIZE_{letter}"] for letter in "MNK")
    nargs["a_desc"].block_shape = [m, k]
    nargs["b_desc"].block_shape = [n, k]
    nargs["c_desc"].block_shape = [m, n // 2 if nargs["EPILOGUE_SUBTILE"] else n]


BLOCKS = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 2}


@triton.autotune(configs=[triton.Config(BLOCKS, num_stages=2, pre_hook=set_block_shapes)], key=["M", "N", "K"])
@triton.jit
def host_descriptor_kernel(
    a_desc,
    b_desc,
    c_desc,
    M,
    N,
    K,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    NUM_SMS: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
):
    tiles_by_descriptors(
        a_desc, b_desc, c_desc, M, N, K, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M, NUM_SMS,
        EPILOGUE_SUBTILE,
    )  # fmt: skip


@triton.jit
def device_descriptor_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    NUM_SMS: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
):
    columns: tl.constexpr = BLOCK_SIZE_N // 2 if EPILOGUE_SUBTILE else BLOCK_SIZE_N
    a_desc = tl.make_tensor_descriptor(a_ptr, shape=[M, K], strides=[K, 1], block_shape=[BLOCK_SIZE_M, BLOCK_SIZE_K])
    b_desc = tl.make_tensor_descriptor(b_ptr, shape=[N, K], strides=[K, 1], block_shape=[BLOCK_SIZE_N, BLOCK_SIZE_K])
    c_desc = tl.make_tensor_descriptor(c_ptr, shape=[M, N], strides=[N, 1], block_shape=[BLOCK_SIZE_M, columns])
    tiles_by_descriptors(
        a_desc, b_desc, c_desc, M, N, K, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M, NUM_SMS,
        EPILOGUE_SUBTILE,
    )  # fmt: skip


def grid(M: int, N: int) -> Callable[[dict[str, Any]], tuple[int]]:
    return lambda meta: (min(PROGRAMS, triton.cdiv(M, meta["BLOCK_SIZE_M"]) * triton.cdiv(N, meta["BLOCK_SIZE_N"])),)


def matmul_persistent(a: Tensor, b: Tensor) -> Tensor:
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype)
    strides = (*a.stride(), *b.stride(), *c.stride())
    persistent_kernel[grid(M, N)](a, b, c, M, N, K, *strides, **BLOCKS, NUM_SMS=PROGRAMS)
    return c


def matmul_by_host_descriptors(a: Tensor, bt: Tensor, subtile: bool) -> Tensor:
    (M, K), N = a.shape, bt.shape[0]
    c = torch.empty(M, N, dtype=a.dtype)
    descriptors = [TensorDescriptor.from_tensor(t, [1, 1]) for t in (a, bt, c)]
    host_descriptor_kernel[grid(M, N)](*descriptors, M, N, K, NUM_SMS=PROGRAMS, EPILOGUE_SUBTILE=subtile)
    return c


def matmul_by_device_descriptors(a: Tensor, bt: Tensor, subtile: bool) -> Tensor:
    (M, K), N = a.shape, bt.shape[0]
    c = torch.empty(M, N, dtype=a.dtype)
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    device_descriptor_kernel[grid(M, N)](a, bt, c, M, N, K, **BLOCKS, NUM_SMS=PROGRAMS, EPILOGUE_SUBTILE=subtile)
    return c


@pytest.mark.parametrize("shape", [(75, 70, 50), (72, 72, 40), (9, 20, 16)])
@each_float
def test_persistent_matmul(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Five programs do fifteen tiles, in groups of two rows and one of one; or one program all there is."""
    m, n, k = shape
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype, seed=1)
    assert_product(matmul_persistent(a, b), a, b)


@pytest.mark.parametrize("subtile", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("launch", [matmul_by_host_descriptors, matmul_by_device_descriptors])
@each_float
def test_persistent_matmul_by_descriptors(
    dtype: torch.dtype, launch: Callable[[Tensor, Tensor, bool], Tensor], subtile: bool
) -> None:
    """Descriptors pad with zero and clip at every edge, also of a tile stored in two halves."""
    a, bt = normal(75, 40, dtype=dtype), normal(72, 40, dtype=dtype, seed=1)
    assert_product(launch(a, bt, subtile), a, bt.T)
