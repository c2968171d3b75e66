"""Out of bounds in callees, loops, branches and atomics, by loaded indices, and through tables of pointers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreter.planted.model import Memory, Pairs, plant

LOAD, STORE = "out-of-bounds-load", "out-of-bounds-store"


@triton.jit
def put(target, i, value, n, BUG: tl.constexpr):
    if BUG:
        tl.store(target + i, value)  # BUG
    else:
        tl.store(target + i, value, mask=i < n)


@triton.jit
def callee_kernel(x, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    put(out, i, tl.load(x + i, mask=i < n, other=0), n, BUG)


@plant(callee_kernel, STORE, argument="out", faulty=put, program=(2, 0, 0), offset=40, count=8)
def store_in_a_callee(memory: Memory, bug: bool) -> Pairs:
    """The line is the callee's, the kernel is the launched one, the argument is its name there."""
    x, out = memory.range(40), memory.zeros(40)
    callee_kernel[(3,)](x, out, 40, BLOCK=16, BUG=bug)
    return [(out, x)]


@triton.jit
def get(source, i, n, BUG: tl.constexpr):
    if BUG:
        value = tl.load(source + i)  # BUG
    else:
        value = tl.load(source + i, mask=i < n, other=0)
    return value


@triton.jit
def get_twice(source, i, n, BUG: tl.constexpr):
    return get(source, i, n, BUG) * 2


@triton.jit
def loop_kernel(weights, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, n, BLOCK):
        total += get_twice(weights, start + tl.arange(0, BLOCK), n, BUG)
    tl.store(out + tl.program_id(0), tl.sum(total))


@plant(loop_kernel, LOAD, argument="weights", faulty=get, offset=40, count=8, program=(0, 0, 0))
def load_two_calls_deep_in_a_loop(memory: Memory, bug: bool) -> Pairs:
    weights, out = memory.range(40, dtype=torch.int32), memory.zeros(1, dtype=torch.int32)
    loop_kernel[(1,)](weights, out, 40, BLOCK=16, BUG=bug)
    return [(out, (weights * 2).sum(0, keepdim=True).int())]


@triton.jit
def branch_kernel(x, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))
    if pid == 0:
        before = out - 1 if BUG else out
        tl.store(before, 7.0)  # BUG


