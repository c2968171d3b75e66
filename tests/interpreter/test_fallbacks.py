"""What cannot run as one batch: it runs program by program, and the launch says why."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.checks.context import error_verdict
from pytest_fusion.diagnosis.causes import likely_cause
from pytest_fusion.errors import TooManyProgramsError
from pytest_fusion.interpreter import interpreted
from pytest_fusion.interpreter.control.executor import fallbacks, most_alone
from pytest_fusion.run.fused import Outcome
from tests.interpreter.executors import each_executor, in_both, launched, zeros

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

tl = triton.language
InterpreterError = pytest.importorskip("triton.runtime.errors").InterpreterError


@contextmanager
def no_hang(seconds: int = 30) -> Iterator[None]:
    """Fail where a program would wait for ever."""

    def give_up(number: int, frame: Any) -> None:
        raise TimeoutError("the program still waits")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@triton.jit
def chain_kernel(x, lock, total, arrivals):
    pid = tl.program_id(0)
    tl.atomic_add(arrivals, 1)
    tl.store(x + pid, tl.load(x + pid) + 1)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total) * 2 + pid)
    tl.atomic_xchg(lock, 0)


def test_a_lock_runs_serially_in_the_order_of_the_grid() -> None:
    """What the lock protects happens program by program; the launch and the process's list say why it was serial."""
    total = zeros(1)
    with no_hang(), interpreted() as session:
        chain_kernel[(6,)](zeros(6), zeros(1), total, zeros(1))
    want = 0
    for pid in range(6):
        want = want * 2 + pid
    assert total.item() == want
    (launch,) = session.launches
    assert (launch.executor, launch.grid) == ("serial", (6, 1, 1))
    line = chain_kernel.fn.__code__.co_firstlineno + 5
    assert launch.reason == f"the loop at {__file__}:{line} waits for what only another program of the launch can do"
    assert ("chain_kernel", launch.reason) in fallbacks()


