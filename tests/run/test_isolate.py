"""Isolation: every way in which a child can end is a result, and the parent is as it was."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.errors import FusionFailure
from pytest_fusion.run import isolate
from pytest_fusion.run.isolate import COMPILING, Channel, ChildError, Crash, run_isolated, unwrap
from tests.forked import run_pytest
from tests.run.waiting import eventually

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="isolation forks")

LINUX = sys.platform.startswith("linux")


def forever(channel: Channel) -> None:
    channel.note({"case": 7})
    while True:
        pass


def segfault(channel: Channel) -> None:
    channel.note({"case": 3})
    ctypes.string_at(0)


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie that init has not collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


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


def test_exit_handlers_are_the_parents(tmp_path: Path) -> None:
    """The child runs neither atexit handlers nor the finally blocks around the call."""
    program = f"""
import atexit, sys
from pytest_fusion.run.isolate import run_isolated
atexit.register(lambda: open({str(tmp_path / "log")!r}, "a").write("exit\\n"))
try:
    run_isolated(lambda channel: sys.exit(1), time_limit_s=30)
finally:
    open({str(tmp_path / "log")!r}, "a").write("finally\\n")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])

    assert (tmp_path / "log").read_text() == "finally\nexit\n"


@pytest.mark.skipif(not LINUX, reason="reads /proc")
@pytest.mark.slow  # aims at microseconds; an interrupt that lands in a callback of the garbage collector is lost
def test_interrupts_at_any_moment(tmp_path: Path) -> None:
    """Whenever Ctrl-C arrives, the child is gone when the KeyboardInterrupt is, and signals are delivered as before."""
    file = tmp_path / "pid"

    def work(channel: Channel) -> None:
        with file.open("a") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(20)  # an interrupt that is lost fails the test and does not stall the run

    def interrupted(delay: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, delay)
        run_isolated(work, time_limit_s=None)

    usual = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for delay in (1e-6, 0.001, 0.003, 0.01, 0.02, 0.04, 0.08, 0.5):
            with pytest.raises(KeyboardInterrupt):
                interrupted(delay)
    finally:
        signal.signal(signal.SIGALRM, handler)

    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == usual
    assert not any(alive(int(pid)) for pid in file.read_text().split())


def test_keyboard_interrupt_kills_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C in the parent ends the child and goes on up."""
    file = tmp_path / "pid"

    def work(channel: Channel) -> None:
        file.write_text(str(os.getpid()))
        channel.note("started")
        time.sleep(600)

    def interrupted(child: Any) -> None:
        assert eventually(lambda: file.exists() and file.read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(isolate._Child, "listen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_isolated(work, time_limit_s=None)

    assert not alive(int(file.read_text()))


@pytest.mark.skipif(not LINUX, reason="reads /proc")
@pytest.mark.parametrize("ending", ["result", "timeout"])
def test_grandchildren_do_not_outlive_the_child(ending: str, tmp_path: Path) -> None:
    """Processes that the child started are killed with it, and do not delay its answer by holding the pipe."""
    file = tmp_path / "pid"

    def work(channel: Channel) -> str:
        if os.fork() == 0:
            time.sleep(600)
        grandchild = subprocess.Popen(["sleep", "600"])
        file.write_text(str(grandchild.pid))
        if ending == "timeout":
            time.sleep(600)
        return "done"

    outcome = run_isolated(work, time_limit_s=30 if ending == "result" else 0.5)

    assert outcome == "done" if ending == "result" else isinstance(outcome, Crash)
    assert eventually(lambda: not alive(int(file.read_text())))


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_crash_is_seen_although_a_grandchild_holds_the_pipe() -> None:
    """A child that dies while a process of its own keeps the pipe open is noticed without a time limit."""

    def work(channel: Channel) -> None:
        if os.fork() == 0:
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)

    crash = run_isolated(work, time_limit_s=None)

    assert isinstance(crash, Crash)
    assert crash.detail == "SIGKILL"


@pytest.mark.skipif(not LINUX, reason="prctl is Linux's")
def test_child_dies_with_the_parent(tmp_path: Path) -> None:
    """When the parent is killed, a hanging child does not stay behind."""
    program = f"""
import os, time
from pytest_fusion.run.isolate import run_isolated
def work(channel):
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
    time.sleep(600)
