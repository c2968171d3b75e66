"""Kernels in which nothing is wrong: a program and its own memory, in place, in loops, and written before read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreter.planted.model import Memory, Pairs, honest


@triton.jit
def in_place_kernel(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(x + i, -value, mask=i < n)
    tl.debug_barrier()
    again = tl.load(x + i, mask=i < n)
    tl.store(x + i, again * 2, mask=i < n)


@honest
def each_program_its_own_part_in_place_twice(memory: Memory) -> Pairs:
    x = memory.range(21, dtype=torch.bfloat16)
    want = -2 * x
    in_place_kernel[(2,)](x, 21, BLOCK=16)
    return [(x, want)]


@triton.jit
def softmax_kernel(x, columns, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    at = x + tl.program_id(0) * columns + c
    value = tl.load(at, mask=c < columns, other=float("-inf"))
    value = tl.exp(value - tl.max(value))
    tl.store(at, value / tl.sum(value), mask=c < columns)


@honest
def softmax_in_place_by_rows(memory: Memory) -> Pairs:
    x = memory.range(4, 13)
    want = x.softmax(1)
    softmax_kernel[(4,)](x, 13, BLOCK=16)
    return [(x, want)]


@triton.jit
def persistent_kernel(x, out, n, BLOCK: tl.constexpr):
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0), num_stages=2):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


@honest
def persistent_programs_take_turns(memory: Memory) -> Pairs:
    x, out = memory.range(77), torch.empty(77)
    persistent_kernel[(3,)](x, out, 77, BLOCK=8)
    return [(out, x + 1)]


@triton.jit
def running_kernel(x, out, n):
    best = -1
    for i in range(n):
        best = max(best, tl.load(x + i))
        tl.store(out, best)
        best = tl.load(out)


@honest
def one_program_stores_again_and_again(memory: Memory) -> Pairs:
    x, out = memory.range(9, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    running_kernel[(1,)](x, out, 9)
    return [(out, torch.tensor([9], dtype=torch.int32))]


@triton.jit
def halo_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x + i - 1, mask=(i >= 1) & (i < n), other=0.0)
    right = tl.load(x + i + 1, mask=i + 1 < n, other=0.0)
    tl.store(out + i, left + right, mask=i < n)


@honest
def halo_of_another_tensor_launch_after_launch(memory: Memory) -> Pairs:
    """Two buffers take turns: what one launch stores, the next one's neighbours read."""
    first, second = memory.range(21), torch.empty(21)
    x = first.clone()
    for source, target in ((first, second), (second, first)):
        halo_kernel[(2,)](source, target, 21, BLOCK=16)
        padded = torch.nn.functional.pad(x, (1, 1))
        x = padded[:-2] + padded[2:]
    return [(first, x)]


@triton.jit
def sum_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + i, mask=i < n, other=0.0)))


@honest
def empty_buffers_written_by_torch(memory: Memory) -> Pairs:
    """Whole or in part, in place, through a view, by out=, or through numpy's view."""
    buffers = [torch.empty(12) for _ in range(6)]
    buffers[0].fill_(1.0)
    buffers[1].copy_(torch.ones(12))
    buffers[2].view(3, 4)[:] = 1.0
    torch.add(torch.zeros(12), 1.0, out=buffers[3])
    buffers[4].numpy()[:] = 1.0
    buffers[5][:7] = 1.0
    pairs = []
    for buffer, n in zip(buffers, [12, 12, 12, 12, 12, 7], strict=True):
        out = memory.zeros(1)
        sum_kernel[(1,)](buffer, out, n, BLOCK=16)
        pairs.append((out, torch.tensor([float(n)])))
    return pairs


@triton.jit
def bytes_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    words = x.to(tl.pointer_type(tl.int32))
    tl.store(out.to(tl.pointer_type(tl.int32)) + i, tl.load(words + i, mask=i < n), mask=i < n)


@honest
def bytes_moved_as_words(memory: Memory) -> Pairs:
    x, out = memory.range(20, dtype=torch.uint8), torch.empty(20, dtype=torch.uint8)
    bytes_kernel[(1,)](x, out, 5, BLOCK=8)
    return [(out, x)]


@triton.jit
def hints_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.max_contiguous(tl.multiple_of(i, BLOCK), BLOCK)
    start = tl.multiple_of(tl.program_id(1) * stride, 8)
    tl.store(out + start + i, tl.load(x + start + i, mask=i < n), mask=i < n)


@honest
def hints_that_are_true(memory: Memory) -> Pairs:
    """Of a block of neighbours only the first has to be the multiple."""
    x, out = memory.range(3, 21, strides=(24, 1)), memory.zeros(3, 21, strides=(24, 1))
    hints_kernel[(2, 3)](x, out, 21, 24, BLOCK=16)
    return [(out, x)]


@triton.jit
def wrapped_hints_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wrapped = tl.max_contiguous(tl.multiple_of(i % n, BLOCK), BLOCK)
    clamped = tl.max_contiguous(tl.multiple_of(tl.where(i < n, i, 0), BLOCK), BLOCK)
    tl.store(out + i, tl.load(x + wrapped) + tl.load(x + clamped), mask=i < n)


@honest
def hints_on_wrapped_indices_as_in_the_tutorials(memory: Memory) -> Pairs:
    """Untrue of the lanes of the tail alone, whose values are masked off."""
    x, out = memory.range(21), memory.zeros(21)
    wrapped_hints_kernel[(2,)](x, out, 21, BLOCK=16)
    return [(out, 2 * x)]


@triton.jit
def bounded_hints_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wrapped = tl.max_contiguous(tl.multiple_of((i % n).to(tl.int64), BLOCK), BLOCK)
    clamped = tl.max_contiguous(tl.multiple_of(tl.where(i < n, i, 0), BLOCK), BLOCK)
    least = tl.max_contiguous(tl.multiple_of(tl.minimum(i, n - 1), BLOCK), BLOCK)
    tl.store(out + i, tl.load(x + wrapped) + tl.load(x + clamped) + tl.load(x + least), mask=i < n)


@honest
def hints_on_indices_wrapped_to_one_number(memory: Memory) -> Pairs:
    """One element, or a tile past the end: no lane counts up any more, and what is untrue is masked off."""
    pairs: Pairs = []
    for size in (1, 16, 17, 40):
        x, out = memory.range(size), memory.zeros(size)
        bounded_hints_kernel[(4,)](x, out, size, BLOCK=16)
        pairs.append((out, 3 * x))
    return pairs


@triton.jit
def scalar_kernel(scale, x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * tl.load(scale), mask=i < n)


@honest
def tensor_without_dimensions(memory: Memory) -> Pairs:
    x, out, scale = memory.range(21), memory.zeros(21), memory.like(torch.tensor(3.0))
    scalar_kernel[(2,)](scale, x, out, 21, BLOCK=16)
    return [(out, 3 * x)]


@triton.jit
def divide(target, at, value, mask):
    tl.store(target + at, value, mask=mask)


@triton.jit
def callee_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for step in tl.static_range(2):
        divide(out, 2 * i + step, tl.load(x + i, mask=i < n) + step, i < n)


@honest
def stores_in_a_callee_interleave(memory: Memory) -> Pairs:
    x, out = memory.range(10), torch.empty(20)
    callee_kernel[(2,)](x, out, 10, BLOCK=8)
    return [(out, torch.stack([x, x + 1], 1).reshape(-1))]
