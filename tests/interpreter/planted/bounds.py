"""Kernels that reach outside of a tensor's storage: tails, masks, strides and offsets."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreter.planted.model import Memory, Pairs, plant

LOAD, STORE = "out-of-bounds-load", "out-of-bounds-store"


@triton.jit
def tail_read_kernel(x, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if BUG:
        value = tl.load(x + i)  # BUG
    else:
        value = tl.load(x + i, mask=i < n)
    tl.store(out + i, value * 2, mask=i < n)


@plant(
    tail_read_kernel,
    LOAD,
    argument="x",
    program=(1, 0, 0),
    offset=100,
    index=None,
    count=28,
    shape=(100,),
    strides=(1,),
    other=None,
)
def tail_read(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(100), memory.zeros(100)
    tail_read_kernel[(2,)](x, out, 100, BLOCK=64, BUG=bug)
    return [(out, x * 2)]


@plant(tail_read_kernel, LOAD, argument="x", offset=96, count=32)
def tail_read_into_the_next_tensor(memory: Memory, bug: bool) -> Pairs:
    """What follows the storage is `out`'s: every address is somebody's, just not x's."""
    x = memory.range(96)
    out = memory.zeros(128, guard=0)
    assert out.data_ptr() == x.data_ptr() + 4 * 96
    tail_read_kernel[(2,)](x, out, 96, BLOCK=64, BUG=bug)
    return [(out[:96], x * 2)]


