"""What is left of a child when it, its parent or a test ends: nothing."""

from __future__ import annotations

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

from pytest_fusion.run.process import fork
from pytest_fusion.run.process.fork import COMPILING, Channel, Crash, run_isolated
from tests.forked import run_pytest
from tests.run.process.children import LINUX, alive
from tests.run.process.waiting import eventually
from tests.sweeps import sweep

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="isolation forks")


def test_exit_handlers_are_the_parents(tmp_path: Path) -> None:
    """The child runs neither atexit handlers nor the finally blocks around the call."""
    program = f"""
import atexit, sys
from pytest_fusion.run.process.fork import run_isolated
atexit.register(lambda: open({str(tmp_path / "log")!r}, "a").write("exit\\n"))
try:
    run_isolated(lambda channel: sys.exit(1), time_limit_s=30)
finally:
    open({str(tmp_path / "log")!r}, "a").write("finally\\n")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])

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
        # To this thread, which blocks it around the fork; a timer's signal may go to another one of an xdist worker.
        here = threading.get_ident()
        threading.Timer(delay, lambda: signal.pthread_kill(here, signal.SIGALRM)).start()
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

    monkeypatch.setattr(fork._Child, "listen", interrupted)
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
from pytest_fusion.run.process.fork import run_isolated
def work(channel):
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
    time.sleep(600)
run_isolated(work, time_limit_s=None)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[3])
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


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_nothing_is_left_behind() -> None:
    """A thousand children leave no descriptor open, no process unburied and no memory taken."""
    # In a process of its own: a fork of one that has torch loaded takes ten times as long.
    program = """
import os
from pytest_fusion.run.process.fork import Crash, run_isolated

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
        [sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3], capture_output=True, text=True
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
    from pytest_fusion.run.process.fork import Crash, run_isolated

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


@sweep("options", [(), ("-s",), ("--capture=sys",), ("-n", "2")], ids=" ".join)
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


@pytest.mark.slow
def test_a_child_that_waits_gets_more_time_than_one_that_works() -> None:
    """The limit counts work: one that slept for twice as long comes to its end, one that never ends is stopped."""
    assert run_isolated(lambda channel: time.sleep(0.8) or 3, time_limit_s=0.4) == 3
    crash = run_isolated(lambda channel: time.sleep(60), time_limit_s=0.2)
    assert isinstance(crash, Crash)
    assert crash.kind == "timeout"


@pytest.mark.slow
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


def test_a_child_that_is_late_may_get_more_time(tmp_path: Path) -> None:
    """It runs on while its last note is looked at, and ends with its result."""
    looked = tmp_path / "looked"
    seen: list[Any] = []

    def work(channel: Channel) -> int:
        channel.note({"case": 3})
        eventually(looked.exists)
        return 7

    def late(note: Any) -> float | None:
        seen.append(note)
        looked.touch()
        return 60.0

    assert run_isolated(work, time_limit_s=0.01, on_late=late) == 7
    assert seen == [{"case": 3}]


def test_a_late_child_is_ended_if_it_still_is_silent(tmp_path: Path) -> None:
    """One that went on while it was looked at is none that hangs."""
    looked, further = tmp_path / "looked", tmp_path / "further"

    def silent(channel: Channel) -> None:
        eventually(further.exists)

    def goes_on(channel: Channel) -> int:
        eventually(looked.exists)
        channel.note({"case": 4})
        further.touch()
        return 7

    def late(note: Any) -> None:
        looked.touch()
        eventually(further.exists)

    ended = run_isolated(silent, time_limit_s=0.01, on_late=lambda note: None)
    assert isinstance(ended, Crash)
    assert ended.kind == "timeout"
    assert run_isolated(goes_on, time_limit_s=0.01, on_late=late) == 7
