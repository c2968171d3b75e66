"""Programs of one launch, or lanes of one store, that get in each other's way: stores over stores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreter.planted.model import Memory, Pairs, plant

STORES, LOAD = "racing-stores", "racing-load"


@triton.jit
def one_place_kernel(out, BUG: tl.constexpr):
    pid = tl.program_id(0)
    at = out if BUG else out + pid
    tl.store(at, pid)  # BUG


@plant(one_place_kernel, STORES, argument="out", offset=0, index=(0,), shape=(4,))
def every_program_stores_to_element_zero(memory: Memory, bug: bool) -> Pairs:
    out = memory.zeros(4, dtype=torch.int32)
    one_place_kernel[(4,)](out, BUG=bug)
    return [(out, torch.arange(4, dtype=torch.int32))]


@triton.jit
def overlap_kernel(x, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    pid = tl.program_id(0)
    step = BLOCK - 1 if BUG else BLOCK
    i = pid * step + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i, value + pid, mask=i < n)  # BUG


@plant(overlap_kernel, STORES, argument="out", offset=15, index=(15,))
def tiles_overlap_by_one(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(31), memory.zeros(31)
    overlap_kernel[(2,)](x, out, 31, BLOCK=16, BUG=bug)
    return [(out, x + torch.arange(31) // 16)]


@triton.jit
def next_row_kernel(x, out, n, columns, BLOCK: tl.constexpr, BUG: tl.constexpr):
    c = tl.arange(0, BLOCK)
    at = tl.program_id(0) * columns + c
    value = tl.load(x + at, mask=c < columns, other=0.0)
    mask = at < n if BUG else c < columns
    tl.store(out + at, value, mask=mask)  # BUG


@plant(next_row_kernel, STORES, argument="out")
def row_runs_over_into_the_next(memory: Memory, bug: bool) -> Pairs:
    """A mask on the flat index keeps the end of the tensor, and lets each row spill over the next."""
    x, out = memory.range(5, 10, dtype=torch.bfloat16), memory.zeros(5, 10, dtype=torch.bfloat16)
    next_row_kernel[(5,)](x, out, 50, 10, BLOCK=16, BUG=bug)
    return [(out, x)]


@triton.jit
def lanes_kernel(x, out, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = i // 2 if BUG else i
    tl.store(out + at, tl.load(x + i))  # BUG


@plant(lanes_kernel, STORES, argument="out", program=(0, 0, 0), offset=0)
def two_lanes_store_to_one_element(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(16, dtype=torch.float16), memory.zeros(16, dtype=torch.float16)
    lanes_kernel[(1,)](x, out, BLOCK=16, BUG=bug)
    return [(out, x)]


@triton.jit
def forgotten_axis_kernel(x, out, B: tl.constexpr, BUG: tl.constexpr):
    z = tl.program_id(2)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    i = tile * B + tl.arange(0, B)
    size = tl.num_programs(0) * tl.num_programs(1) * B
    value = tl.load(x + z * size + i)
    start = 0 if BUG else z * size
    tl.store(out + start + i, value)  # BUG


@plant(forgotten_axis_kernel, STORES, argument="out", offset=0)
def third_grid_axis_forgotten(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(3, 2, 2, 4, dtype=torch.uint8), memory.zeros(3, 2, 2, 4, dtype=torch.uint8)
    forgotten_axis_kernel[(2, 2, 3)](x, out, B=4, BUG=bug)
    return [(out, x)]


@triton.jit
def split_kernel(a, b, out, K, BLOCK: tl.constexpr, BUG: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(a + k, mask=k < K, other=0.0) * tl.load(b + k, mask=k < K, other=0.0))
    if BUG:
        tl.store(out, part)  # BUG
    else:
        tl.atomic_add(out, part)


@plant(split_kernel, STORES, argument="out", offset=0)
def split_k_stores_instead_of_adding(memory: Memory, bug: bool) -> Pairs:
    a, b, out = memory.range(40), memory.range(40), memory.zeros(1)
    split_kernel[(3,)](a, b, out, 40, BLOCK=16, BUG=bug)
    return [(out, (a @ b)[None])]


@triton.jit
def scatter_kernel(x, indices, out, W: tl.constexpr):
    pid = tl.program_id(0)
    c = tl.arange(0, W)
    row = tl.load(indices + pid)
    tl.store(out + row * W + c, tl.load(x + pid * W + c))  # BUG


@plant(scatter_kernel, STORES, argument="out", offset=8, index=(2, 0))
def scatter_to_an_index_that_occurs_twice(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(4, 4), memory.zeros(4, 4)
    indices = torch.tensor([2, 0, 2 if bug else 3, 1])
    scatter_kernel[(4,)](x, memory.like(indices), out, W=4)
    want = torch.zeros(4, 4)
    want[indices] = x
    return [(out, want)]


@triton.jit
def group_kernel(x, sums, columns, BLOCK: tl.constexpr, GROUPS: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < columns
    value = tl.load(x + row * columns + c, mask=mask, other=0.0)
    at = sums + row % GROUPS * columns + c
    if BUG:
        tl.store(at, tl.load(at, mask=mask) + value, mask=mask)  # BUG
    else:
        tl.atomic_add(at, value, mask=mask)


@plant(group_kernel, STORES, LOAD, argument="sums")
def partial_sums_of_a_group_without_a_lock(memory: Memory, bug: bool) -> Pairs:
    """Layer norm's weight gradient: rows share GROUPS partial sums, and nobody takes the lock."""
    x, sums = memory.range(6, 10), memory.zeros(2, 10)
    group_kernel[(6,)](x, sums, 10, BLOCK=16, GROUPS=2, BUG=bug)
    return [(sums, torch.stack([x[0::2].sum(0), x[1::2].sum(0)]))]


