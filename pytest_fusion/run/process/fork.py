"""Runs work in a forked child, so that a crash, an exit or an endless loop is a result and does not end the run.

A fork costs about 4 ms and inherits everything: closures, imported kernels, fixtures. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeVar

from pytest_fusion.run.process.forked_child import NOTE, Channel, ChildError, live
from pytest_fusion.run.process.frames import FrameReader
from pytest_fusion.run.process.supervisor import (
    COMPILING,
    TimeLimit,
    fault_position,
    kill_group,
    last_output,
    signal_name,
)
from pytest_fusion.spec.wording import out_of_memory

__all__ = ["COMPILING", "Channel", "ChildError", "Crash", "can_fork", "cuda_is_poisoned", "run_isolated", "unwrap"]

T = TypeVar("T")
OnNote = Callable[[Any], None]
OnLate = Callable[[Any], float | None]

# Seconds for the child, after its time limit, to write its stack (faulthandler, on SIGABRT) before SIGKILL.
_LAST_WORDS_S: Final = 1.0

# Two forks at once can deadlock in the fork handlers of logging and of BLAS (seen once in some hundred runs of four
# threads).
_FORKING: Final = threading.Lock()

_FORWARDED_BYTES: Final = 1024 * 1024

# Signals that Python turns into exceptions: Ctrl-C, and the timer of a timeout plugin.
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGALRM) if hasattr(signal, "SIGALRM") else ()


@dataclass(frozen=True, slots=True)
class Crash:
    """The child ended without an answer, by ``kind``: ``"signal"`` (``detail``: its name, ``"SIGSEGV"``), ``"exit"``
    (its code) or ``"timeout"`` (the limit). ``last_note``: the child's last, or ``None``. ``stderr_tail``: the
    beginning of Python's stack, most recent call first, if faulthandler wrote it, else the end of stderr. ``code``: the
    exit status, negative for a signal."""

    kind: Literal["signal", "exit", "timeout"]
    detail: str
    last_note: Any
    stderr_tail: str
    code: int = field(default=0, compare=False, repr=False)


def can_fork() -> str | None:
    """Why this process must not fork, or ``None``; imports no torch and starts no CUDA."""
    if not hasattr(os, "fork"):
        return f"this platform ({sys.platform}) has no fork"
    if sys.platform == "darwin":
        return "macOS frameworks abort in a child forked from a process with threads (bpo-33725)"
    torch = sys.modules.get("torch")
    for backend in ("cuda", "xpu"):
        module = getattr(torch, backend, None)
        # While torch initialises a backend it queries device properties; under compute-sanitizer a child forked then
        # hangs.
        starting = hasattr(getattr(module, "_tls", None), "is_initializing")
        started = getattr(module, "is_initialized", None)
        if starting or (started is not None and started()):
            return f"{backend.upper()} is initialised in this process, and does not work in a forked child"
    if any(name.startswith("pt_autograd") for name in _thread_names()):
        return "autograd has started device threads in this process, and refuses to run backward in a forked child"
    return None


def run_isolated(
    work: Callable[[Channel], T],
    *,
    time_limit_s: float | None,
    wall_clock: bool = False,
    forward: bool = True,
    on_note: OnNote | None = None,
    on_late: OnLate = lambda _: None,
) -> T | Crash | ChildError:
    """The result of ``work`` in a forked child, its exception as ``ChildError``, or the child's end as ``Crash``.

    ``work`` calls ``Channel.note`` before each step, and ``on_note`` is called here with each note. ``time_limit_s`` is
    per step; it counts work, and with ``wall_clock`` waiting too. Where it is used up ``on_late`` is called with the
    last note, while the child runs on, and returns another limit, or ``None`` to end a child that still is silent. The
    result must pickle; keep it to plain types. What the child printed is written to this process's ``sys.stdout`` and
    ``sys.stderr`` once it ended, so that whatever captures them, by descriptor or by replacing the objects, has it; all
    but the stack of a crash, which is in the report. ``forward=False`` drops it all. When anything is raised here
    (``KeyboardInterrupt``, a timeout plugin's exception), the child and what it started are killed first.

    Raises ``OSError`` when there is no process or memory for a child.
    """
    _flush()
    with _scratch_file() as out, _scratch_file() as err:
        reader, writer = os.pipe()
        try:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            try:
                # Ctrl-C between the fork and the try below would leave an unsupervised child. Blocking delivers a
                # pending signal, so it is inside the try that restores the mask.
                signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
                pid = _fork(work, writer, reader, out, err, mask)
                child = _Child(pid, reader, TimeLimit(pid, time_limit_s, wall_clock=wall_clock), on_note, on_late)
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
                    _forward(err, sys.stderr, fault_position(err))
        finally:
            os.close(reader)
        return child.outcome(last_output(err))  # type: ignore[no-any-return]


def unwrap(outcome: T | Crash | ChildError) -> T | Crash:
    """Return ``outcome``, or raise the child's exception."""
    if isinstance(outcome, ChildError):
        outcome.reraise()
    return outcome


def cuda_is_poisoned() -> bool:
    """Whether this process's CUDA context is lost, so that no later result is valid; ``False`` before CUDA starts.
    After an illegal access or a device assert every later call fails. Errors of one launch (too much shared memory, an
    invalid configuration) surface once, so the second of two probes counts. Out of memory is no loss."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    for _ in range(2):
        try:
            torch.cuda.synchronize()
            torch.ones(1, device="cuda").item()
            failed = False
        except RuntimeError as error:
            failed = not out_of_memory(error)
    return failed


class _Child:
    """The parent's side of one forked child."""

    def __init__(self, pid: int, reader: int, limit: TimeLimit, on_note: OnNote | None, on_late: OnLate) -> None:
        self._pid = pid
        self._frames = FrameReader(reader)
        self._limit = limit
        self._on_note, self._on_late = on_note, on_late
        self._note: Any = None
        self._answer: bytearray | None = None
        self._timed_out = False
        self._status: int | None = None
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the child does the same, but may be killed before it does

    def listen(self) -> None:
        """Read until the child has answered, is gone, or has used up its time."""
        while self._answer is None:
            if self._limit.passed(compiling=isinstance(self._note, dict) and bool(self._note.get(COMPILING))):
                more = self._on_late(self._note)
                if more is not None:
                    self._limit.seconds = more
                elif self._frames.wait(0) is None:
                    self._timed_out = True
                    return
                else:
                    self._limit.renew()
                    self._take_frames()
            size = self._frames.wait(self._limit.pause())
            if size:
                self._limit.renew()
                self._take_frames()
            elif size == 0:
                self._wait(_LAST_WORDS_S)
                return
            elif self._reap():
                while self._frames.wait(0):
                    self._take_frames()
                return

    def _take_frames(self) -> None:
        while self._answer is None and (frame := self._frames.next()) is not None:
            kind, payload = frame
            if kind != NOTE:
                self._answer = payload
                return
            self._note = json.loads(payload)
            if self._on_note is not None:
                self._on_note(self._note)

    def bury(self) -> None:
        """End the child and all processes in its group."""
        if self._timed_out:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGABRT)
        if self._timed_out or self._answer is not None:
            self._wait(_LAST_WORDS_S)
        kill_group(self._pid)
        # After a wait the pid may be another process's; as a group's number it stays taken while the group has members.
        if self._status is None:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
        self._reap(block=True)

    def outcome(self, stderr_tail: str) -> Any:
        """The outcome, after `bury`."""
        if self._answer is not None:
            return pickle.loads(self._answer)
        code = os.waitstatus_to_exitcode(self._status or 0)
        if self._timed_out:
            return Crash("timeout", f"no end after {self._limit.seconds:g} s", self._note, stderr_tail, code)
        if code < 0:
            return Crash("signal", signal_name(-code), self._note, stderr_tail, code)
        return Crash("exit", f"exit code {code}", self._note, stderr_tail, code)

    def _reap(self, *, block: bool = False) -> bool:
        if self._status is None:
            try:
                pid, status = os.waitpid(self._pid, 0 if block else os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored in this process: the kernel has no status
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
        # Python 3.12 warns after a fork with threads: as an error it would be raised in the parent, while the child
        # runs.
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


def _scratch_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # forbidden in some containers
            return os.fdopen(os.memfd_create("pytest-fusion"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _flush() -> None:
    """Write buffered output, which parent and child would both write otherwise."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def _forward(file: IO[bytes], stream: Any, size: int) -> None:
    """Write the first ``size`` bytes of ``file``, at most 1 MiB, to ``stream``."""
    if size and stream is not None:
        file.seek(0)
        text = file.read(min(size, _FORWARDED_BYTES)).decode("utf-8", "replace")
        if size > _FORWARDED_BYTES:
            text += f"\n[{size - _FORWARDED_BYTES} more bytes of output left out]\n"
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
