"""Out of bounds in two and three dimensions, through descriptors and through block pointers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.interpreter.planted.model import Memory, Pairs, plant

LOAD, STORE = "out-of-bounds-load", "out-of-bounds-store"
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


@triton.jit
def axis_kernel(x, out, rows, columns, B: tl.constexpr, BUG: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    c = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    at = r * columns + c
    inside = (r < rows) & (c < columns)
    mask = (r < columns) & (c < rows) if BUG else inside
    value = tl.load(x + at, mask=mask, other=0.0)  # BUG
    tl.store(out + at, value, mask=inside)


@plant(axis_kernel, LOAD, argument="x", program=(0, 0, 0), index=None, shape=(10, 20), strides=(20, 1))
def mask_has_its_axes_swapped(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(10, 20), memory.zeros(10, 20)
    axis_kernel[(1, 2)](x, out, 10, 20, B=16, BUG=bug)
    return [(out, x)]


@triton.jit
def one_axis_kernel(x, out, rows, columns, B: tl.constexpr, BUG: tl.constexpr):
    r = tl.program_id(1) * B + tl.arange(0, B)[:, None]
    c = tl.program_id(0) * B + tl.arange(0, B)[None, :]
    value = tl.load(x + r * columns + c, mask=(r < rows) & (c < columns))
    mask = (c < columns) & (r > -1) if BUG else (r < rows) & (c < columns)
    tl.store(out + r * columns + c, value, mask=mask)  # BUG


@plant(one_axis_kernel, STORE, argument="out", shape=(5, 8))
def rows_are_not_masked(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(5, 8, dtype=torch.bfloat16), memory.zeros(5, 8, dtype=torch.bfloat16)
    one_axis_kernel[(1, 1)](x, out, 5, 8, B=8, BUG=bug)
    return [(out, x)]


@triton.jit
def rows_kernel(x, out, stride_x, stride_out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride_x + c, mask=c < columns)  # BUG
    tl.store(out + row * stride_out + c, value, mask=c < columns)


@plant(rows_kernel, LOAD, argument="x")
def row_stride_of_another_tensor(memory: Memory, bug: bool) -> Pairs:
    """x's rows follow each other; out's are padded, and their stride leads x astray."""
    x, out = memory.range(6, 20), memory.zeros(6, 20, strides=(32, 1))
    rows_kernel[(6,)](x, out, 32 if bug else 20, 32, 20, BLOCK=32)
    return [(out, x)]


@plant(rows_kernel, LOAD, argument="x", shape=(12, 4), strides=(1, 12))
def transposed_input_read_as_if_contiguous(memory: Memory, bug: bool) -> Pairs:
    """x is 12 x 4 by columns. Row stride 4 stays inside; the column stride taken for the row's does not."""
    x, out = memory.range(12, 4, strides=(1, 12)), memory.zeros(12, 4)
    if bug:
        rows_kernel[(12,)](x, out, 12, 4, 4, BLOCK=4)
    else:
        rows_kernel[(12,)](x.contiguous(), out, 4, 4, 4, BLOCK=4)
    return [(out, x)]


@plant(rows_kernel, LOAD, argument="x", shape=(4, 6), strides=(0, 1))
def expanded_input_has_one_row(memory: Memory, bug: bool) -> Pairs:
    """A bias expanded over the rows holds one row, whatever its shape says."""
    x, out = memory.like(torch.arange(1.0, 7.0).expand(4, 6), strides=(0, 1)), memory.zeros(4, 6)
    rows_kernel[(4,)](x, out, 6 if bug else 0, 6, 6, BLOCK=8)
    return [(out, x)]


@triton.jit
def heads_kernel(x, out, stride_b, stride_h, length, heads, BLOCK: tl.constexpr, BUG: tl.constexpr):
    b = tl.program_id(0)
    h = tl.program_id(1)
    s = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    start = h * stride_b + b * stride_h if BUG else b * stride_b + h * stride_h
    value = tl.load(x + start + s, mask=s < length)  # BUG
    tl.store(out + (b * heads + h) * length + s, value, mask=s < length)


