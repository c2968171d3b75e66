"""Programs that wait for each other in the ways that real kernels do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreter.adversarial.cases import honest
from tests.interpreter.planted.model import Memory, Pairs

INT = torch.int32


def counters(size: int = 1) -> torch.Tensor:
    """Zeros for tickets, locks and flags."""
    return torch.zeros(size, dtype=INT)


@triton.jit
def semaphore_kernel(x, c, semaphores, tiles, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    for tile in range(tiles):
        v = tl.load(x + (pid * tiles + tile) * BLOCK + i)
        while tl.atomic_add(semaphores + tile, 0, sem="acquire") != pid:
            pass
        if pid > 0:
            v += tl.load(c + tile * BLOCK + i)
        tl.store(c + tile * BLOCK + i, v)
        tl.debug_barrier()
        tl.atomic_xchg(semaphores + tile, pid + 1, sem="release")


@honest()
def split_k_in_turns_over_several_tiles(memory: Memory) -> Pairs:
    """A program has gone on to store other tiles of the same tensor when the next one takes up its first."""
    x, c = memory.range(4, 3, 16), torch.empty(3, 16)
    semaphore_kernel[(4,)](x, c, counters(3), 3, BLOCK=16)
    return [(c, x.sum(0))]


@triton.jit
def persistent_lock_kernel(x, sums, locks, counts, rows, n, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    mask = c < n
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        part = tl.load(x + row * n + c, mask=mask, other=0.0)
        group = row % GROUP
        while tl.atomic_cas(locks + group, 0, 1) == 1:
            pass
        if tl.load(counts + group) == 0:
            tl.atomic_xchg(counts + group, 1)
        else:
            part += tl.load(sums + group * n + c, mask=mask)
        tl.store(sums + group * n + c, part, mask=mask)
        tl.debug_barrier()
        tl.atomic_xchg(locks + group, 0)


@honest()
def persistent_layer_norm_backward(memory: Memory) -> Pairs:
    x, sums = memory.range(16, 10), torch.empty(2, 10)
    persistent_lock_kernel[(3,)](x, sums, counters(2), counters(2), 16, 10, GROUP=2, BLOCK=16)
    return [(sums, torch.stack([x[0::2].sum(0), x[1::2].sum(0)]))]


@triton.jit
def neighbour_kernel(x, out, parts, flags, BLOCK: tl.constexpr, N: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(parts + pid, tl.sum(tl.load(x + pid * BLOCK + tl.arange(0, BLOCK))))
    if pid > 0:
        while tl.atomic_add(flags + pid - 1, 0, sem="acquire") == 0:
            pass
    tl.atomic_xchg(flags + pid, 1, sem="release")
    k = tl.arange(0, N)
    tl.store(out + pid, tl.sum(tl.load(parts + k, mask=k <= pid, other=0.0)))


@honest()
def waiting_for_one_is_waiting_for_all_before_it(memory: Memory) -> Pairs:
    """Each program acquires its neighbour's flag only, and reads what all before have stored: order is transitive."""
    x, out = memory.range(6, 8), torch.empty(6)
    neighbour_kernel[(6,)](x, out, torch.empty(6), counters(6), BLOCK=8, N=8)
    return [(out, x.sum(1).cumsum(0))]


@triton.jit
def look_back_kernel(x, out, ticket, state, aggregates, prefixes, n, BLOCK: tl.constexpr):
    t = tl.atomic_add(ticket, 1)
    i = t * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    total = tl.sum(v)
    prefix = 0.0
    if t == 0:
        tl.store(prefixes, total)
        tl.debug_barrier()
        tl.atomic_xchg(state, 2, sem="release")
    else:
        tl.store(aggregates + t, total)
        tl.debug_barrier()
        tl.atomic_xchg(state + t, 1, sem="release")
        look = t - 1
        while look >= 0:
            flag = tl.atomic_add(state + look, 0, sem="acquire")
            if flag == 2:
                prefix += tl.load(prefixes + look)
                look = -1
            elif flag == 1:
                prefix += tl.load(aggregates + look)
                look -= 1
        tl.store(prefixes + t, prefix + total)
        tl.debug_barrier()
        tl.atomic_xchg(state + t, 2, sem="release")
    tl.store(out + i, tl.cumsum(v, 0) + prefix, mask=i < n)


@honest()
def decoupled_look_back(memory: Memory) -> Pairs:
    """Aggregates and prefixes share a storage: the one is stored before the first release, the other after it."""
    n, blocks = 109, 7
    x, out, known = (torch.arange(n) % 7).float(), memory.zeros(n), torch.empty(2, blocks)
    look_back_kernel[(blocks,)](x, out, counters(), counters(blocks), known[0], known[1], n, BLOCK=16)
    return [(out, x.cumsum(0))]