@triton.jit
def wrong_lock_kernel(x, total, locks, BUG: tl.constexpr):
    pid = tl.program_id(0)
    lock = locks + pid if BUG else locks
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total) + tl.load(x + pid))  # BUG
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@plant(wrong_lock_kernel, STORES, LOAD, argument="total")
def every_program_takes_a_lock_of_its_own(memory: Memory, bug: bool) -> Pairs:
    x, total, locks = memory.range(4), memory.zeros(1), memory.zeros(4, dtype=torch.int32)
    wrong_lock_kernel[(4,)](x, total, locks, BUG=bug)
    return [(total, torch.tensor([10.0])), (locks, torch.zeros(4, dtype=torch.int32))]


@triton.jit
def zero_then_add_kernel(x, out, BUG: tl.constexpr):
    pid = tl.program_id(0)
    if BUG:
        if pid == 0:
            tl.store(out, 0.0)  # BUG
    tl.atomic_add(out, tl.load(x + pid))


@plant(zero_then_add_kernel, STORES, LOAD, argument="out", offset=0)
def first_program_zeroes_what_all_add_to(memory: Memory, bug: bool) -> Pairs:
    """Nothing makes the others wait: program 0 may zero what they added."""
    x, out = memory.range(5), (memory.range(1) if bug else memory.zeros(1))
    zero_then_add_kernel[(5,)](x, out, BUG=bug)
    return [(out, torch.tensor([15.0]))]


@triton.jit
def emit(target, value):
    tl.store(target, value)  # BUG


@triton.jit
def callee_kernel(out, BUG: tl.constexpr):
    pid = tl.program_id(0)
    for step in range(2):
        at = out + step if BUG else out + 2 * pid + step
        emit(at, (pid + step).to(tl.float32))


@plant(callee_kernel, STORES, argument="out", faulty=emit)
def callee_in_a_loop_stores_to_a_shared_place(memory: Memory, bug: bool) -> Pairs:
    out = memory.zeros(6)
    callee_kernel[(3,)](out, BUG=bug)
    return [(out, torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 3.0]))]


@triton.jit
def two_statements_kernel(out, BLOCK: tl.constexpr, BUG: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(out + i, 1)  # BUG
    else:
        start = BLOCK - 1 if BUG else BLOCK
        tl.store(out + start + i, 2)  # BUG


@plant(two_statements_kernel, STORES, argument="out", offset=7)
def different_statements_of_different_programs(memory: Memory, bug: bool) -> Pairs:
    """Either of the two stores may be named: neither waits for the other."""
    out = memory.zeros(16, dtype=torch.int64)
    two_statements_kernel[(2,)](out, BLOCK=8, BUG=bug)
    return [(out, torch.tensor([1, 2]).repeat_interleave(8))]
