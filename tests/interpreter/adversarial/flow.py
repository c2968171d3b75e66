"""Python's corners: where names are bound, how functions return, what a branch may not touch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.interpreter.adversarial.cases import honest
from tests.interpreter.planted.model import Memory, Pairs

INT = torch.int32


def ints(values: object) -> torch.Tensor:
    """int32."""
    return torch.tensor(list(values), dtype=INT)  # type: ignore[call-overload]


@triton.jit
def tuple_kernel(out):
    m, n = 0, 0.5
    (a, b), c = (1, 2), 3
    total = m.to(tl.float32) + n.to(tl.float32) + a.to(tl.float32) + b + c
    tl.store(out + tl.program_id(0), total)


@honest()
def numbers_in_a_tuple_become_tensors(memory: Memory) -> Pairs:
    out = memory.zeros(2)
    tuple_kernel[(2,)](out)
    return [(out, torch.full((2,), 6.5))]


@triton.jit
def reused_kernel(out):
    pid = tl.program_id(0)
    s = 0
    for i in range(pid):
        for i in range(2):
            s += i
        s += 10
    for i in range(3):
        s += i * 100
    tl.store(out + pid, s)


@honest()
def one_variable_for_three_loops(memory: Memory) -> Pairs:
    out = memory.zeros(5, dtype=INT)
    reused_kernel[(5,)](out)
    return [(out, ints(11 * p + 300 for p in range(5)))]


@triton.jit
def returning(a, b, which):
    if which == 0:
        return a
    elif which == 1:  # noqa: RET505
        if a > 2:
            return b
        a += 5
    else:
        return a * b
    for k in range(3):
        if k == a - 5:
            return a + 1000
    return a + b


@triton.jit
def returning_kernel(out):
    pid = tl.program_id(0)
    tl.store(out + pid, returning(pid, pid + 10, pid % 3))


def returned(a: int, b: int, which: int) -> int:
    """``returning`` in plain Python."""
    if which != 1:
        return a if which == 0 else a * b
    if a > 2:
        return b
    a += 5
    return a + 1000 if a - 5 in range(3) else a + b


@honest()
def returns_in_nested_branches_and_loops(memory: Memory) -> Pairs:
    out = memory.zeros(9, dtype=INT)
    returning_kernel[(9,)](out)
    return [(out, ints(returned(p, p + 10, p % 3) for p in range(9)))]


@triton.jit
def power(x, N: tl.constexpr):
    if N == 0:
        return x * 0 + 1
    else:  # noqa: RET505
        return x * power(x, N - 1)


@triton.jit
def power_kernel(out):
    pid = tl.program_id(0)
    if pid > 0:
        tl.store(out + pid, power(pid, 3))


@honest()
def a_function_that_calls_itself(memory: Memory) -> Pairs:
    out = memory.zeros(4, dtype=INT)
    power_kernel[(4,)](out)
    return [(out, ints(p**3 for p in range(4)))]


@triton.jit
def unrolled_kernel(out, N: tl.constexpr):
    pid = tl.program_id(0)
    s = 0
    for k in tl.static_range(N):
        if pid > k:
            s += k + 1
        elif k % 2 == 0:
            s += 100
    tl.store(out + pid, s)


@honest()
def programs_disagree_inside_an_unrolled_loop(memory: Memory) -> Pairs:
    out = memory.zeros(4, dtype=INT)
    unrolled_kernel[(4,)](out, N=3)
    want = [sum(k + 1 if p > k else 100 * (k % 2 == 0) for k in range(3)) for p in range(4)]
    return [(out, ints(want))]


@triton.jit
def collatz_kernel(x, out, LIMIT: tl.constexpr):
    pid = tl.program_id(0)
    n = tl.load(x + pid)
    steps = 0
    while n != 1 and steps < LIMIT:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    tl.store(out + pid, steps)


@honest()
def loops_of_very_different_length(memory: Memory) -> Pairs:
    out, want = memory.zeros(30, dtype=INT), []
    for n in range(1, 31):
        steps = 0
        while n != 1:
            n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
        want.append(steps)
    collatz_kernel[(30,)](memory.range(30, dtype=INT), out, LIMIT=1000)
    return [(out, ints(want))]


@triton.jit
def jagged_kernel(x, lengths, out, n, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if part * BLOCK >= length:
        return
    if length == 3:
        tl.store(out + row * n, -1.0)
        return
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, length, BLOCK):
        j = k + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x + row * n + j, mask=j < length, other=0.0))
    i = part * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * n + i, total, mask=i < length)


@honest()
def rows_of_different_length(memory: Memory) -> Pairs:
    x, out, want = memory.range(4, 10), memory.zeros(4, 10), torch.zeros(4, 10)
    jagged_kernel[(4, 3)](x, memory.like(ints([0, 3, 7, 10])), out, 10, BLOCK=4)
    want[1, 0], want[2, :7], want[3] = -1, x[2, :7].sum(), x[3].sum()
    return [(out, want)]


@triton.jit
def bytes_kernel(x, BLOCK: tl.constexpr, BOTH: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(x.to(tl.pointer_type(tl.uint8), bitcast=True) + i * 4 + 3)
    value = tl.load(x + i) if BOTH else tl.full((BLOCK,), 1.0, tl.float32)
    tl.store(x + i, tl.where(top >= 128, -value, value))


@honest()
def read_by_bytes_and_stored_by_words(memory: Memory) -> Pairs:
    """What is remembered of an element must be split when a narrower access comes before the first store."""
    x, y = memory.like(torch.arange(-16.0, 16.0)), memory.like(torch.arange(-16.0, 16.0))
    want = [x.abs(), torch.where(y < 0, -1.0, 1.0)]
    bytes_kernel[(2,)](x, BLOCK=16, BOTH=True)
    bytes_kernel[(2,)](y, BLOCK=16, BOTH=False)
    return [(x, want[0]), (y, want[1])]
