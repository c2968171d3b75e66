"""Runs work in a forked child, so that a crash, an exit or an endless loop is a result and not the end of the run.

A fork costs about 4 ms and inherits everything: closures, imported kernels, fixtures. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeVar

from pytest_fusion.run.process.forked_child import HEADER, NOTE, Channel, ChildError, live
from pytest_fusion.spec.wording import out_of_memory

__all__ = ["Channel", "ChildError", "Crash", "can_fork", "cuda_is_poisoned", "run_isolated", "unwrap"]

T = TypeVar("T")

# After the time limit the child gets this long to write down where it hangs (faulthandler, on SIGABRT) before SIGKILL.
_LAST_WORDS_S: Final = 1.0

# The key of a note that says which kernel is being compiled, and how long that may take.
COMPILING: Final = "compiling"
_COMPILING_S: Final = 300.0

# A child that has worked for this share of its limit has used it up; one that waited for so many limits is stuck.
_BUSY: Final = 0.8
_STUCK: Final = 4.0

# How often a silent child is looked at. Its end is normally seen at once, as the end of the pipe; a grandchild that
# holds the pipe open hides it.
_POLL_S: Final = 0.05

# Two forks at once can lock each other out in the fork handlers of logging and of BLAS libraries (seen once in some
# hundred runs of four threads).
_FORKING: Final = threading.Lock()

_STDERR_TAIL_BYTES: Final = 8 * 1024
# faulthandler's first words, and how far from the end they are looked for: 100 frames of 300 characters.
_FAULT: Final = b"Fatal Python error: "
_FAULT_BYTES: Final = 32 * 1024
_FORWARDED_BYTES: Final = 1024 * 1024
_READ_BYTES: Final = 1024 * 1024

# Signals that Python turns into exceptions: Ctrl-C, and the timer of a timeout plugin.
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGALRM) if hasattr(signal, "SIGALRM") else ()


@dataclass(frozen=True, slots=True)
class Crash:
    """The child ended without an answer.

    ``kind`` is ``"signal"`` (``detail`` its name, ``"SIGSEGV"``), ``"exit"`` (``detail`` says with which code it left)
    or ``"timeout"`` (``detail`` gives the limit). ``last_note`` is what it last said it was doing, ``None`` before the
    first note; ``stderr_tail`` is the beginning of Python's stack, most recent call first, where the interpreter could
    still write it, else the end of its stderr.
    """

    kind: Literal["signal", "exit", "timeout"]
    detail: str
    last_note: Any
    stderr_tail: str


def can_fork() -> str | None:
    """Why work must not be forked off this process, or ``None``; imports no torch and starts no CUDA."""
    if not hasattr(os, "fork"):
        return f"this platform ({sys.platform}) has no fork"
    if sys.platform == "darwin":
        return "macOS frameworks abort in a child forked from a process with threads (bpo-33725)"
    torch = sys.modules.get("torch")
    for backend in ("cuda", "xpu"):
        started = getattr(getattr(torch, backend, None), "is_initialized", None)
        if started is not None and started():
            return f"{backend.upper()} is initialised in this process, and does not work in a forked child"
    if any(name.startswith("pt_autograd") for name in _thread_names()):
        return "autograd has started device threads in this process, and refuses to run backward in a forked child"
    return None


def run_isolated(
    work: Callable[[Channel], T], *, time_limit_s: float | None, forward: bool = True
) -> T | Crash | ChildError:
    """``work`` in a forked child: its result, the exception it raised as ``ChildError``, or how it died as ``Crash``.

    ``work`` calls ``Channel.note`` before each step; ``time_limit_s`` is per step. The result must pickle; keep it to
    plain types. What the child printed is written to this process's ``sys.stdout`` and ``sys.stderr`` once it ended, so
    that whatever captures them, by descriptor or by replacing the objects, has it; all but the stack of a crash, which
    is for the report to tell once. ``forward=False`` drops it all. When anything is raised here
    (``KeyboardInterrupt``, a timeout plugin's exception), the child and what it started are killed first.

    Raises ``OSError`` when there is no process or memory for a child.
    """
    _flush()
    with _scratch_file() as out, _scratch_file() as err:
        reader, writer = os.pipe()
        try:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            try:
                # Ctrl-C between the fork and the try below would leave a child that nobody waits for. Blocking delivers
                # one that is pending, so it stands where the mask is restored.
                signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
                pid = _fork(work, writer, reader, out, err, mask)
                child = _Child(pid, reader, time_limit_s)
            except BaseException:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                raise
            finally:
                os.close(writer)
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                child.listen()
            finally:
                child.bury()
                if forward:
                    _forward(out, sys.stdout, out.seek(0, os.SEEK_END))
                    _forward(err, sys.stderr, _fault(err))
        finally:
            os.close(reader)
        return child.outcome(_tail(err))  # type: ignore[no-any-return]


def unwrap(outcome: T | Crash | ChildError) -> T | Crash:
    """``outcome`` itself, unless it is the child's exception, which is raised."""
    if isinstance(outcome, ChildError):
        outcome.reraise()
    return outcome


def cuda_is_poisoned() -> bool:
    """Whether this process's CUDA context is lost, so that nothing that runs on it from now on means anything.

    An illegal access or a device assert stays: every later call fails. Errors of one launch (too much shared memory, an
    invalid configuration) surface once and are gone, so the probe is made twice and the second answer counts. Out of
    memory is not poison. ``False`` where CUDA was never started.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    failed = False
    for _ in range(2):
        failed = False
        try:
            torch.cuda.synchronize()
            torch.ones(1, device="cuda").item()
        except RuntimeError as error:
            failed = not out_of_memory(error)
    return failed


class _Child:
    """The parent's side of one forked child."""

    def __init__(self, pid: int, reader: int, time_limit_s: float | None) -> None:
        self._pid = pid
        self._reader = reader
        self._limit = time_limit_s
        self._received = bytearray()
        self._note: Any = None
        self._answered = False
        self._timed_out = False
        self._status: int | None = None
        os.set_blocking(reader, False)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the child does the same, but may not have come to it when it must be killed

    def listen(self) -> None:
        """Read until the child has answered, is gone, or has used up its time."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        heard, worked = time.monotonic(), self._worked_s()
        while not self._answered:
            wait = _POLL_S if self._limit is None else min(_POLL_S, heard + self._limit - time.monotonic())
            if wait <= 0 and self._is_late(time.monotonic() - heard, self._worked_s() - worked):
                self._timed_out = True
                return
            wait = wait if wait > 0 else _POLL_S
            # Rounded up: poll takes whole milliseconds, and 0.4 of one would be none at all.
            if poll.poll(int(wait * 1000) + 1):
                size = self._receive()
                if size == 0:
                    self._wait(_LAST_WORDS_S)
                    return
                heard, worked = time.monotonic(), self._worked_s()
            elif self._reap():
                self._receive()
                return

    def _is_late(self, waited_s: float, worked_s: float) -> bool:
        """Whether the limit is used up: by work, not by waiting for a core; one that waits long is stuck all the same.

        To compile a row of 2^17 elements takes a minute on a busy machine, which is no fault of the kernel's.
        """
        assert self._limit is not None
        if isinstance(self._note, dict) and self._note.get(COMPILING):
            return waited_s >= max(_COMPILING_S, self._limit)
        return worked_s >= _BUSY * self._limit or waited_s >= _STUCK * self._limit

    def _worked_s(self) -> float:
        """Seconds of a core that the child has used, where the system tells; else more than any limit."""
        try:
            # The name may hold blanks and brackets; after the last bracket, utime and stime are the 12th and 13th word.
            words = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
            return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return time.monotonic()

    def bury(self) -> None:
        """Leave no process behind, and none that the child started in its group."""
        if self._timed_out:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGABRT)
            self._wait(_LAST_WORDS_S)
        if self._answered:
            self._wait(_LAST_WORDS_S)
        for kill in (os.killpg, os.kill):
            # A pid that was waited for may be another process's by now; as a group's number it stays taken while
            # the group has members.
            if kill is os.killpg or self._status is None:
                with contextlib.suppress(OSError):
                    kill(self._pid, signal.SIGKILL)
        self._reap(block=True)

    def outcome(self, stderr_tail: str) -> Any:
        """What became of it, once buried."""
        if self._answered:
            return pickle.loads(memoryview(self._received)[HEADER.size :])
        if self._timed_out:
            return Crash("timeout", f"no end after {self._limit:g} s", self._note, stderr_tail)
        status = self._status or 0
        if os.WIFSIGNALED(status):
            return Crash("signal", _signal_name(os.WTERMSIG(status)), self._note, stderr_tail)
        return Crash("exit", f"exit code {os.WEXITSTATUS(status)}", self._note, stderr_tail)

    def _receive(self) -> int | None:
        """Take in what there is: the number of bytes, 0 at the end of the pipe, ``None`` when nothing was waiting."""
        total: int | None = None
        while True:
            try:
                part = os.read(self._reader, _READ_BYTES)
            except BlockingIOError:
                return total
            self._received += part
            total = (total or 0) + len(part)
            self._digest()
            if not part or self._answered:
                return total

    def _digest(self) -> None:
        while len(self._received) >= HEADER.size:
            kind, size = HEADER.unpack_from(self._received)
            end = HEADER.size + size
            if len(self._received) < end:
                return
            if kind != NOTE:
                self._answered = True
                return
            self._note = json.loads(self._received[HEADER.size : end])
            del self._received[:end]

    def _reap(self, *, block: bool = False) -> bool:
        if self._status is None:
            try:
                pid, status = os.waitpid(self._pid, 0 if block else os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored in this process: the kernel has kept no status
                pid, status = self._pid, 0
            if pid:
                self._status = status
        return self._status is not None

    def _wait(self, seconds: float) -> None:
        pause, end = 0.0002, time.monotonic() + seconds
        while not self._reap() and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.01)


def _fork(
    work: Callable[[Channel], object], writer: int, reader: int, out: IO[bytes], err: IO[bytes], mask: set[Any]
) -> int:
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of forking with threads, after the fork: made an error, it would be raised in the parent
        # while the child runs on.
        warnings.simplefilter("ignore")
        with _FORKING:
            pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        live(work, writer, out.fileno(), err.fileno(), parent)
    return pid


def _thread_names() -> list[str]:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names.append(path.read_text())
    return names


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _scratch_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # forbidden in some containers
            return os.fdopen(os.memfd_create("pytest-fusion"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _flush() -> None:
    """What is buffered now would otherwise be written twice, by the parent and by the child."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def _forward(file: IO[bytes], stream: Any, size: int) -> None:
    """Write the first ``size`` bytes of ``file``, or what of them is bearable, to ``stream``."""
    if size and stream is not None:
        file.seek(0)
        text = file.read(min(size, _FORWARDED_BYTES)).decode("utf-8", "replace")
        if size > _FORWARDED_BYTES:
            text += f"\n[{size - _FORWARDED_BYTES} more bytes of output left out]\n"
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)


def _fault(file: IO[bytes]) -> int:
    """Where the stack that faulthandler wrote last begins; the end of the file where there is none."""
    size = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, size - _FAULT_BYTES))
    found = file.read().rfind(_FAULT)
    return size if found < 0 else start + found


def _tail(file: IO[bytes]) -> str:
    size, fault = file.seek(0, os.SEEK_END), _fault(file)
    file.seek(fault if fault < size else max(0, size - _STDERR_TAIL_BYTES))
    return file.read(_STDERR_TAIL_BYTES).decode("utf-8", "replace")
