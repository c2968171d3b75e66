"""Programs of one launch that read what another one stores, with nothing that makes them wait."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreter.planted.model import Memory, Pairs, plant

LOAD = "racing-load"


@triton.jit
def halo_kernel(x, out, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    beside = i + SHIFT
    other = tl.load(x + beside, mask=(beside >= 0) & (beside < n), other=0.0)  # BUG
    own = tl.load(x + i, mask=i < n)
    tl.store(out + i, own + other, mask=i < n)


@plant(halo_kernel, LOAD, argument="x", program=(1, 0, 0), offset=15, other=(0, 0, 0))
def left_neighbour_of_an_in_place_kernel(memory: Memory, bug: bool) -> Pairs:
    x = memory.range(32)
    out = x if bug else memory.zeros(32)
    want = x + torch.cat([torch.zeros(1), x[:-1]])
    halo_kernel[(2,)](x, out, 32, SHIFT=-1, BLOCK=16)
    return [(out, want)]


@plant(halo_kernel, LOAD, argument="x", program=(0, 0, 0), offset=16, other=(1, 0, 0))
def right_neighbour_of_an_in_place_kernel(memory: Memory, bug: bool) -> Pairs:
    """One after the other the programs would be right: program 0 reads before program 1 stores."""
    x = memory.range(32, dtype=torch.bfloat16)
    out = x if bug else memory.zeros(32, dtype=torch.bfloat16)
    want = x + torch.cat([x[1:], torch.zeros(1, dtype=torch.bfloat16)])
    halo_kernel[(2,)](x, out, 32, SHIFT=1, BLOCK=16)
    return [(out, want)]


@triton.jit
def total_kernel(x, total, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    found = tl.sum(tl.load(x + i, mask=i < n, other=0.0))
    if pid == 0:
        tl.store(total, found)
    if BUG:
        found = tl.load(total)  # BUG
    tl.store(out + pid, found)


@plant(total_kernel, LOAD, argument="total", offset=0, other=(0, 0, 0))
def total_that_only_the_first_program_stores(memory: Memory, bug: bool) -> Pairs:
    x, total, out = memory.range(10), memory.zeros(1), memory.zeros(4)
    total_kernel[(4,)](x, total, out, 10, BLOCK=16, BUG=bug)
    return [(out, torch.full((4,), 55.0)), (total, torch.tensor([55.0]))]


@triton.jit
def ticket_kernel(x, partial, counter, out, n, BLOCK: tl.constexpr, SLOTS: tl.constexpr, HOW: tl.constexpr):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    if HOW == "early":
        done = tl.atomic_add(counter, 1, sem="acq_rel")
    tl.store(partial + pid, tl.sum(tl.load(x + i, mask=i < n, other=0.0)))
    if HOW == "none":
        done = pid
    elif HOW == "relaxed":
        done = tl.atomic_add(counter, 1, sem="relaxed")
    elif HOW == "acq_rel":
        done = tl.atomic_add(counter, 1, sem="acq_rel")
    if done == programs - 1:
        slots = tl.arange(0, SLOTS)
        found = tl.load(partial + slots, mask=slots < programs, other=0.0)  # BUG
        tl.store(out, tl.sum(found))


def _ticket(memory: Memory, how: str) -> Pairs:
    x, partial = memory.range(40), memory.zeros(3)
    counter, out = memory.zeros(1, dtype=torch.int32), memory.zeros(1)
    ticket_kernel[(3,)](x, partial, counter, out, 40, BLOCK=16, SLOTS=4, HOW=how)
    return [(out, torch.tensor([820.0]))]


@plant(ticket_kernel, LOAD, argument="partial", program=(2, 0, 0))
def last_program_by_number_takes_itself_for_the_last_done(memory: Memory, bug: bool) -> Pairs:
    return _ticket(memory, "none" if bug else "acq_rel")


@plant(ticket_kernel, LOAD, argument="partial")
def ticket_without_release_and_acquire(memory: Memory, bug: bool) -> Pairs:
    """A relaxed counter orders nothing but itself: the partial sums may be on their way still."""
    return _ticket(memory, "relaxed" if bug else "acq_rel")


@plant(ticket_kernel, LOAD, argument="partial")
def ticket_drawn_before_the_store(memory: Memory, bug: bool) -> Pairs:
    """The count says who drew a ticket, not whose partial sum is there."""
    return _ticket(memory, "early" if bug else "acq_rel")


@triton.jit
def row_kernel(x, out, columns, ROW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, ROW)
    whole = tl.load(x + row * columns + c, mask=c < columns, other=0.0)  # BUG
    largest = tl.max(whole)
    part = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(x + row * columns + part, mask=part < columns)
    tl.store(out + row * columns + part, own / largest, mask=part < columns)


@plant(row_kernel, LOAD, argument="x")
def whole_row_read_and_part_of_it_stored_in_place(memory: Memory, bug: bool) -> Pairs:
    x = memory.range(3, 20, dtype=torch.float64)
    out = x if bug else memory.zeros(3, 20, dtype=torch.float64)
    want = x / x.amax(1, keepdim=True)
    row_kernel[(3, 2)](x, out, 20, ROW=32, BLOCK=16)
    return [(out, want)]


@triton.jit
def transpose_kernel(x, out, n, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    c = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    mask = (r < n) & (c < n)
    value = tl.load(x + c * n + r, mask=mask)  # BUG
    tl.store(out + r * n + c, value, mask=mask)


@plant(transpose_kernel, LOAD, argument="x")
def transposed_in_place(memory: Memory, bug: bool) -> Pairs:
    x = memory.range(7, 7, dtype=torch.int16)
    out = x if bug else memory.zeros(7, 7, dtype=torch.int16)
    want = x.T.clone()
    transpose_kernel[(2, 2)](x, out, 7, B=4)
    return [(out, want)]


@triton.jit
def carry_kernel(x, out, BUG: tl.constexpr):
    pid = tl.program_id(0)
    total = tl.load(x + pid)
    if BUG:
        if pid > 0:
            total += tl.load(out + pid - 1)  # BUG
    else:
        for before in range(pid):
            total += tl.load(x + before)
    tl.store(out + pid, total)


@plant(carry_kernel, LOAD, argument="out", program=(1, 0, 0), offset=0, other=(0, 0, 0))
def running_sum_carried_from_the_program_before(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(6, dtype=torch.int64), memory.zeros(6, dtype=torch.int64)
    carry_kernel[(6,)](x, out, BUG=bug)
    return [(out, x.cumsum(0))]


@triton.jit
def peek(source, at):
    return tl.load(source + at)  # BUG


@triton.jit
def flag_kernel(x, flags, out, BUG: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 1:
        tl.store(flags, 1)
    seen = 1
    if BUG:
        seen = peek(flags, 0)
    tl.store(out + pid, seen * tl.load(x + pid))


@plant(flag_kernel, LOAD, argument="flags", faulty=peek, other=(1, 0, 0))
def plain_load_of_a_flag_in_a_callee(memory: Memory, bug: bool) -> Pairs:
    x, flags, out = memory.range(3, dtype=torch.int32), memory.zeros(1, dtype=torch.int32), memory.zeros(3)
    flag_kernel[(3,)](x, flags, out, BUG=bug)
    return [(out, x.float())]
