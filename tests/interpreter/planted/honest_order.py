"""Kernels in which nothing is wrong: programs that share memory, in good order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreter.planted.model import Memory, Pairs, honest


@triton.jit
def ticket_kernel(x, partial, counter, out, n, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(partial + pid, tl.sum(tl.load(x + i, mask=i < n, other=0.0)))
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        slots = tl.arange(0, SLOTS)
        found = tl.load(partial + slots, mask=slots < tl.num_programs(0), other=0.0)
        tl.store(out, tl.sum(found))
        tl.store(counter, 0)


@honest
def last_program_done_reads_the_others(memory: Memory) -> Pairs:
    """It resets the counter with a plain store too: everybody else has drawn a ticket."""
    x, partial, out = memory.range(70), torch.empty(8), memory.zeros(1)
    counter = memory.zeros(1, dtype=torch.int32)
    for _ in range(2):
        ticket_kernel[(5,)](x, partial, counter, out, 70, BLOCK=16, SLOTS=8)
    return [(out, x.sum(0, keepdim=True)), (counter, torch.zeros(1, dtype=torch.int32))]


@triton.jit
def shared_kernel(x, out, counter, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + pid, tl.sum(value) * pid)
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(x + i, value * 0, mask=i < n)


@honest
def last_program_done_zeroes_what_all_have_read(memory: Memory) -> Pairs:
    x, out, counter = memory.range(13), memory.zeros(4), memory.zeros(1, dtype=torch.int32)
    total = x.sum()
    shared_kernel[(4,)](x, out, counter, 13, BLOCK=16)
    return [(out, total * torch.arange(4)), (x, torch.zeros(13))]


@triton.jit
def lock_kernel(x, sums, locks, counts, columns, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < columns
    value = tl.load(x + row * columns + c, mask=mask, other=0.0)
    group = row % GROUPS
    at = sums + group * columns + c
    while tl.atomic_cas(locks + group, 0, 1) == 1:
        pass
    count = tl.load(counts + group)
    if count == 0:
        tl.store(counts + group, 1)
    else:
        value += tl.load(at, mask=mask)
    tl.store(at, value, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(locks + group, 0)


@honest
def accumulation_under_a_lock(memory: Memory) -> Pairs:
    """The first to come finds the count zero and stores: the sums need no zeroing."""
    x, sums = memory.range(6, 10), torch.empty(2, 10)
    locks, counts = torch.zeros(2, 2, dtype=torch.int32)
    lock_kernel[(6,)](x, sums, locks, counts, 10, BLOCK=16, GROUPS=2)
    return [(sums, torch.stack([x[0::2].sum(0), x[1::2].sum(0)])), (locks, torch.zeros(2, dtype=torch.int32))]


@triton.jit
def chain_kernel(x, out, flags, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + pid * BLOCK + i))
    if pid > 0:
        while tl.atomic_add(flags + pid - 1, 0, sem="acquire") == 0:
            pass
        total += tl.load(out + pid - 1)
    tl.store(out + pid, total)
    tl.debug_barrier()
    tl.atomic_xchg(flags + pid, 1, sem="release")


@honest
def each_program_waits_for_the_one_before(memory: Memory) -> Pairs:
    x, out, flags = memory.range(5, 8), torch.empty(5), torch.zeros(5, dtype=torch.int32)
    chain_kernel[(5,)](x, out, flags, BLOCK=8)
    return [(out, x.sum(1).cumsum(0))]


@triton.jit
def same_value_kernel(out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out, float("nan"))
    tl.store(out + 1 + i // 2, (i // 2).to(tl.float32))


@honest
def everybody_stores_the_same(memory: Memory) -> Pairs:
    """NaN is the same as NaN: bits are compared."""
    out = memory.zeros(9)
    same_value_kernel[(3,)](out, BLOCK=16)
    return [(out, torch.tensor([float("nan"), 0, 1, 2, 3, 4, 5, 6, 7]))]


@triton.jit
def split_kernel(a, b, out, K, N: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    left = tl.load(a + tl.program_id(0) * K + k, mask=k < K, other=0.0)
    right = tl.load(b + k[:, None] * N + n[None, :], mask=k[:, None] < K, other=0.0)
    tl.atomic_add(out + tl.program_id(0) * N + n, tl.sum(left[:, None] * right, axis=0), sem="relaxed")


@honest
def split_k_adds_into_zeros(memory: Memory) -> Pairs:
    a, b, out = memory.range(3, 20), memory.range(20, 8), torch.zeros(3, 8)
    split_kernel[(3, 3)](a, b, out, 20, N=8, BLOCK=8)
    return [(out, a @ b)]


@triton.jit
def histogram_kernel(x, counts, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(x + i, mask=i < n, other=0) % BINS, 1, mask=i < n)


@honest
def histogram_of_colliding_lanes(memory: Memory) -> Pairs:
    x, counts = memory.range(50, dtype=torch.int64), memory.zeros(4, dtype=torch.int32)
    histogram_kernel[(4,)](x, counts, 50, BINS=4, BLOCK=16)
    return [(counts, torch.bincount(x % 4).int())]


@triton.jit
def queue_kernel(x, out, counter, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0)
    keep = value % 3 == 1
    start = tl.atomic_add(counter, tl.sum(keep.to(tl.int32)))
    place = start + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(out + place, value, mask=keep)


@honest
def places_handed_out_by_a_counter(memory: Memory) -> Pairs:
    x, counter = memory.range(50, dtype=torch.int32), memory.zeros(1, dtype=torch.int32)
    out = torch.empty(17, dtype=torch.int32)
    queue_kernel[(4,)](x, out, counter, 50, BLOCK=16)
    return [(out.sort().values, x[x % 3 == 1])]


@triton.jit
def claim_kernel(owner, out):
    pid = tl.program_id(0)
    if tl.atomic_cas(owner, -1, pid) == -1:
        tl.store(out, pid)


@honest
def only_the_winner_stores(memory: Memory) -> Pairs:
    owner, out = torch.full((1,), -1, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    claim_kernel[(4,)](owner, out)
    return [(out, owner)]


@triton.jit
def largest_kernel(x, out):
    tl.atomic_max(out, tl.load(x + tl.program_id(0)))


@honest
def atomic_max_of_floats(memory: Memory) -> Pairs:
    x, out = memory.range(6), torch.zeros(1)
    largest_kernel[(6,)](x, out)
    return [(out, torch.tensor([6.0]))]
