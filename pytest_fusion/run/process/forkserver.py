"""A process that has imported torch and Triton and forks one that compiles whenever it is asked to.

Importing them takes 3.5 s of a core, and a test with ``bench=`` needs two compiling processes: of 45 tests the imports
alone took five minutes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

# What is passed with each request, in this order: the request itself, what the process says, its answers, its end.
_FDS = 4
# An end of the socket that is closed is seen at once, but for the imports at its start.
_END_SECONDS = 5.0


class NotStartedError(Exception):
    """The server is not there: it could not import what it must, or was killed."""


class Forked:
    """A process that somebody else's process has forked; as much of `subprocess.Popen` as is needed of it."""

    def __init__(self, status: int, seconds: float) -> None:
        self._status = status
        self._held = b""
        self.returncode: int | None = None
        try:
            self.pid = int(self._line(time.monotonic() + seconds))
        except (NotStartedError, subprocess.TimeoutExpired):
            os.close(status)
            raise

    def wait(self, timeout: float) -> int:
        """Its exit status, negative for a signal. Raises ``subprocess.TimeoutExpired``."""
        if self.returncode is None:
            self.returncode = int(self._line(time.monotonic() + timeout))
            os.close(self._status)
        return self.returncode

    def _line(self, until: float) -> str:
        while b"\n" not in self._held:
            ready, _, _ = select.select([self._status], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired("the fork server", 0.0)
            block = os.read(self._status, 64)
            if not block:
                raise NotStartedError("the process that compiling processes are forked from has ended")
            self._held += block
        line, _, self._held = self._held.partition(b"\n")
        return line.decode()


class ForkServer:
    """Started by ``command``, to which the number of a socket is appended; ends with the process that started it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is for who asks, which closes the socket.
                start_new_session=True,
            )

    def fork(self, given: int, said: int, answers: int, seconds: float) -> Forked:
        """A process with these files as its input, what it says, and its answers, in a session of its own.

        Raises ``NotStartedError``, and ``subprocess.TimeoutExpired`` after so many ``seconds``.
        """
        reading, writing = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._ours, [b"."], [given, said, answers, writing])
        except OSError as error:
            os.close(reading)
            raise NotStartedError(str(error)) from error
        finally:
            os.close(writing)
        return Forked(reading, seconds)

    def close(self) -> None:
        """Nobody asks any more: the process ends, and those that it forked end when they have done their work."""
        self._ours.close()
        try:
            self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(connection: int, work: Callable[[int], object]) -> NoReturn:
    """Fork a process that calls ``work`` with the descriptor for its answers, for each request, until nobody asks."""
    # Those that wait for a worker end by themselves, and nobody waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=connection) as requests:
        while True:
            data, fds, _, _ = socket.recv_fds(requests, 1, _FDS)
            if not data:
                os._exit(0)
            if os.fork() == 0:
                requests.close()
                _supervise(work, *fds)
            for each in fds:
                os.close(each)


def _supervise(work: Callable[[int], object], given: int, said: int, answers: int, status: int) -> NoReturn:
    """Fork the worker and wait for it: only a parent learns how a process ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _become(given, said, answers, work)
    for each in (given, said, answers):
        os.close(each)
    # Who asked may be gone.
    with contextlib.suppress(OSError):
        os.write(status, b"%d\n" % pid)
        _, ended = os.waitpid(pid, 0)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def _become(given: int, said: int, answers: int, work: Callable[[int], object]) -> NoReturn:
    os.setsid()
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - a device
        for number, into in ((given, 0), (nothing.fileno(), 1), (said, 2)):
            os.dup2(number, into)
    status = 1
    try:
        work(answers)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the last lines say what it was
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)
