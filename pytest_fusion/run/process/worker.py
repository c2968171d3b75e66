"""A child process that gets requests: JSON messages in frames over a pipe each way, and tensors in named files."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_fusion.run.process.frames import FrameReader, write_frame
from pytest_fusion.run.process.supervisor import end_process, last_output

_MESSAGE = b"m"
_END_S = 2.0
_PACKAGE = Path(__file__).resolve().parents[2]
# The worker runs this very package, whichever version its environment, revision or path has: Python finds a package's
# modules where it first found the package.
_BOOT = """
import importlib, importlib.util, sys
found = importlib.util.spec_from_file_location("pytest_fusion", sys.argv[1] + "/__init__.py",
                                               submodule_search_locations=[sys.argv[1]])
package = sys.modules["pytest_fusion"] = importlib.util.module_from_spec(found)
found.loader.exec_module(package)
importlib.import_module(sys.argv[2]).main(*sys.argv[3:])
"""


def command(python: str, module: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """The command line that calls ``main`` of a module of this package; `Worker` adds the numbers of two pipes."""
    return [python, *options, "-c", _BOOT, os.fspath(_PACKAGE), module, *arguments]


class WorkerLost(Exception):
    """The other process has ended, or gave no answer in time (``late``)."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Messages:
    """One end of the two pipes."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._frames = FrameReader(incoming)
        self._descriptors = (incoming, outgoing)

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises ``WorkerLost``."""
        try:
            write_frame(self._descriptors[1], _MESSAGE, json.dumps(message).encode())
        except BrokenPipeError:
            raise WorkerLost("its pipe is closed") from None

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """The next message, within ``seconds`` if given. Raises ``WorkerLost`` at the end of pipe or time."""
        end = None if seconds is None else time.monotonic() + seconds
        while (frame := self._frames.next()) is None:
            size = self._frames.wait(None if end is None else max(0.0, end - time.monotonic()))
            if size is None:
                raise WorkerLost("it gave no answer in time", late=True)
            if size == 0:
                raise WorkerLost("its pipe is closed")
        found = json.loads(frame[1])
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


class Requests(Messages):
    """Inside a worker: the requests of the process that started it."""

    _number = ""

    def next(self) -> dict[str, Any]:
        """The next request. Raises ``WorkerLost`` if the other process has ended or closed its end."""
        message = self.receive()
        self._number = str(message["id"])
        return message

    def answer(self, **what: Any) -> None:
        """Answer the last request; with ``pulse`` alone, report progress on it."""
        self.send({"id": self._number, **what})


class Worker:
    """A spawned process in its own session, which Ctrl-C does not reach: this process ends it. Raises ``OSError``."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], start: Path | None = None) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._messages = Messages(ours_in, ours_out)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs_in), str(theirs_out)],
                cwd=start,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(theirs_in, theirs_out),
                start_new_session=True,
            )
        except OSError:
            self._messages.close()
            self._output.close()
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def request(
        self, op: str, *, seconds: float | None, pulse: Callable[[Any], None] = lambda _: None, **what: Any
    ) -> dict[str, Any]:
        """The answer to one request within ``seconds`` a wait; ``pulse`` gets progress. Raises ``WorkerLost``."""
        return self.answer(self.send(op, **what), seconds=seconds, pulse=pulse)

    def send(self, op: str, **what: Any) -> str:
        """Send a request, and return the number that its answer has. Raises ``WorkerLost``."""
        number = secrets.token_hex(4)
        self._messages.send({"id": number, "op": op, **what})
        return number

    def answer(
        self, number: str, *, seconds: float | None, pulse: Callable[[Any], None] = lambda _: None
    ) -> dict[str, Any]:
        """The answer to the request of this number, as ``request`` returns it; passes over answers to earlier ones."""
        while True:
            answer = self._messages.receive(seconds)
            if answer.get("id") == number and "pulse" not in answer:
                return answer
            pulse(answer.get("pulse"))

    def last_output(self) -> str:
        """The end of its output; for use after its end or right before `stop`."""
        return last_output(self._output)

    def stop(self) -> int:
        """Close the pipes, wait for the end, kill the rest of the group; returns the exit status."""
        self._messages.close()
        self._output.close()
        return end_process(self._process, _END_S)
