"""The executor: batches, their order, and whom it accuses; what cannot run as one batch is in `test_fallbacks`."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.errors import MemoryFinding
from pytest_fusion.interpreter import interpreted
from pytest_fusion.interpreter.control.executor import Order, ordered
from tests.interpreter.executors import EXECUTORS, each_executor, in_both, launched, zeros

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

tl = triton.language
InterpreterError = pytest.importorskip("triton.runtime.errors").InterpreterError
# The first batch of a launch, and how many programs still fit into one.
FIRST, LARGEST_ALONE = 128, 192


@triton.jit
def failing_kernel(out, at, BLOCK: tl.constexpr):
    pid = tl.program_id(0) * 6 + tl.program_id(1) * 3 + tl.program_id(2)
    tl.store(out + pid, 1)
    if pid == at:
        tl.store(out, tl.sum(tl.reshape(tl.arange(0, BLOCK), (BLOCK // 2, 4))))


@each_executor
def test_an_exception_names_its_program(executor: Any) -> None:
    """The error has the type, the text, and the program's id, though many ran together when it was met."""
    out = zeros(12)
    with (
        pytest.raises(InterpreterError, match=r"kernel failing_kernel, program \(1, 0, 2\) of \(2, 2, 3\)") as caught,
        interpreted(executor=executor),
    ):
        failing_kernel[(2, 2, 3)](out, 8, BLOCK=8)
    assert isinstance(caught.value.__cause__, ValueError)
    assert out.tolist() == [1] * 9 + [0] * 3, "programs before it ran, those after it did not"


@triton.jit
def tail_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) == 1:
        value = tl.load(x + i, mask=i < n, other=0.0)
    else:
        value = tl.load(x + i)
    tl.store(out + i, value, mask=i < n)


def test_both_executors_accuse_the_same_line() -> None:
    """Kind, file, line, argument, program and offset of what is raised are the same."""
    raised = []
    for executor in EXECUTORS:
        with pytest.raises(MemoryFinding) as caught, interpreted(executor=executor):
            tail_kernel[(3,)](zeros(20, torch.float32), zeros(20, torch.float32), 20, BLOCK=8)
        raised.append(caught.value.finding)
    assert raised[0] == raised[1]
    assert raised[0].line == tail_kernel.fn.__code__.co_firstlineno + 6
    assert (raised[0].kind, raised[0].program, raised[0].offset) == ("out-of-bounds-load", (2, 0, 0), 20)


