"""Stores inside of a tensor's storage, but between its elements: row padding, other columns, other heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreter.planted.model import Memory, Pairs, plant

GAP = "gap-store"


@triton.jit
def padding_kernel(x, out, stride, columns, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + c, mask=c < columns, other=0.0)
    if BUG:
        tl.store(out + row * stride + c, value)  # BUG
    else:
        tl.store(out + row * stride + c, value, mask=c < columns)


@plant(
    padding_kernel,
    GAP,
    argument="out",
    program=(0, 0, 0),
    offset=13,
    index=None,
    count=3,
    shape=(1, 13),
    strides=(16, 1),
)
def store_into_row_padding(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(1, 13), memory.zeros(1, 13, strides=(16, 1), after=3)
    padding_kernel[(1,)](x, out, 16, 13, BLOCK=16, BUG=bug)
    return [(out, x)]


@plant(padding_kernel, GAP, argument="out", shape=(4, 13), strides=(24, 1))
def store_into_the_padding_of_several_rows(memory: Memory, bug: bool) -> Pairs:
    x = memory.range(4, 13, dtype=torch.bfloat16)
    out = memory.zeros(4, 13, dtype=torch.bfloat16, strides=(24, 1), after=11)
    padding_kernel[(4,)](x, out, 24, 13, BLOCK=16, BUG=bug)
    return [(out, x)]


@plant(padding_kernel, GAP, argument="out")
def store_past_the_last_row_of_a_slice(memory: Memory, bug: bool) -> Pairs:
    """out is the first row of a larger matrix; what follows it is the next row, and nobody's business."""
    x, out = memory.range(1, 10, dtype=torch.int32), memory.zeros(1, 10, dtype=torch.int32, after=10)
    padding_kernel[(1,)](x, out, 10, 10, BLOCK=16, BUG=bug)
    return [(out, x)]