run_isolated(work, time_limit_s=None)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    file = tmp_path / "pid"
    assert eventually(lambda: file.exists() and file.read_text())
    parent.kill()
    parent.wait()

    assert eventually(lambda: not alive(int(file.read_text())))


def test_from_a_thread() -> None:
    """Isolation works in threads, several at a time."""
    results: dict[int, Any] = {}

    def run(i: int) -> None:
        results[i] = run_isolated(lambda channel: i * i, time_limit_s=60)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # catch_warnings inside run_isolated is not made for threads
        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert results == {i: i * i for i in range(4)}


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_nothing_is_left_behind() -> None:
    """A thousand children leave no descriptor open, no process unburied and no memory taken."""
    # In a process of its own: a fork of one that has torch loaded takes ten times as long.
    program = """
import os
from pytest_fusion.run.isolate import Crash, run_isolated

def facts():
    pages = int(open("/proc/self/statm").read().split()[1])
    return len(os.listdir("/proc/self/fd")), pages

for i in range(1000):
    if i == 100:
        before = facts()
    if i % 100 == 0:
        assert isinstance(run_isolated(lambda channel: os._exit(1), time_limit_s=30), Crash)
    else:
        assert run_isolated(lambda channel: i, time_limit_s=30) == i
after = facts()
assert after[0] == before[0], (before, after)
assert after[1] - before[1] < 256, (before, after)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("clean")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )

    assert done.stdout == "clean\n"


def test_torch_threads_do_not_hang_the_child() -> None:
    """After torch has used its thread pool, a child multiplies matrices and runs backward, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        a = torch.randn(600, 600, requires_grad=True)
        (a @ a).sum().backward()

        def work(channel: Channel) -> tuple[int, float]:
            b = torch.ones(600, 600, requires_grad=True)
            (b @ b).sum().backward()
            return torch.get_num_threads(), float(b.grad[0, 0])

        assert run_isolated(work, time_limit_s=60) == (1, 1200.0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


CRASHING_TESTS = """
    import ctypes, os, time
    import pytest
    from pytest_fusion.run.isolate import Crash, run_isolated

    @pytest.mark.parametrize("i", range(6))
    def test_it(i):
        def work(channel):
            channel.note(i)
            print("child", i)
            if i == 1:
                ctypes.string_at(0)
            if i == 3:
                os._exit(0)
            if i == 4:
                while True:
                    pass
            return i
        outcome = run_isolated(work, time_limit_s=1)
        assert not isinstance(outcome, Crash), outcome
"""


@pytest.mark.parametrize("options", [(), ("-s",), ("--capture=sys",), ("-n", "2")], ids=" ".join)
def test_under_pytest(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    """A test whose child crashes, leaves or hangs fails alone, with its note, and all others report."""
    pytester.makepyfile(CRASHING_TESTS)
    result = run_pytest(pytester, *options, "-p", "no:cacheprovider")

    result.assert_outcomes(passed=3, failed=3)
    text = result.stdout.str()
    assert "SIGSEGV" in text
    assert "kind='timeout'" in text
    assert "last_note=4" in text
    assert text.count("child 1\n") <= 2  # captured, and quoted in the report


def test_a_child_that_waits_gets_more_time_than_one_that_works() -> None:
    """The limit counts work: one that slept for twice as long comes to its end, one that never ends is stopped."""
    assert run_isolated(lambda channel: time.sleep(0.8) or 3, time_limit_s=0.4) == 3
    crash = run_isolated(lambda channel: time.sleep(60), time_limit_s=0.2)
    assert isinstance(crash, Crash)
    assert crash.kind == "timeout"


def test_compiling_is_no_hang() -> None:
    """While a kernel is being compiled, the limit of a case does not run; afterwards it does again."""

    def busy(channel: Channel, seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def work(channel: Channel) -> int:
        channel.note({"case": 1, COMPILING: "kernel"})
        busy(channel, 0.8)
        channel.note({"case": 1})
        busy(channel, 0.05)
        return 8

    def endless(channel: Channel) -> None:
        channel.note({"case": 1, COMPILING: "kernel"})
        channel.note({"case": 1})
        busy(channel, 60)

    assert run_isolated(work, time_limit_s=0.3) == 8
    crash = run_isolated(endless, time_limit_s=0.3)
    assert isinstance(crash, Crash)
    assert (crash.kind, crash.last_note) == ("timeout", {"case": 1})
