"""Kernels in real styles with one thing wrong; the line that is accused is marked."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreter.adversarial.cases import bug
from tests.interpreter.adversarial.synchronised import counters
from tests.interpreter.planted.model import Memory


@triton.jit
def early_sum_kernel(a, c, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    pid = tl.program_id(0)
    tl.atomic_add(c + i, tl.load(a + pid * BLOCK + i))
    if pid == tl.num_programs(0) - 1:
        tl.store(out + i, tl.load(c + i))  # BUG


@bug(early_sum_kernel, "racing-load")
def sum_read_by_the_program_with_the_last_number(memory: Memory) -> None:
    """The last number is not the last to come."""
    early_sum_kernel[(4,)](memory.range(4, 8), torch.zeros(8), memory.zeros(8), BLOCK=8)


@triton.jit
def early_maximum_kernel(x, largest, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.atomic_max(largest, tl.max(v))
    tl.store(out + i, v / tl.load(largest), mask=i < n)  # BUG


@bug(early_maximum_kernel, "racing-load", executors=("batched",))
def maximum_read_before_all_have_given_theirs(memory: Memory) -> None:
    """A float's maximum is two masked integer atomics: the one that is masked off is no signal."""
    early_maximum_kernel[(4,)](memory.range(30), torch.zeros(1), memory.zeros(30), 30, BLOCK=8)


@triton.jit
def counter_kernel(counter, out):
    at = tl.load(counter)  # BUG
    tl.atomic_add(counter, 1)
    tl.store(out + tl.program_id(0), at)


@bug(counter_kernel, "racing-load", executors=("serial",))
def counter_read_and_added_in_two_steps(memory: Memory) -> None:
    counter_kernel[(4,)](counters(), memory.zeros(4, dtype=torch.int32))


@triton.jit
def ticket_kernel(x, parts, counter, out, SEM: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr):
    pid = tl.program_id(0)
    ticket = 0
    if EARLY:
        ticket = tl.atomic_add(counter, 1)
    tl.store(parts + pid, tl.sum(tl.load(x + pid * BLOCK + tl.arange(0, BLOCK))))
    if not EARLY:
        ticket = tl.atomic_add(counter, 1, sem=SEM)
    if ticket == tl.num_programs(0) - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, P))))  # BUG


@bug(ticket_kernel, "racing-load")
def relaxed_ticket(memory: Memory) -> None:
    x, parts = memory.range(4, 8), torch.empty(4)
    ticket_kernel[(4,)](x, parts, counters(), memory.zeros(1), SEM="relaxed", EARLY=False, BLOCK=8, P=4)


@bug(ticket_kernel, "racing-load")
def ticket_drawn_before_the_store(memory: Memory) -> None:
    x, parts = memory.range(4, 8), torch.empty(4)
    ticket_kernel[(4,)](x, parts, counters(), memory.zeros(1), SEM="acq_rel", EARLY=True, BLOCK=8, P=4)


@triton.jit
def broken_chain_kernel(out, parts, flags, N: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(parts + pid, pid + 1.0)
    if pid == 2:
        while tl.atomic_add(flags + 1, 0, sem="relaxed") == 0:
            pass
    elif pid > 0:
        while tl.atomic_add(flags + pid - 1, 0, sem="acquire") == 0:
            pass
    tl.atomic_xchg(flags + pid, 1, sem="release")
    k = tl.arange(0, N)
    tl.store(out + pid, tl.sum(tl.load(parts + k, mask=k <= pid, other=0.0)))  # BUG


@bug(broken_chain_kernel, "racing-load")
def one_link_of_the_chain_is_relaxed(memory: Memory) -> None:
    broken_chain_kernel[(4,)](memory.zeros(4), torch.empty(4), counters(4), N=4)


@triton.jit
def early_unlock_kernel(x, sums, lock, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    v = tl.load(sums + i) + tl.load(x + tl.program_id(0) * BLOCK + i)  # BUG
    tl.atomic_xchg(lock, 0)
    tl.store(sums + i, v)  # BUG


@bug(early_unlock_kernel, "racing-load", "racing-stores")
def lock_released_before_the_store(memory: Memory) -> None:
    early_unlock_kernel[(4,)](memory.range(4, 8), torch.zeros(8), counters(), BLOCK=8)


@triton.jit
def late_lock_kernel(x, sums, lock, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(sums + i)  # BUG
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(sums + i, v + tl.load(x + tl.program_id(0) * BLOCK + i))
    tl.atomic_xchg(lock, 0)


@bug(late_lock_kernel, "racing-load")
def load_before_the_lock(memory: Memory) -> None:
    late_lock_kernel[(4,)](memory.range(4, 8), torch.zeros(8), counters(), BLOCK=8)


@triton.jit
def state_kernel(x, state, out, T, W: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(W):
        j = i - k
        total += tl.load(x + j, mask=(j >= 0) & (j < T), other=0.0)
        total += tl.load(state + j + W, mask=j < 0, other=0.0)  # BUG
    tl.store(out + i, total, mask=i < T)
    if pid == tl.num_programs(0) - 1:
        s = tl.arange(0, W)
        tl.store(state + s, tl.load(x + T - W + s))


@bug(state_kernel, "racing-load")
def convolution_state_updated_while_others_read_it(memory: Memory) -> None:
    state_kernel[(2,)](memory.range(16), memory.zeros(4), memory.zeros(16), 16, W=4, BLOCK=8)


@triton.jit
def cache_kernel(k, cache, slots, D: tl.constexpr):
    t = tl.program_id(0)
    slot = tl.load(slots + t)
    i = tl.arange(0, D)
    tl.store(cache + slot * D + i, tl.load(k + t * D + i))  # BUG


@bug(cache_kernel, "racing-stores")
def two_tokens_in_one_slot(memory: Memory) -> None:
    slots = memory.like(torch.tensor([0, 3, 3, 5]))
    cache_kernel[(4,)](memory.range(4, 8), memory.zeros(6, 8), slots, D=8)


@bug(cache_kernel, "out-of-bounds-store")
def padding_slot_minus_one(memory: Memory) -> None:
    slots = memory.like(torch.tensor([0, 3, -1, 5]))
    cache_kernel[(4,)](memory.range(4, 8), memory.zeros(6, 8), slots, D=8)


@bug(cache_kernel, "gap-store")
def stride_of_an_interleaved_cache_forgotten(memory: Memory) -> None:
    slots = memory.like(torch.tensor([0, 2, 1, 4]))
    cache_kernel[(4,)](memory.range(4, 8), memory.zeros(6, 2, 8)[:, 0], slots, D=8)


@triton.jit
def wide_index_kernel(out, stride, BLOCK: tl.constexpr):
    tl.store(out + tl.program_id(0) * stride + tl.arange(0, BLOCK), 1.0)  # BUG


@bug(wide_index_kernel, "out-of-bounds-store")
def offset_overflows_32_bits(memory: Memory) -> None:
    wide_index_kernel[(3,)](memory.zeros(2, 8), 2**30, BLOCK=8)