@triton.jit
def tail_write_kernel(x, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    if BUG:
        tl.store(out + i, value)  # BUG
    else:
        tl.store(out + i, value, mask=i < n)


@plant(
    tail_write_kernel,
    STORE,
    argument="out",
    program=(3, 0, 0),
    offset=50,
    index=None,
    count=14,
    shape=(50,),
    strides=(1,),
)
def tail_write(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(50, dtype=torch.float16), memory.zeros(50, dtype=torch.float16)
    tail_write_kernel[(4,)](x, out, 50, BLOCK=16, BUG=bug)
    return [(out, x)]


@plant(tail_write_kernel, STORE, argument="out", program=(2, 0, 0), offset=64, count=32)
def tail_write_into_the_next_tensor(memory: Memory, bug: bool) -> Pairs:
    """A store past out would change x."""
    out = memory.zeros(64, dtype=torch.bfloat16)
    x = memory.range(64, dtype=torch.bfloat16, guard=0)
    tail_write_kernel[(3,)](x, out, 64, BLOCK=32, BUG=bug)
    assert x.tolist() == list(range(1, 65))
    return [(out, x)]


@triton.jit
def one_of_two_kernel(x, y, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    a = tl.load(x + i, mask=mask)
    if BUG:
        b = tl.load(y + i)  # BUG
    else:
        b = tl.load(y + i, mask=mask)
    tl.store(out + i, a + b, mask=mask)


@plant(one_of_two_kernel, LOAD, argument="y")
def mask_missing_on_one_of_two_loads(memory: Memory, bug: bool) -> Pairs:
    x, y, out = (memory.range(70, dtype=torch.bfloat16) for _ in range(3))
    one_of_two_kernel[(3,)](x, y, out, 70, BLOCK=32, BUG=bug)
    return [(out, x + y)]


@triton.jit
def off_by_one_kernel(x, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0)
    keep = (i <= n) if BUG else (i < n)
    tl.store(out + i, value + 1, mask=keep)  # BUG


@plant(off_by_one_kernel, STORE, argument="out", program=(0, 0, 0), offset=20, count=1, shape=(20,))
def store_off_by_one(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(20, dtype=torch.int64), memory.zeros(20, dtype=torch.int64)
    off_by_one_kernel[(1,)](x, out, 20, BLOCK=32, BUG=bug)
    return [(out, x + 1)]


@plant(off_by_one_kernel, STORE, argument="out", offset=21, count=1)
def store_off_by_one_in_bytes(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(21, dtype=torch.uint8), memory.zeros(21, dtype=torch.uint8)
    off_by_one_kernel[(1,)](x, out, 21, BLOCK=32, BUG=bug)
    return [(out, x + 1)]


@triton.jit
def reversed_kernel(x, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    last = n if BUG else n - 1
    value = tl.load(x + (last - i), mask=i < n)  # BUG
    tl.store(out + i, value, mask=i < n)


@plant(reversed_kernel, LOAD, argument="x", program=(0, 0, 0), offset=40, count=1)
def reversed_read_off_by_one(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(40), memory.zeros(40)
    reversed_kernel[(3,)](x, out, 40, BLOCK=16, BUG=bug)
    return [(out, x.flip(0))]


@triton.jit
def shift_kernel(x, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = i < n
    if not BUG:
        keep = keep & (i >= 1)
    value = tl.load(x + i - 1, mask=keep, other=0)  # BUG
    tl.store(out + i, value, mask=keep)


@plant(shift_kernel, LOAD, argument="x", program=(0, 0, 0), offset=-1, count=1, index=None)
def token_shift_reads_before_the_start(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(30, dtype=torch.int16), memory.zeros(30, dtype=torch.int16)
    shift_kernel[(2,)](x, out, 30, BLOCK=16, BUG=bug)
    return [(out[1:], x[:-1])]


@triton.jit
def inverted_mask_kernel(out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i >= n if BUG else i < n
    tl.store(out + i, i.to(tl.float32), mask=mask)  # BUG


@plant(inverted_mask_kernel, STORE, argument="out", offset=10, count=6)
def mask_inverted(memory: Memory, bug: bool) -> Pairs:
    out = memory.zeros(10)
    inverted_mask_kernel[(1,)](out, 10, BLOCK=16, BUG=bug)
    return [(out, torch.arange(10.0))]


@triton.jit
def fill_kernel(out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 1)  # BUG


@plant(fill_kernel, STORE, argument="out", program=(4, 0, 0), offset=64, count=16)
def one_program_too_many(memory: Memory, bug: bool) -> Pairs:
    out = memory.zeros(64, dtype=torch.int8)
    fill_kernel[(5 if bug else 4,)](out, BLOCK=16)
    return [(out, torch.ones(64, dtype=torch.int8))]


@triton.jit
def bytes_kernel(x, out, width, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i * width)  # BUG
    tl.store(out + i, value)


@plant(bytes_kernel, LOAD, argument="x")
def offset_in_bytes_instead_of_elements(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(16), memory.zeros(16)
    bytes_kernel[(1,)](x, out, 4 if bug else 1, BLOCK=16)
    return [(out, x)]


@plant(bytes_kernel, LOAD, argument="x", shape=(16,), strides=(2,))
def stride_doubled(memory: Memory, bug: bool) -> Pairs:
    """The view's stride is 2; multiplied twice it leads past the storage's end."""
    x, out = memory.range(16, strides=(2,)), memory.zeros(16)
    bytes_kernel[(1,)](x, out, 4 if bug else 2, BLOCK=16)
    return [(out, x)]


@triton.jit
def offset_kernel(x, out, offset, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x - offset + i)  # BUG
    tl.store(out + i, value)


@plant(offset_kernel, LOAD, argument="x", offset=-16, count=8)
def storage_offset_subtracted_twice(memory: Memory, bug: bool) -> Pairs:
    """x begins 8 elements into its storage: 8 back is the storage's start, 16 back is outside."""
    x, out = memory.range(24, before=8), memory.zeros(32)
    offset_kernel[(1,)](x, out, 16 if bug else 8, BLOCK=32)
    return [(out[8:], x)]


@triton.jit
def narrow_kernel(x, out, BLOCK: tl.constexpr, BUG: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    start = (pid.to(tl.int8) * BLOCK).to(tl.int32) if BUG else pid * BLOCK
    value = tl.load(x + start + i)  # BUG
    tl.store(out + pid * BLOCK + i, value)


@plant(narrow_kernel, LOAD, argument="x", program=(2, 0, 0), offset=-128, count=64)
def offset_overflows_its_integer(memory: Memory, bug: bool) -> Pairs:
    """2 * 64 is -128 in int8, as pid * stride is negative in int32 beyond 2 GiB."""
    x, out = memory.range(192), memory.zeros(192)
    narrow_kernel[(3,)](x, out, BLOCK=64, BUG=bug)
    return [(out, x)]


@triton.jit
def wide_kernel(x, out, BLOCK: tl.constexpr, BUG: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    value = tl.load(x + pid * BLOCK + i)
    start = (pid.to(tl.int16) * 16384).to(tl.int32) if BUG else pid * BLOCK
    tl.store(out + start + i, value)  # BUG


@plant(wide_kernel, STORE, argument="out", program=(1, 0, 0), offset=16384, count=32)
def store_far_away(memory: Memory, bug: bool) -> Pairs:
    """Program 1 lands 64 KiB behind the tensor, program 2 as far before it."""
    x, out = memory.range(48), memory.zeros(48)
    wide_kernel[(3,)](x, out, BLOCK=16, BUG=bug)
    return [(out, x)]