@plant(branch_kernel, STORE, argument="out", program=(0, 0, 0), offset=-1, count=1)
def store_in_a_branch_of_one_program(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(64), memory.zeros(64)
    branch_kernel[(4,)](x, out, 64, BLOCK=16, BUG=bug)
    return [(out[1:], x[1:]), (out[:1], torch.tensor([7.0]))]


@triton.jit
def else_kernel(x, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    if (pid + 1) * BLOCK <= n:
        value = tl.load(x + i)
    else:
        mask = i < n + 1 if BUG else i < n
        value = tl.load(x + i, mask=mask)  # BUG
    tl.store(out + i, value, mask=i < n)


@plant(else_kernel, LOAD, argument="x", program=(2, 0, 0), offset=39, count=1)
def load_in_the_branch_for_the_tail(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(39, dtype=torch.float64), memory.zeros(39, dtype=torch.float64)
    else_kernel[(3,)](x, out, 39, BLOCK=16, BUG=bug)
    return [(out, x)]


@triton.jit
def csr_kernel(starts, columns, out, BUG: tl.constexpr):
    row = tl.program_id(0)
    at = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    if BUG:
        end += 1
    total = 0
    while at < end:
        total += tl.load(columns + at)  # BUG
        at += 1
    tl.store(out + row, total)


@plant(csr_kernel, LOAD, argument="columns", program=(3, 0, 0), offset=9, count=1)
def while_loop_runs_once_too_often(memory: Memory, bug: bool) -> Pairs:
    """Only the last row's extra step leaves the array: 2, 0, 4 and 3 entries."""
    starts = memory.like(torch.tensor([0, 2, 2, 6, 9], dtype=torch.int32))
    columns, out = memory.range(9, dtype=torch.int32), memory.zeros(4, dtype=torch.int32)
    csr_kernel[(4,)](starts, columns, out, BUG=bug)
    return [(out, torch.tensor([3, 0, 18, 24], dtype=torch.int32))]


@triton.jit
def gather_kernel(table, indices, out, n, WIDTH: tl.constexpr):
    i = tl.load(indices + tl.program_id(0))
    c = tl.arange(0, WIDTH)
    row = tl.load(table + i * WIDTH + c)  # BUG
    tl.store(out + tl.program_id(0) * WIDTH + c, row)


@plant(gather_kernel, LOAD, argument="table", program=(1, 0, 0), offset=80, count=8)
def embedding_index_too_large(memory: Memory, bug: bool) -> Pairs:
    table, out = memory.range(10, 8, dtype=torch.float16), memory.zeros(3, 8, dtype=torch.float16)
    indices = memory.like(torch.tensor([9, 10 if bug else 3, 0]))
    gather_kernel[(3,)](table, indices, out, 10, WIDTH=8)
    return [(out, table[indices.clamp(max=9)])]


@triton.jit
def scatter_kernel(x, indices, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + tl.load(indices + i), tl.load(x + i))  # BUG


@plant(scatter_kernel, STORE, argument="out", offset=-1, count=1)
def scatter_to_the_index_of_padding(memory: Memory, bug: bool) -> Pairs:
    """-1 marks a slot to be ignored, which the kernel does not do."""
    x, out = memory.range(8, dtype=torch.uint8), memory.zeros(9, dtype=torch.uint8)
    places = torch.tensor([0, 3, 5, -1 if bug else 8, 2, 1, 7, 4])
    scatter_kernel[(1,)](x, memory.like(places), out, BLOCK=8)
    want = torch.zeros(9, dtype=torch.uint8)
    want[places] = x
    return [(out, want)]


@triton.jit
def histogram_kernel(x, counts, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(x + i), 1)  # BUG


@plant(histogram_kernel, STORE, argument="counts", program=(0, 0, 0), offset=4, count=1)
def atomic_add_beyond_the_last_bin(memory: Memory, bug: bool) -> Pairs:
    counts = memory.zeros(4, dtype=torch.int32)
    x = torch.arange(32, dtype=torch.int64) % 4
    x[5] = 4 if bug else 1
    histogram_kernel[(2,)](memory.like(x), counts, BLOCK=16)
    return [(counts, torch.full((4,), 8, dtype=torch.int32))]


@triton.jit
def atomic_tail_kernel(x, out, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    if BUG:
        tl.atomic_max(out + i, value)  # BUG
    else:
        tl.atomic_max(out + i, value, mask=i < n)


@plant(atomic_tail_kernel, STORE, argument="out", offset=11, count=5)
def atomic_max_without_a_mask(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(11), memory.zeros(11)
    atomic_tail_kernel[(1,)](x, out, 11, BLOCK=16, BUG=bug)
    return [(out, x)]


@triton.jit
def lock_kernel(locks, out):
    pid = tl.program_id(0)
    found = tl.atomic_cas(locks + pid, 0, 1)  # BUG
    tl.store(out + pid, found)


@plant(lock_kernel, STORE, argument="locks", program=(2, 0, 0), offset=2, count=1)
def fewer_locks_than_programs(memory: Memory, bug: bool) -> Pairs:
    locks, out = memory.zeros(2 if bug else 3, dtype=torch.int32), memory.range(3, dtype=torch.int32)
    lock_kernel[(3,)](locks, out)
    return [(out, torch.zeros(3, dtype=torch.int32))]


@triton.jit
def dimensionless_kernel(x, out):
    pid = tl.program_id(0)
    tl.store(out + pid, tl.load(x + pid))  # BUG


@plant(dimensionless_kernel, LOAD, argument="x", program=(1, 0, 0), offset=1, count=1, shape=(), strides=())
def second_element_of_a_scalar(memory: Memory, bug: bool) -> Pairs:
    x = memory.like(torch.tensor(3.0)) if bug else memory.like(torch.tensor([3.0, 3.0]))
    out = memory.zeros(2)
    dimensionless_kernel[(2,)](x, out)
    return [(out, torch.tensor([3.0, 3.0]))]


@plant(dimensionless_kernel, LOAD, argument="x", program=(0, 0, 0), offset=0, count=1, shape=(0,))
def first_element_of_nothing(memory: Memory, bug: bool) -> Pairs:
    out = memory.zeros(1)
    dimensionless_kernel[(1,)](torch.empty(0) if bug else memory.range(1), out)
    return [(out, torch.ones(1))]


@triton.jit
def table_kernel(table, sizes, out, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    x = tl.load(table + pid).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < tl.load(sizes + pid), other=0.0)  # BUG
    tl.store(out + pid, tl.sum(value))


@plant(table_kernel, LOAD, "use-after-free", argument=None, program=(1, 0, 0), count=2)
def size_in_a_pointer_table_too_large(memory: Memory, bug: bool) -> Pairs:
    """An address that no argument leads to may as well have been freed."""
    parts, out = [memory.range(n) for n in (8, 5, 3)], memory.zeros(3)
    table = memory.like(torch.tensor([part.data_ptr() for part in parts]))
    sizes = memory.like(torch.tensor([8, 7 if bug else 5, 3], dtype=torch.int32))
    table_kernel[(3,)](table, sizes, out, BLOCK=8)
    return [(out, torch.stack([part.sum() for part in parts]))]


@plant(table_kernel, "use-after-free", argument=None, program=(2, 0, 0))
def pointer_table_outlives_a_tensor(memory: Memory, bug: bool) -> Pairs:
    """The table keeps an address, not the tensor."""
    parts, out = [memory.range(n) for n in (4, 4, 4)], memory.zeros(3)
    want = torch.stack([part.sum() for part in parts])
    table = memory.like(torch.tensor([part.data_ptr() for part in parts]))
    sizes = memory.like(torch.tensor([4, 4, 4], dtype=torch.int32))
    if bug:
        del parts[2]
    table_kernel[(3,)](table, sizes, out, BLOCK=4)
    return [(out, want)]


@plant(table_kernel, LOAD, "use-after-free", argument=None, program=(1, 0, 0), count=3)
def size_too_large_of_a_tensor_made_by_torch(memory: Memory, bug: bool) -> Pairs:
    parts, out = [torch.ones(n) for n in (8, 5, 3)], memory.zeros(3)
    table = torch.tensor([part.data_ptr() for part in parts])
    table_kernel[(3,)](table, torch.tensor([8, 8 if bug else 5, 3], dtype=torch.int32), out, BLOCK=8)
    return [(out, torch.tensor([8.0, 5.0, 3.0]))]


@plant(table_kernel, "use-after-free", argument=None, program=(0, 0, 0))
def addresses_of_temporaries(memory: Memory, bug: bool) -> Pairs:
    """`x.contiguous()` is a new tensor here, and is gone before the launch."""
    columns, out = memory.range(4, 3).T, memory.zeros(3)
    if bug:
        table = torch.tensor([column.contiguous().data_ptr() for column in columns])
    else:
        kept = [column.contiguous() for column in columns]
        table = torch.tensor([column.data_ptr() for column in kept])
    table_kernel[(3,)](table, torch.full((3,), 4, dtype=torch.int32), out, BLOCK=4)
    return [(out, columns.sum(1))]


@triton.jit
def words_kernel(x, out, start, BLOCK: tl.constexpr):
    words = (x + start).to(tl.pointer_type(tl.int32))
    i = tl.arange(0, BLOCK)
    value = tl.load(words + i)  # BUG
    tl.store(out + i, value)


@plant(words_kernel, "misaligned-access", argument="x", program=(0, 0, 0), offset=3, count=4)
def words_at_an_odd_byte(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(24, dtype=torch.uint8), memory.zeros(4, dtype=torch.int32)
    words_kernel[(1,)](x, out, 3 if bug else 4, BLOCK=4)
    return [(out, x[4:20].view(torch.int32))]


@triton.jit
def counted_in_bytes_kernel(x, out, by, BLOCK: tl.constexpr):
    first = (x.to(tl.pointer_type(tl.int8)) + by).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    value = tl.load(first + i)  # BUG
    tl.store(out + i, value)


@plant(counted_in_bytes_kernel, "misaligned-access", argument="x", program=(0, 0, 0), count=4)
def elements_counted_in_bytes(memory: Memory, bug: bool) -> Pairs:
    """The cast to bytes and back hides nothing: the offset of an element was added as one of a byte."""
    x, out = memory.range(8), memory.zeros(4)
    counted_in_bytes_kernel[(1,)](x, out, 2 if bug else 8, BLOCK=4)
    return [(out, x[2:6])]


@triton.jit
def address_kernel(x, out, by):
    at = (x.to(tl.int64) + by).to(tl.pointer_type(tl.float32))
    value = tl.load(at)  # BUG
    tl.store(out, value)


@plant(address_kernel, "misaligned-access", argument="x", program=(0, 0, 0), count=1)
def address_that_is_no_multiple(memory: Memory, bug: bool) -> Pairs:
    x, out = memory.range(8), memory.zeros(1)
    address_kernel[(1,)](x, out, 3 if bug else 12)
    return [(out, x[3:4])]


@triton.jit
def beside_kernel(wide, narrow, other, out, by):
    pid = tl.program_id(0)
    source = narrow
    if pid == 1:
        source = other
    first = (source + by).to(tl.pointer_type(tl.float32))
    value = tl.load(first)  # BUG
    tl.store(out + pid, value + tl.load(wide))


@plant(beside_kernel, "misaligned-access", argument="narrow", program=(0, 0, 0))
def bytes_chosen_beside_a_wider_view(memory: Memory, bug: bool) -> Pairs:
    """One storage as float32 and twice as bytes: what the programs choose between are the bytes."""
    x, out = memory.range(16), memory.zeros(2)
    narrow = x.view(torch.uint8)
    beside_kernel[(2,)](x, narrow[:32], narrow[32:], out, 1 if bug else 4)
    return [(out, x[[1, 9]] + x[0])]