def test_what_came_before_a_fallback_happens_once() -> None:
    """Stores and atomics of the batch that was given up are undone: counters and increments are those of one run."""
    x, arrivals = torch.arange(7, dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
    with no_hang(), interpreted() as session:
        chain_kernel[(7,)](x, zeros(1), zeros(1), arrivals)
    assert session.launches[0].executor == "serial"
    assert arrivals.item() == 107
    assert torch.equal(x, torch.arange(1, 8, dtype=torch.int32))


def test_findings_before_a_fallback_are_counted_once() -> None:
    """What the batch found before it was given up is forgotten; the serial run finds it again."""
    arrivals = zeros(1)
    with no_hang(), interpreted(findings="collect") as session:
        chain_kernel[(7,)](zeros(5), zeros(1), zeros(1), arrivals)
    assert session.launches[0].executor == "serial"
    assert [(finding.kind, finding.count) for finding in session.findings] == [
        ("out-of-bounds-load", 2),
        ("out-of-bounds-store", 2),
    ]


@triton.jit
def waiting_kernel(flag, out, WAITER: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(out + pid, pid + 1)
    if pid == WAITER:
        while tl.load(flag) == 0:
            pass
    else:
        tl.atomic_xchg(flag, 1)


@each_executor
def test_waiting_for_a_later_program_is_refused(executor: Any) -> None:
    """One after the other it would wait for ever: an error that says so, names the loop and the program."""
    text = r"WaitsForAnotherError: the loop at .*test_fallbacks\.py:\d+ waits for what only another program.*"
    with (
        no_hang(),
        pytest.raises(InterpreterError, match=text + r"kernel waiting_kernel, program \(0, 0, 0\) of \(3, 1, 1\)"),
        interpreted(executor=executor, findings="collect"),
    ):
        waiting_kernel[(3,)](zeros(1), zeros(3), WAITER=0)


@triton.jit
def endless_kernel(out, n):
    at = 0
    while at < n:
        at = at * 2
    tl.store(out + tl.program_id(0), at)


@each_executor
@pytest.mark.parametrize("grid", [1, 3])
def test_a_loop_in_which_nothing_changes_never_ends(executor: Any, grid: int) -> None:
    """It waits for no other program: it reads nothing that one could change, or there is none."""
    text = r"EndlessLoopError: the loop at .*test_fallbacks\.py:\d+ never ends: nothing in it changes"
    with (
        no_hang(),
        pytest.raises(InterpreterError, match=text) as caught,
        interpreted(executor=executor, findings="collect"),
    ):
        endless_kernel[(grid,)](zeros(grid), 2)
    assert likely_cause(error_verdict(Outcome(error=caught.value))) == "hang"
    with no_hang(), pytest.raises(InterpreterError, match=text), interpreted(executor=executor, findings="collect"):
        waiting_kernel[(1,)](zeros(1), zeros(1), WAITER=0)


@triton.jit
def counting_kernel(out, n):
    total = 0
    for i in range(n):
        total += i
    tl.store(out, total)


@each_executor
def test_a_loop_of_a_million_turns_and_more_never_ends(executor: Any) -> None:
    """Bytes that no tensor owns, read as a length, are known before the first turn."""
    text = r"EndlessLoopError: a loop never ends: its bounds give it 2,139,062,143 turns"
    with (
        no_hang(),
        pytest.raises(InterpreterError, match=text) as caught,
        interpreted(executor=executor, findings="collect"),
    ):
        counting_kernel[(1,)](zeros(1), 0x7F7F7F7F)
    verdict = error_verdict(Outcome(error=caught.value))
    assert likely_cause(verdict) == "hang"
    assert "rejects=" not in verdict.reason
    out = zeros(1)
    with no_hang(), interpreted(executor=executor, findings="collect"):
        counting_kernel[(1,)](out, 100)
    assert out.tolist() == [4950]


@each_executor
def test_waiting_for_an_earlier_program_is_over_at_once(executor: Any) -> None:
    """The last program finds the flag set by those before it."""
    out = zeros(3)
    with no_hang(), interpreted(executor=executor, findings="collect"):
        waiting_kernel[(3,)](zeros(1), out, WAITER=2)
    assert out.tolist() == [1, 2, 3]


@triton.jit
def break_kernel(out, WHERE: tl.constexpr):
    pid = tl.program_id(0)
    count = 0
    for i in range(6):
        if i == (pid if WHERE == "divergent" else 3):
            break
        count += 10
    tl.store(out + pid, count)


@pytest.mark.parametrize(("where", "executor"), [("divergent", "serial"), ("uniform", "batched")])
def test_break_in_a_divergent_branch_falls_back(where: str, executor: str) -> None:
    """Programs that break at different turns run alone; where all do so together the batch goes on."""
    session, (out,) = in_both(lambda: [launched(break_kernel, 5, where)])
    assert out.tolist() == ([0, 10, 20, 30, 40] if where == "divergent" else [30] * 5)
    (launch,) = session.launches
    line = break_kernel.fn.__code__.co_firstlineno + 6
    reason = f"`break` at {__file__}:{line} in a branch that only some programs take" if where == "divergent" else ""
    assert (launch.executor, launch.reason) == (executor, reason)


SOURCELESS = """
@triton.jit
def sourceless_kernel(out):
    pid = tl.program_id(0)
    total = 0
    for i in range(pid):
        total += i
    if pid == 1:
        tl.store(out + pid, 100)
    else:
        tl.store(out + pid, total)

@triton.jit
def sourceless_function(value):
    return value * 3
"""
made: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "made"}
exec(compile(SOURCELESS, "<made>", "exec"), made)  # noqa: S102
sourceless_function = made["sourceless_function"]


@triton.jit
def calling_kernel(out):
    tl.store(out + tl.program_id(0), sourceless_function(tl.program_id(0)))


@pytest.mark.parametrize(
    ("kernel", "name", "want"),
    [
        (made["sourceless_kernel"], "sourceless_kernel", [0, 100, 1, 3]),
        (calling_kernel, "sourceless_function", [0, 3, 6, 9]),
    ],
    ids=["kernel", "function"],
)
def test_a_kernel_without_source_runs_serially(kernel: Any, name: str, want: list[int]) -> None:
    """Branches of what was made by exec() cannot be followed for many programs at once; alone they are Python's own."""
    session, (out,) = in_both(lambda: [launched(kernel, 4)])
    assert out.tolist() == want
    assert [(launch.executor, launch.reason) for launch in session.launches] == [
        ("serial", f"the source of {name} cannot be found, so its branches cannot be followed program by program")
    ]


@triton.jit
def outside_kernel(x, out):
    pid = tl.program_id(0)
    tl.store(out + pid, tl.load(x + pid))


def test_too_many_programs_one_by_one_are_refused() -> None:
    """most_alone refuses before the serial run, with memory as it was; what runs as a batch it lets pass."""
    arrivals, out = zeros(1), zeros(5)
    with no_hang(), most_alone(4), interpreted() as session:
        with pytest.raises(TooManyProgramsError, match=r"chain_kernel launches 5 programs.*most 4 \(the loop at .*\)"):
            chain_kernel[(5,)](out, zeros(1), zeros(1), arrivals)
        assert (arrivals.item(), out.tolist()) == (0, [0] * 5)
        chain_kernel[(4,)](out, zeros(1), zeros(1), arrivals)
        outside_kernel[(300,)](zeros(300), zeros(300))
    assert arrivals.item() == 4
    assert [launch.executor for launch in session.launches] == ["serial", "batched"]
