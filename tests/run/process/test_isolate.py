"""Isolation: every way in which a child can end is a result, and the parent is as it was."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import pytest

from pytest_fusion.errors import FusionFailure
from pytest_fusion.run.process.fork import Channel, ChildError, Crash, run_isolated, unwrap
from tests.run.process.children import forever, segfault

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="isolation forks")


def test_result_comes_back() -> None:
    """What ``work`` returns arrives as it was, and the parent's own state is not touched."""
    box: list[int] = []

    def work(channel: Channel) -> dict[str, Any]:
        box.append(1)
        channel.note([1, "two"])
        return {"a": (1, 2.5, None), "b": b"\0" * 10}

    assert run_isolated(work, time_limit_s=30) == {"a": (1, 2.5, None), "b": b"\0" * 10}
    assert box == []


def test_big_result() -> None:
    """A result of 50 MB comes through the pipe whole, though sending it outlasts the time limit of a step."""
    result = run_isolated(lambda channel: bytes(50_000_000), time_limit_s=30)

    assert result == bytes(50_000_000)


def test_segmentation_fault() -> None:
    """An illegal access is a crash with the signal's name, the last note and Python's stack."""
    crash = run_isolated(segfault, time_limit_s=30)

    assert isinstance(crash, Crash)
    assert (crash.kind, crash.detail, crash.last_note) == ("signal", "SIGSEGV", {"case": 3})
    assert "in segfault" in crash.stderr_tail


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGTERM])
def test_other_signals(number: signal.Signals) -> None:
    """Any deadly signal is named."""
    crash = run_isolated(lambda channel: os.kill(os.getpid(), number), time_limit_s=30)

    assert isinstance(crash, Crash)
    assert (crash.kind, crash.detail, crash.last_note) == ("signal", number.name, None)


def test_exit_without_an_answer() -> None:
    """A child that leaves by itself is a crash with its exit code, not a result."""
    for code in (0, 3):
        crash = run_isolated(lambda channel, code=code: os._exit(code), time_limit_s=30)
        assert crash == Crash("exit", f"exit code {code}", None, "")


def test_endless_loop() -> None:
    """A step that runs past the limit is killed; the stack says where it was."""
    crash = run_isolated(forever, time_limit_s=0.2)

    assert isinstance(crash, Crash)
    assert (crash.kind, crash.last_note) == ("timeout", {"case": 7})
    assert "0.2 s" in crash.detail
    assert "in forever" in crash.stderr_tail


def test_loop_that_ignores_signals() -> None:
    """A child that blocks every signal that can be blocked is killed all the same."""

    def stubborn(channel: Channel) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(600)

    crash = run_isolated(stubborn, time_limit_s=0.1)

    assert isinstance(crash, Crash)
    assert crash.kind == "timeout"


@pytest.mark.slow
def test_notes_renew_the_time() -> None:
    """The limit is per note: many short steps may together take longer than one."""

    def work(channel: Channel) -> int:
        for i in range(8):
            channel.note(i)
            time.sleep(0.15)
        return 8

    assert run_isolated(work, time_limit_s=0.9) == 8


def test_exceptions_come_back() -> None:
    """An exception of ``work`` is a record, and raised again it has its type, its attributes and the child's stack."""

    def work(channel: Channel) -> None:
        raise FusionFailure("wrong", check="values", case={"rows": 3})

    outcome = run_isolated(work, time_limit_s=30)

    assert isinstance(outcome, ChildError)
    assert (outcome.type_name, outcome.message) == ("FusionFailure", "wrong")
    with pytest.raises(FusionFailure, match="wrong") as caught:
        unwrap(outcome)
    assert (caught.value.check, caught.value.case) == ("values", {"rows": 3})
    assert "in work" in str(caught.value.__cause__)


class Picky(Exception):
    """Cannot be loaded the ordinary way: its arguments are not its ``args``."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.two = two


def test_exceptions_with_arguments_of_their_own() -> None:
    """An exception whose ``__init__`` wants other arguments than ``args`` is rebuilt without it."""

    def work(channel: Channel) -> None:
        raise Picky(1, 2)

    with pytest.raises(Picky, match="1 and 2") as caught:
        unwrap(run_isolated(work, time_limit_s=30))
    assert caught.value.two == 2


def test_exceptions_that_cannot_travel() -> None:
    """A local exception type comes back as a RuntimeError that names it."""

    class Local(Exception):
        pass

    def work(channel: Channel) -> None:
        raise Local("here")

    with pytest.raises(RuntimeError, match="Local: here"):
        unwrap(run_isolated(work, time_limit_s=30))


@pytest.mark.parametrize("error", [SystemExit(4), KeyboardInterrupt("stop"), pytest.skip.Exception("no")])
def test_exceptions_that_are_no_errors(error: BaseException) -> None:
    """SystemExit, KeyboardInterrupt and pytest's outcomes in the child are reported, not obeyed."""

    def work(channel: Channel) -> None:
        raise error

    outcome = run_isolated(work, time_limit_s=30)

    assert isinstance(outcome, ChildError)
    with pytest.raises(type(error)):
        unwrap(outcome)


def test_result_that_cannot_travel() -> None:
    """A result that does not pickle is the child's error, and says so."""
    outcome = run_isolated(lambda channel: threading.Lock(), time_limit_s=30)

    assert isinstance(outcome, ChildError)
    assert "pickle" in outcome.message


def test_note_that_is_not_json() -> None:
    """A note must be JSON."""
    outcome = run_isolated(lambda channel: channel.note(object()), time_limit_s=30)

    assert isinstance(outcome, ChildError)
    assert outcome.type_name == "TypeError"


def test_unwrap_leaves_results_and_crashes() -> None:
    """Only exceptions are raised."""
    crash = Crash("exit", "exit code 1", None, "")

    assert unwrap(crash) is crash
    assert unwrap(5) == 5


def test_output_reaches_replaced_streams(capsys: pytest.CaptureFixture[str]) -> None:
    """Under capture by replaced objects, what the child prints, and its C code writes, is there, once."""
    print("before")

    def work(channel: Channel) -> None:
        print("child")
        print("warning", file=sys.stderr)
        os.write(1, b"from C\n")

    run_isolated(work, time_limit_s=30)
    print("after")

    out, err = capsys.readouterr()
    assert (out, err) == ("before\nchild\nfrom C\nafter\n", "warning\n")


def test_output_reaches_descriptors(capfd: pytest.CaptureFixture[str]) -> None:
    """Under capture by descriptor, it is there too, in order and once."""
    print("before")
    run_isolated(lambda channel: print("child"), time_limit_s=30)
    print("after")

    assert capfd.readouterr().out == "before\nchild\nafter\n"


def test_output_of_a_crash_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """What was printed before a crash is not lost."""

    def work(channel: Channel) -> None:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)

    run_isolated(work, time_limit_s=30)

    assert "last words" in capfd.readouterr().out


def test_endless_output_is_cut(capfd: pytest.CaptureFixture[str]) -> None:
    """Of megabytes of output only the first is passed on, and the tail of stderr stays short."""

    def work(channel: Channel) -> None:
        for _ in range(3000):
            os.write(2, b"x" * 1023 + b"\n")
        os._exit(1)

    crash = run_isolated(work, time_limit_s=30)

    assert "bytes of output left out" in capfd.readouterr().err[-200:]
    assert isinstance(crash, Crash)
    assert 0 < len(crash.stderr_tail) <= 8192