@triton.jit
def queue_kernel(x, out, counter, done, tiles, n, BLOCK: tl.constexpr):
    tile = tl.atomic_add(counter, 1)
    while tile < tiles:
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
        tile = tl.atomic_add(counter, 1)
    if tl.atomic_add(done, 1) == tl.num_programs(0) - 1:
        tl.store(counter, 0)
        tl.store(done, 0)


@honest()
def work_queue_that_the_last_one_resets(memory: Memory) -> Pairs:
    x, out, counter, done = memory.range(100), memory.zeros(100), counters(), counters()
    for _ in range(2):
        queue_kernel[(3,)](x, out, counter, done, 13, 100, BLOCK=8)
    return [(out, x * 2), (counter, counters())]


@triton.jit
def redundant_kernel(x, scale, out, n, BLOCK: tl.constexpr, PART: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(scale + row, tl.max(tl.load(x + row * n + i, mask=i < n, other=0.0)))
    j = tl.program_id(1) * PART + tl.arange(0, PART)
    value = tl.load(x + row * n + j, mask=j < n) / tl.load(scale + row)
    tl.store(out + row * n + j, value, mask=j < n)


@honest()
def each_program_stores_the_common_value_and_loads_it_again(memory: Memory) -> Pairs:
    x, out = memory.range(3, 14), memory.zeros(3, 14)
    redundant_kernel[(3, 4)](x, torch.empty(3), out, 14, BLOCK=16, PART=4)
    return [(out, x / x.amax(1, keepdim=True))]


@triton.jit
def barrier_kernel(x, largest, parts, arrived, out, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.atomic_max(largest, tl.max(v), sem="relaxed")
    tl.store(parts + pid, tl.sum(v))
    tl.atomic_add(arrived, 1)
    while tl.atomic_add(arrived, 0) < tl.num_programs(0):
        pass
    total = tl.sum(tl.load(parts + tl.arange(0, PROGRAMS)))
    tl.store(out + i, v / tl.load(largest) + total)


@honest("batched")
def grid_wide_barrier(memory: Memory) -> Pairs:
    """All programs load the same address, which stands for many of them at once. One by one it cannot run."""
    x, out = memory.range(32), memory.zeros(32)
    barrier_kernel[(4,)](x, torch.zeros(1), torch.empty(4), counters(), out, BLOCK=8, PROGRAMS=4)
    return [(out, x / 32 + x.sum())]


@triton.jit
def spinning_kernel(x, out, flag):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(out, tl.load(x))
        tl.atomic_xchg(flag, 1)
    else:
        spins = 0
        while tl.atomic_add(flag, 0) == 0:
            spins += 1
        tl.store(out + pid, tl.load(x + pid) + tl.load(out))


@honest()
def spins_are_counted(memory: Memory) -> Pairs:
    x, out = memory.range(3), memory.zeros(3)
    spinning_kernel[(3,)](x, out, counters())
    return [(out, torch.tensor([1.0, 3.0, 4.0]))]


@triton.jit
def patient_lock_kernel(total, lock, LIMIT: tl.constexpr):
    spins = 0
    while (tl.atomic_cas(lock, 0, 1) == 1) & (spins < LIMIT):
        spins += 1
    tl.store(total, tl.load(total) + 1)
    tl.atomic_xchg(lock, 0)


@honest()
def spins_for_a_lock_are_counted(memory: Memory) -> Pairs:
    """The one that holds the lock waits behind the loop: every turn changes the count, and none would be the last."""
    total = torch.zeros(1)
    patient_lock_kernel[(3,)](total, counters(), LIMIT=4000)
    return [(total, torch.full((1,), 3.0))]


@triton.jit
def atomic_flag_kernel(x, part, flag, out, BLOCK: tl.constexpr, POLL: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(part, tl.sum(tl.load(x + tl.arange(0, BLOCK))))
        tl.atomic_store(flag, 1, sem="release")
    else:
        if POLL:
            tl.atomic_poll(flag, 1)
        else:
            while tl.atomic_load(flag, sem="acquire") == 0:
                pass
        tl.store(out + pid, tl.load(part))


if hasattr(tl, "atomic_load"):  # Triton 3.9

    @honest()
    def atomic_loads_and_stores_are_signals(memory: Memory) -> Pairs:
        pairs = []
        for poll in (False, True):
            x, out = memory.range(8), memory.zeros(3)
            atomic_flag_kernel[(3,)](x, torch.empty(1), counters(), out, BLOCK=8, POLL=poll)
            pairs.append((out, torch.tensor([0.0, 36.0, 36.0])))
        return pairs
