"""Kernels that read what nobody wrote since `torch.empty` allocated it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreter.planted.model import Memory, Pairs, plant

UNWRITTEN = "unwritten-load"


@triton.jit
def double_kernel(x, scratch, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(scratch + i, 2 * tl.load(x + i, mask=i < n, other=0), mask=i < n)


@triton.jit
def sum_kernel(scratch, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if BUG:
        value = tl.load(scratch + i)  # BUG
    else:
        value = tl.load(scratch + i, mask=i < n, other=0)
    tl.store(out, tl.sum(value))


@plant(
    sum_kernel,
    UNWRITTEN,
    argument="scratch",
    program=(0, 0, 0),
    offset=20,
    index=(20,),
    count=12,
    shape=(32,),
    strides=(1,),
    other=None,
)
def tail_of_a_padded_scratch(memory: Memory, bug: bool) -> Pairs:
    x, out, scratch = memory.range(20), memory.zeros(1), torch.empty(32)
    double_kernel[(2,)](x, scratch, 20, BLOCK=16)
    sum_kernel[(1,)](scratch, out, 20, BLOCK=32, BUG=bug)
    return [(out, (2 * x).sum(0, keepdim=True))]


@triton.jit
def plain_sum_kernel(scratch, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(scratch + i, mask=i < n, other=0)  # BUG
    tl.store(out, tl.sum(value))


@plant(plain_sum_kernel, UNWRITTEN, argument="scratch", offset=16, index=(16,), count=4)
def grid_rounded_down(memory: Memory, bug: bool) -> Pairs:
    """20 // 16 programs write 16 elements; the twin rounds up."""
    x, out, scratch = memory.range(20), memory.zeros(1), torch.empty_like(torch.zeros(20))
    double_kernel[(1 if bug else 2,)](x, scratch, 20, BLOCK=16)
    plain_sum_kernel[(1,)](scratch, out, 20, BLOCK=32)
    return [(out, (2 * x).sum(0, keepdim=True))]


@plant(plain_sum_kernel, UNWRITTEN, argument="scratch", offset=16, count=4)
def scratch_in_int64(memory: Memory, bug: bool) -> Pairs:
    x = memory.range(20, dtype=torch.int64)
    out, scratch = memory.zeros(1, dtype=torch.int64), x.new_empty(20)
    double_kernel[(1 if bug else 2,)](x, scratch, 20, BLOCK=16)
    plain_sum_kernel[(1,)](scratch, out, 20, BLOCK=32)
    return [(out, (2 * x).sum(0, keepdim=True))]


@plant(plain_sum_kernel, UNWRITTEN, argument="scratch", offset=0, count=20)
def scratch_written_after_it_is_read(memory: Memory, bug: bool) -> Pairs:
    x, out, scratch = memory.range(20), memory.zeros(1), torch.empty(20)
    if bug:
        plain_sum_kernel[(1,)](scratch, out, 20, BLOCK=32)
    double_kernel[(2,)](x, scratch, 20, BLOCK=16)
    plain_sum_kernel[(1,)](scratch, out, 20, BLOCK=32)
    return [(out, (2 * x).sum(0, keepdim=True))]


@triton.jit
def accumulate_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i, tl.load(out + i, mask=i < n) + value, mask=i < n)  # BUG


@plant(accumulate_kernel, UNWRITTEN, argument="out", offset=0, count=10)
def accumulator_never_zeroed(memory: Memory, bug: bool) -> Pairs:
    x = memory.range(10, dtype=torch.bfloat16)
    out = torch.empty(10, dtype=torch.bfloat16)
    if not bug:
        out.zero_()
    accumulate_kernel[(1,)](x, out, 10, BLOCK=16)
    return [(out, x)]


@triton.jit
def atomic_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + i, tl.load(x + tl.program_id(0) * BLOCK + i))  # BUG


@plant(atomic_kernel, UNWRITTEN, argument="out", offset=0)
def atomic_adds_into_an_empty_buffer(memory: Memory, bug: bool) -> Pairs:
    x = memory.range(3, 8)
    out = torch.empty(8) if bug else torch.zeros(8)
    atomic_kernel[(3,)](x, out, BLOCK=8)
    return [(out, x.sum(0))]