@triton.jit
def flat_kernel(x, out, n, row, stride, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    at = i if BUG else i // row * stride + i % row
    tl.store(out + at, value, mask=i < n)  # BUG


@plant(flat_kernel, GAP, argument="out", program=(0, 0, 0), offset=10, shape=(3, 10), strides=(12, 1))
def rows_taken_to_be_as_long_as_wide(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(3, 10), memory.zeros(3, 10, strides=(12, 1))
    flat_kernel[(2,)](x, out, 30, 10, 12, BLOCK=16, BUG=bug)
    return [(out, x)]


@plant(flat_kernel, GAP, argument="out", program=(0, 0, 0), offset=1, count=3, shape=(6,), strides=(2,))
def every_second_element_taken_for_every_one(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(6, dtype=torch.int64), memory.zeros(6, dtype=torch.int64, strides=(2,), after=1)
    flat_kernel[(1,)](x, out, 6, 1, 2, BLOCK=8, BUG=bug)
    return [(out, x)]


@plant(flat_kernel, GAP, argument="out")
def real_parts_stored_over_imaginary_ones(memory: Memory, bug: bool) -> Pairs:
    """out is the real half of interleaved complex numbers."""
    x, out = memory.range(8, dtype=torch.float16), memory.zeros(8, dtype=torch.float16, strides=(2,), after=1)
    flat_kernel[(1,)](x, out, 8, 1, 2, BLOCK=8, BUG=bug)
    return [(out, x)]


@triton.jit
def offset_kernel(out, offset, stride, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0) * stride + c + offset, 5)  # BUG


@plant(offset_kernel, GAP, argument="out", program=(0, 0, 0), offset=-8, count=8)
def storage_offset_ignored(memory: Memory, bug: bool) -> Pairs:
    """out begins 8 elements into its storage; the kernel counts from the storage's start."""
    out = memory.zeros(8, dtype=torch.int16, before=8)
    offset_kernel[(1,)](out, -8 if bug else 0, 8, BLOCK=8)
    return [(out, torch.full((8,), 5, dtype=torch.int16))]


@plant(offset_kernel, GAP, argument="out", shape=(3, 8), strides=(16, 1))
def column_slice_missed_by_one_to_the_left(memory: Memory, bug: bool) -> Pairs:
    """out is columns 4 to 11 of 16."""
    out = memory.zeros(3, 8, dtype=torch.uint8, strides=(16, 1), before=4, after=4)
    offset_kernel[(3,)](out, -1 if bug else 0, 16, BLOCK=8)
    return [(out, torch.full((3, 8), 5, dtype=torch.uint8))]


@triton.jit
def heads_kernel(x, out, stride_s, stride_h, H: tl.constexpr, D: tl.constexpr):
    s = tl.program_id(0)
    h = tl.program_id(1)
    d = tl.arange(0, D)
    value = tl.load(x + (s * H + h) * D + d)
    tl.store(out + s * stride_s + h * stride_h + d, value)  # BUG


@plant(heads_kernel, GAP, argument="out", shape=(4, 2, 8), strides=(48, 8, 1))
def packed_heads_taken_to_be_dense(memory: Memory, bug: bool) -> Pairs:
    """out is the middle third of a packed (sequence, 3, heads, width)."""
    x, out = memory.range(4, 2, 8), memory.zeros(4, 2, 8, strides=(48, 8, 1), before=16, after=16)
    heads_kernel[(4, 2)](x, out, 16 if bug else 48, 8, H=2, D=8)
    return [(out, x)]


@plant(heads_kernel, GAP, argument="out")
def head_stride_of_the_wrong_layout(memory: Memory, bug: bool) -> Pairs:
    """Heads lie 8 apart in rows of 24; the kernel walks 16 apart, into the row's padding."""
    x = memory.range(2, 2, 8, dtype=torch.float64)
    out = memory.zeros(2, 2, 8, dtype=torch.float64, strides=(24, 8, 1), after=8)
    heads_kernel[(2, 2)](x, out, 24, 16 if bug else 8, H=2, D=8)
    return [(out, x)]


@triton.jit
def transposed_kernel(x, out, stride_r, stride_c, R: tl.constexpr, C: tl.constexpr):
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, C)[None, :]
    value = tl.load(x + r * C + c)
    tl.store(out + r * stride_r + c * stride_c, value)  # BUG


@plant(transposed_kernel, GAP, argument="out", shape=(4, 8), strides=(1, 10))
def strides_of_a_transposed_output_swapped(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(4, 8), memory.zeros(4, 8, strides=(1, 10), after=6)
    if bug:
        transposed_kernel[(1,)](x, out, 10, 1, R=4, C=8)
    else:
        transposed_kernel[(1,)](x, out, 1, 10, R=4, C=8)
    return [(out, x)]


@triton.jit
def add_kernel(x, out, stride, columns, BLOCK: tl.constexpr, BUG: tl.constexpr):
    c = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * columns + c, mask=c < columns, other=0.0)
    at = out + tl.program_id(1) * stride + c
    if BUG:
        tl.atomic_add(at, value)  # BUG
    else:
        tl.atomic_add(at, value, mask=c < columns)


@plant(add_kernel, GAP, argument="out")
def atomic_add_into_row_padding(memory: Memory, bug: bool) -> Pairs:
    """Adding zero changes no value, but another thread's write to the padding may be lost."""
    x, out = memory.range(2, 6), memory.zeros(2, 6, strides=(8, 1), after=2)
    add_kernel[(2, 2)](x, out, 8, 6, BLOCK=8, BUG=bug)
    return [(out, x.sum(0).expand(2, 6))]


@triton.jit
def descriptor_kernel(x, out, columns, B: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [4, 12], [16, 1], [B, 16])
    target = tl.make_tensor_descriptor(out, [4, columns], [16, 1], [B, 16])
    at = tl.program_id(0) * B
    target.store([at, 0], source.load([at, 0]))  # BUG


@plant(descriptor_kernel, GAP, argument="out")
def descriptor_as_wide_as_its_rows_are_apart(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(4, 12, strides=(16, 1)), memory.zeros(4, 12, strides=(16, 1), after=4)
    descriptor_kernel[(2,)](x, out, 16 if bug else 12, B=2)
    return [(out, x)]


@triton.jit
def write_row(target, value, columns, BLOCK: tl.constexpr, BUG: tl.constexpr):
    c = tl.arange(0, BLOCK)
    mask = c <= columns if BUG else c < columns
    tl.store(target + c, value, mask=mask)  # BUG


@triton.jit
def last_row_kernel(out, rows, stride, columns, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0)
    if row == 1:
        write_row(out + row * stride, 9.0, columns, BLOCK, BUG)
    else:
        write_row(out + row * stride, 8.0, columns, BLOCK, False)


@plant(last_row_kernel, GAP, argument="out", faulty=write_row, program=(1, 0, 0), offset=11, count=1)
def callee_errs_in_the_branch_of_one_program(memory: Memory, bug: bool) -> Pairs:
    out = memory.zeros(3, 5, strides=(6, 1))
    last_row_kernel[(3,)](out, 3, 6, 5, BLOCK=8, BUG=bug)
    return [(out, torch.tensor([8.0, 9.0, 8.0])[:, None].expand(3, 5))]