@triton.jit
def unused_kernel(x, out, USED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ahead = tl.load(x + i + BLOCK)
    if USED:
        tl.store(out + i, ahead)
    else:
        tl.store(out + i, tl.load(x + i))


@each_executor
def test_only_a_load_that_is_used_is_a_finding(executor: Any) -> None:
    """A compiler drops a load of which nobody asks the value; used, it is reported where it was made."""
    x, out = zeros(16, torch.float32), zeros(16, torch.float32)
    with interpreted(executor=executor, findings="collect") as session:
        unused_kernel[(2,)](x, out, USED=False, BLOCK=8)
    assert session.findings == []
    with interpreted(executor=executor, findings="collect") as session:
        unused_kernel[(2,)](x, out, USED=True, BLOCK=8)
    (finding,) = session.findings
    assert (finding.kind, finding.code) == ("out-of-bounds-load", "ahead = tl.load(x + i + BLOCK)")


@triton.jit
def ticket_kernel(counter, got):
    pid = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(got + pid, tl.atomic_add(counter, 1))


@pytest.mark.parametrize("grid", [(5,), (300,), (4, 7), (3, 50, 2), (2, 3, 60)])
@each_executor
def test_programs_take_an_atomic_in_the_order_of_the_grid(grid: tuple[int, ...], executor: Any) -> None:
    """The last dimension is the fastest, in one batch, over several, and one by one."""
    got = zeros(prod(grid))
    with interpreted(executor=executor):
        ticket_kernel[grid](zeros(1), got)
    assert got.tolist() == list(range(prod(grid)))


@triton.jit
def lanes_kernel(counter, got, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    old = tl.atomic_add(counter + i % 2, tl.full([BLOCK], 1, tl.int32), mask=i != 3)
    tl.store(got + tl.program_id(0) * BLOCK + i, old)


def test_lanes_of_a_block_take_their_turns_inside_a_program() -> None:
    """Program by program, and in each as the block is laid out; a masked lane takes none and gets zero."""
    session, (got,) = in_both(lambda: [lanes_of(lanes_kernel, 3)])
    assert got.tolist() == [[0, 0, 1, 0], [2, 1, 3, 0], [4, 2, 5, 0]]
    assert session.launches[0].executor == "batched"


def lanes_of(kernel: Any, programs: int) -> torch.Tensor:
    got = zeros(programs * 4).view(programs, 4)
    kernel[(programs,)](zeros(2), got, BLOCK=4)
    return got


@triton.jit
def last_kernel(into, at, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(into + tl.load(at + i), i, mask=i != 3)


@each_executor
def test_lanes_take_their_turns_back_to_front_in_another_order(executor: str) -> None:
    """Programs and the lanes of each, masked ones apart, come last first where that is asked for."""
    with interpreted(executor=executor), ordered("reversed"):
        got = lanes_of(lanes_kernel, 3)
    assert got.tolist() == [[5, 2, 4, 0], [3, 1, 2, 0], [1, 0, 0, 0]]


@each_executor
@pytest.mark.parametrize(("order", "stays"), [("launched", 2), ("reversed", 0)])
def test_of_one_element_the_last_lane_in_turn_stays(executor: str, order: Order, stays: int) -> None:
    """Lanes that store to one element race, and the order decides whose value is there."""
    into = zeros(1)
    with interpreted(executor=executor, findings="collect") as session, ordered(order):
        last_kernel[(1,)](into, zeros(4), BLOCK=4)
    assert into.item() == stays
    assert [found.kind for found in session.findings] == ["racing-stores"]


@triton.jit
def twice_kernel(counter, first, second):
    pid = tl.program_id(0)
    tl.store(first + pid, tl.atomic_add(counter, 1))
    tl.store(second + pid, tl.atomic_add(counter, 1))


@pytest.mark.parametrize("programs", [4, LARGEST_ALONE, LARGEST_ALONE + 1, 300])
def test_a_batch_takes_one_instruction_after_the_other(programs: int) -> None:
    """All programs of a batch do the first atomic before any does the second; the next batch begins after that."""
    first, second = zeros(programs), zeros(programs)
    with interpreted():
        twice_kernel[(programs,)](zeros(1), first, second)
    sizes = [programs] if programs <= LARGEST_ALONE else [FIRST, programs - FIRST]
    starts = [2 * before for before in itertools.accumulate([0, *sizes])][: len(sizes)]
    pairs = list(zip(starts, sizes, strict=True))
    assert first.tolist() == [start + i for start, size in pairs for i in range(size)]
    assert second.tolist() == [start + size + i for start, size in pairs for i in range(size)]
    with interpreted(executor="serial"):
        twice_kernel[(programs,)](zeros(1), first, second)
    assert (first.tolist(), second.tolist()) == ([*range(0, 2 * programs, 2)], [*range(1, 2 * programs, 2)])


@triton.jit
def rows_kernel(x, out, total, peak, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    value = tl.load(x + pid * BLOCK + tl.arange(0, BLOCK))
    row = tl.sum(tl.exp(value) / (1.0 + value * value))
    if pid % 3 == 0:
        row = -row
    tl.store(out + pid, row)
    tl.atomic_add(total, row)
    tl.atomic_max(peak, row)


@pytest.mark.parametrize("programs", [1, 127, FIRST, FIRST + 1, LARGEST_ALONE, LARGEST_ALONE + 1, 261])
def test_bits_do_not_depend_on_batches(programs: int) -> None:
    """Sums, transcendental functions and float atomics are the same for grids at and beyond the batches' borders."""
    x = torch.randn(programs, 16, generator=torch.Generator().manual_seed(programs))

    def run() -> list[torch.Tensor]:
        out, total, peak = torch.zeros(programs), torch.zeros(1), torch.zeros(1)
        rows_kernel[(programs,)](x, out, total, peak, BLOCK=16)
        return [out, total, peak]

    session, (out, total, _) = in_both(run)
    assert session.launches[0].executor == "batched"
    want = torch.zeros(())
    for row in out:
        want = want + row
    assert total.item() == want.item(), "float32, one program after the other"


@triton.jit
def find(row, length, wanted):
    at = 0
    while at < length:
        if tl.load(row + at) == wanted:
            return at
        at += 1
    return -1


@triton.jit
def find_kernel(x, out, length, wanted):
    pid = tl.program_id(0)
    tl.store(out + pid, find(x + pid * length, length, wanted + pid % 2))


def test_a_return_inside_a_loop_is_each_program_s_own() -> None:
    """Programs leave the loop at different turns, or never, and each gets what it returned."""
    x = torch.tensor([[5, 6, 7], [0, 5, 6], [1, 2, 5], [5, 0, 0], [5, 5, 5], [9, 9, 9]])
    session, (out,) = in_both(lambda: [found(x)])
    assert out.tolist() == [0, 2, 2, -1, 0, -1]
    assert session.launches[0].executor == "batched"


def found(x: torch.Tensor) -> torch.Tensor:
    out = zeros(len(x))
    find_kernel[(len(x),)](x, out, x.shape[1], 5)
    return out


@triton.jit
def classify(value):
    if value % 2 == 0:
        return value * 10
    else:  # noqa: RET505 - both branches return: that is the test
        if value > 4:
            return -value
        return value + 100


@triton.jit
def classify_kernel(out, start):
    pid = tl.program_id(0)
    tl.store(out + pid, classify(pid + start) + classify(pid))


def test_returns_in_both_branches() -> None:
    """A device function whose every path returns gives each program the value of its own path, at each call."""
    session, (out,) = in_both(lambda: [launched(classify_kernel, 8, 1)])

    def value(n: int) -> int:
        if n % 2 == 0:
            return n * 10
        return -n if n > 4 else n + 100

    assert out.tolist() == [value(pid + 1) + value(pid) for pid in range(8)]
    assert session.launches[0].executor == "batched"


@triton.jit
def multiplied(a, times):
    total = 0
    while times > 0:
        total += a
        times -= 1
    return total


@triton.jit
def nested_kernel(out):
    pid = tl.program_id(0)
    total = 0
    for i in range(pid):
        j = 0
        while j <= i:
            if (i + j) % 2 == 0:
                total += multiplied(i, j)
            elif pid > 5:
                total -= 1
            j += 1
    tl.store(out + pid, total)


def test_nested_divergent_loops_with_calls() -> None:
    """Loops of different length inside loops of different length, with a third one in a function."""
    session, (out,) = in_both(lambda: [launched(nested_kernel, 9)])

    def value(pid: int) -> int:
        turns = [(i, j) for i in range(pid) for j in range(i + 1)]
        return sum(i * j if (i + j) % 2 == 0 else -(pid > 5) for i, j in turns)

    assert out.tolist() == [value(pid) for pid in range(9)]
    assert session.launches[0].executor == "batched"