@triton.jit
def branch_kernel(x, rows, columns, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + c, mask=c < columns)
    if BUG:
        if row < 2:
            tl.store(rows + row * columns + c, value, mask=c < columns)
    else:
        tl.store(rows + row * columns + c, value, mask=c < columns)


@triton.jit
def get(source, at, mask):
    return tl.load(source + at, mask=mask)  # BUG


@triton.jit
def copy_kernel(rows, out, columns, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    at = tl.program_id(0) * columns + c
    tl.store(out + at, get(rows, at, c < columns), mask=c < columns)


@plant(copy_kernel, UNWRITTEN, argument="rows", faulty=get, program=(2, 0, 0), offset=12, index=(2, 0), count=6)
def one_row_never_written(memory: Memory, bug: bool) -> Pairs:
    x, out, rows = memory.range(3, 6), memory.zeros(3, 6), torch.empty(3, 6)
    branch_kernel[(3,)](x, rows, 6, BLOCK=8, BUG=bug)
    copy_kernel[(3,)](rows, out, 6, BLOCK=8)
    return [(out, x)]


@plant(copy_kernel, UNWRITTEN, argument="rows", faulty=get)
def half_of_each_row_written_by_torch(memory: Memory, bug: bool) -> Pairs:
    """What PyTorch wrote counts as written: the left half, or all of it."""
    out, rows = memory.zeros(3, 6), torch.empty(3, 6)
    rows[:, : 3 if bug else 6] = 4.0
    copy_kernel[(3,)](rows, out, 6, BLOCK=8)
    return [(out, torch.full((3, 6), 4.0))]


@triton.jit
def partial_kernel(x, partial, K, BLOCK: tl.constexpr):
    split = tl.program_id(1)
    k = split * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * K + k, mask=k < K, other=0.0)
    tl.store(partial + tl.program_id(0) * 4 + split, tl.sum(value))


@triton.jit
def combine_kernel(partial, out, SPLITS: tl.constexpr):
    total = 0.0
    for split in range(SPLITS):
        total += tl.load(partial + tl.program_id(0) * 4 + split)  # BUG
    tl.store(out + tl.program_id(0), total)


@plant(combine_kernel, UNWRITTEN, argument="partial", offset=2, index=(0, 2))
def fewer_splits_written_than_combined(memory: Memory, bug: bool) -> Pairs:
    x, out, partial = memory.range(2, 20), memory.zeros(2), torch.empty(2, 4)
    partial_kernel[(2, 2 if bug else 3)](x, partial, 20, BLOCK=8)
    combine_kernel[(2,)](partial, out, SPLITS=3)
    return [(out, x.sum(1))]


@triton.jit
def descriptor_kernel(scratch, out, B: tl.constexpr):
    value = tl.make_tensor_descriptor(scratch, [B, 16], [16, 1], [B, 16]).load([0, 0])  # BUG
    tl.make_tensor_descriptor(out, [B, 16], [16, 1], [B, 16]).store([0, 0], value)


@plant(descriptor_kernel, UNWRITTEN, argument="scratch", offset=20, count=44)
def descriptor_over_a_half_written_scratch(memory: Memory, bug: bool) -> Pairs:
    x, out, scratch = memory.range(4, 16), memory.zeros(4, 16), torch.empty(4, 16)
    double_kernel[(2 if bug else 4,)](x, scratch, 20 if bug else 64, BLOCK=16)
    descriptor_kernel[(1,)](scratch, out, B=4)
    return [(out, 2 * x)]


@triton.jit
def set_kernel(flags, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(flags + i, i >= 0, mask=i < n)


@triton.jit
def count_kernel(flags, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(flags + i).to(tl.int32)))  # BUG


@plant(count_kernel, UNWRITTEN, argument="flags", offset=7, count=1)
def one_flag_never_set(memory: Memory, bug: bool) -> Pairs:
    flags, out = torch.empty(8, dtype=torch.bool), memory.zeros(1, dtype=torch.int32)
    set_kernel[(1,)](flags, 7 if bug else 8, BLOCK=8)
    count_kernel[(1,)](flags, out, BLOCK=8)
    return [(out, torch.tensor([8], dtype=torch.int32))]