@plant(heads_kernel, LOAD, argument="x")
def batch_and_head_strides_swapped(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(2, 5, 24, dtype=torch.int64), memory.zeros(2, 5, 24, dtype=torch.int64)
    heads_kernel[(2, 5, 2)](x, out, 120, 24, 24, 5, BLOCK=16, BUG=bug)
    return [(out, x)]


@triton.jit
def inner_kernel(a, b, out, K, N: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        left = tl.load(a + row * K + k, mask=k < K, other=0.0)
        if BUG:
            right = tl.load(  # BUG
                b + k[:, None] * N + n[None, :]
            )
        else:
            right = tl.load(b + k[:, None] * N + n[None, :], mask=k[:, None] < K, other=0.0)
        total += tl.sum(left[:, None] * right, axis=0)
    tl.store(out + row * N + n, total)


@plant(inner_kernel, LOAD, argument="b", offset=160, count=96)
def matmul_without_a_mask_along_k(memory: Memory, bug: bool) -> Pairs:
    """The last step of the loop reads 6 rows of b too many, in every program alike."""
    a, b, out = memory.range(1, 10), memory.range(10, 16), memory.zeros(1, 16)
    inner_kernel[(1,)](a, b, out, 10, N=16, BLOCK=8, BUG=bug)
    return [(out, a @ b)]


@triton.jit
def descriptor_load_kernel(x, out, rows, columns, B: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, 16], [16, 1], [B, 16])
    value = source.load([tl.program_id(0) * B, 0])  # BUG
    r = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    c = tl.arange(0, 16)[None, :]
    tl.store(out + r * 16 + c, value, mask=(r < 6) & (c < columns))


@plant(descriptor_load_kernel, LOAD, argument="x", program=(1, 0, 0), offset=96, count=32)
def descriptor_with_too_many_rows(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(6, 16), memory.zeros(6, 16)
    descriptor_load_kernel[(2,)](x, out, 8 if bug else 6, 16, B=4)
    return [(out, x)]


@triton.jit
def descriptor_store_kernel(source, target, B: tl.constexpr):
    value = source.load([tl.program_id(0) * B, 0])
    target.store([tl.program_id(0) * B, 0], value)  # BUG


@plant(descriptor_store_kernel, STORE, argument="target")
def host_descriptor_of_a_larger_tensor(memory: Memory, bug: bool) -> Pairs:
    """The shape given on the host is the padded one."""
    x = memory.range(5, 16, dtype=torch.float16)
    out = memory.zeros(5, 16, dtype=torch.float16)
    source = TensorDescriptor(x, [5, 16], [16, 1], [4, 16])
    target = TensorDescriptor(out, [8 if bug else 5, 16], [16, 1], [4, 16])
    descriptor_store_kernel[(2,)](source, target, B=4)
    return [(out, x)]


@triton.jit
def chosen_descriptor_kernel(first, second, first_out, second_out, B: tl.constexpr):
    source, target = first, first_out
    if tl.program_id(0) >= 2:
        source, target = second, second_out
    at = tl.program_id(0) % 2 * B
    target.store([at, 0], source.load([at, 0]))  # BUG


@plant(chosen_descriptor_kernel, STORE, argument="second_out", program=(3, 0, 0))
def one_of_two_descriptors_of_a_larger_tensor(memory: Memory, bug: bool) -> Pairs:
    """The shape of the tensor that the last two programs choose is the padded one."""
    x, y = memory.range(8, 16, dtype=torch.float16), memory.range(5, 16, dtype=torch.float16)
    out, other = memory.zeros(8, 16, dtype=torch.float16), memory.zeros(5, 16, dtype=torch.float16)
    shapes = (x, 8), (y, 5), (out, 8), (other, 8 if bug else 5)
    chosen_descriptor_kernel[(4,)](*(TensorDescriptor(t, [rows, 16], [16, 1], [4, 16]) for t, rows in shapes), B=4)
    return [(out, x), (other, y)]


@triton.jit
def descriptor_sum_kernel(x, sums, rows, B: tl.constexpr):
    tile = tl.make_tensor_descriptor(x, [8, 16], [16, 1], [B, 16]).load([tl.program_id(0) * B, 0])
    target = tl.make_tensor_descriptor(sums, [rows, 16], [16, 1], [B, 16])
    target.atomic_add([tl.program_id(0) % 2 * B, 0], tile)  # BUG


@plant(descriptor_sum_kernel, STORE, argument="sums", program=(1, 0, 0), offset=96)
def sums_through_a_descriptor_of_more_rows(memory: Memory, bug: bool) -> Pairs:
    x, sums = memory.range(8, 16), memory.zeros(6, 16)
    descriptor_sum_kernel[(2,)](x, sums, 8 if bug else 6, B=4)
    return [(sums, x[:6])]


@triton.jit
def joined_kernel(x, y, out, B: tl.constexpr):
    i = tl.arange(0, B)
    both = tl.join(x + i, y + i)
    value = tl.load(both)  # BUG
    tl.store(out + i[:, None] * 2 + tl.arange(0, 2)[None, :], value)


@plant(joined_kernel, LOAD, argument="y", program=(0, 0, 0), offset=7, count=1)
def second_of_two_joined_blocks_too_long(memory: Memory, bug: bool) -> Pairs:
    x, y, out = memory.range(8), memory.range(7 if bug else 8), memory.zeros(8, 2)
    joined_kernel[(1,)](x, y, out, B=8)
    return [(out[:7], torch.stack([x, torch.arange(1.0, 9.0)], 1)[:7])]


@triton.jit
def block_pointer_kernel(x, out, rows, B: tl.constexpr, BUG: tl.constexpr):
    source = tl.make_block_ptr(x, (rows, 8), (8, 1), (tl.program_id(0) * B, 0), (B, 8), (1, 0))
    target = tl.make_block_ptr(out, (rows, 8), (8, 1), (tl.program_id(0) * B, 0), (B, 8), (1, 0))
    if BUG:
        value = tl.load(source)  # BUG
    else:
        value = tl.load(source, boundary_check=(0,))
    tl.store(target, value, boundary_check=(0,))


if VERSION < (3, 8):  # which removed block pointers

    @plant(block_pointer_kernel, LOAD, argument="x", program=(1, 0, 0), offset=40, count=24)
    def block_pointer_without_boundary_check(memory: Memory, bug: bool) -> Pairs:
        x, out = memory.range(5, 8), memory.zeros(5, 8)
        block_pointer_kernel[(2,)](x, out, 5, B=4, BUG=bug)
        return [(out, x)]
