"""`tl.multiple_of` and `tl.max_contiguous` that promise what is not so; the compiler believes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreter.planted.model import Memory, Pairs, plant

HINT = "false-hint"


@triton.jit
def row_kernel(x, out, stride, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    value = tl.load(x + tl.multiple_of(row * stride, ALIGNED) + c)  # BUG
    tl.store(out + row * BLOCK + c, value)


@plant(row_kernel, HINT, argument=None, program=(1, 0, 0))
def row_starts_said_to_be_aligned(memory: Memory, bug: bool) -> Pairs:
    """Rows 18 apart start at multiples of 2, not of 16; program 0 alone would not show it."""
    x, out = memory.range(3, 16, strides=(18, 1)), memory.zeros(3, 16)
    row_kernel[(3,)](x, out, 18, ALIGNED=16 if bug else 2, BLOCK=16)
    return [(out, x)]


@triton.jit
def strided_kernel(x, out, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * 2
    if BUG:
        value = tl.load(x + tl.max_contiguous(i, BLOCK))  # BUG
    else:
        value = tl.load(x + i)
    tl.store(out + i // 2, value)


@plant(strided_kernel, HINT, argument=None, program=(0, 0, 0))
def every_second_index_said_to_be_contiguous(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(64, dtype=torch.float16), memory.zeros(32, dtype=torch.float16)
    strided_kernel[(2,)](x, out, BLOCK=16, BUG=bug)
    return [(out, x[::2])]


@triton.jit
def gap_kernel(x, out, STEP: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + tl.max_contiguous(i // 4 * STEP + i % 4, RUN))  # BUG
    tl.store(out + i, value)


@plant(gap_kernel, HINT, argument=None, program=(0, 0, 0))
def runs_said_to_be_longer_than_they_are(memory: Memory, bug: bool) -> Pairs:
    """Four in a row, then a gap: a run of 4 is true, one of 8 is not."""
    x, out = memory.range(26), memory.zeros(16)
    gap_kernel[(1,)](x, out, STEP=6, RUN=8 if bug else 4, BLOCK=16)
    return [(out, x[[0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 18, 19, 20, 21]])]


@triton.jit
def wrapped_kernel(x, out, n, STEP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK) * STEP
    value = tl.load(x + tl.max_contiguous(i % n, BLOCK))  # BUG
    tl.store(out + i, value, mask=i < n)


@plant(wrapped_kernel, HINT, argument=None, program=(0, 0, 0))
def a_wrap_is_no_excuse_for_what_was_untrue_before(memory: Memory, bug: bool) -> Pairs:
    """Of every second of 32 elements none is wrapped by n, and no two are neighbours."""
    step = 2 if bug else 1
    x, out = memory.range(32), memory.zeros(32)
    wrapped_kernel[(1,)](x, out, 32, STEP=step, BLOCK=16)
    expected = torch.zeros(32)
    expected[: 16 * step : step] = x[: 16 * step : step]
    return [(out, expected)]


@triton.jit
def clamped_kernel(x, table, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.load(table + i, mask=i < n, other=0)
    value = tl.load(x + tl.max_contiguous(tl.minimum(row, 31), BLOCK))  # BUG
    tl.store(out + i, value, mask=i < n)


@plant(clamped_kernel, HINT, argument=None, program=(0, 0, 0))
def a_bound_is_no_excuse_for_a_table(memory: Memory, bug: bool) -> Pairs:
    """Rows of a table, all the same one: not contiguous before the bound, nor is the bound itself."""
    x, out = memory.range(32), memory.zeros(16)
    table = torch.full((16,), 7, dtype=torch.int32) if bug else torch.arange(16, dtype=torch.int32)
    clamped_kernel[(1,)](x, table, out, 16, BLOCK=16)
    return [(out, x[table.long()])]


@triton.jit
def aligned(value, by: tl.constexpr):
    return tl.multiple_of(value, by)  # BUG


@triton.jit
def callee_kernel(x, out, start, BY: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + aligned(start + i, BY)))


@plant(callee_kernel, HINT, argument=None, faulty=aligned)
def start_said_to_be_aligned_in_a_callee(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(32, dtype=torch.int64), memory.zeros(16, dtype=torch.int64)
    callee_kernel[(1,)](x, out, 4, BY=8 if bug else 4, BLOCK=16)
    return [(out, x[4:20])]


@triton.jit
def tile_kernel(x, out, stride, BY: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, C)[None, :]
    value = tl.load(x + tl.multiple_of(r * stride + c, [1, BY]))  # BUG
    tl.store(out + r * C + c, value)


@plant(tile_kernel, HINT, argument=None)
def columns_of_a_tile_said_to_be_aligned(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(4, 8, strides=(12, 1)), memory.zeros(4, 8)
    tile_kernel[(1,)](x, out, 12, BY=8 if bug else 4, R=4, C=8)
    return [(out, x)]
