"""The incumbent's own process: started, asked, and gone at the end with the folder that it lives in."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from pytest_fusion.canary.offline.incumbent.wire import Gone, read_tensors, receive, send
from pytest_fusion.canary.offline.kernel import Measured
from pytest_fusion.canary.offline.ran import Ran
from pytest_fusion.canary.offline.taken import Compiled, Spills
from pytest_fusion.case.case_model import Case
from pytest_fusion.errors import CanaryError
from pytest_fusion.run.measure.launches import Counts, Uncounted
from pytest_fusion.run.measure.tools.again import environment

# Names the file that tells a process whom it serves; pytest in it leaves reports and other people's files alone.
VARIABLE = "PYTEST_FUSION_SERVES"
# Collecting a project and importing torch takes some ten seconds, on a busy machine a minute.
START_S = 300.0
_LAST_WORDS = 1500
_PACKAGE = Path(__file__).resolve().parents[3]
_END_S = 2.0
# The judge over there is this one, whatever version the other environment or revision has: a package is where it was
# first found, and so are its modules.
_BOOT = """
import importlib.util, sys
found = importlib.util.spec_from_file_location("pytest_fusion", sys.argv[1] + "/__init__.py",
                                               submodule_search_locations=[sys.argv[1]])
package = sys.modules["pytest_fusion"] = importlib.util.module_from_spec(found)
found.loader.exec_module(package)
from pytest_fusion.canary.offline.incumbent.serving import main
main(sys.argv[2])
"""


# Which of a spec's functions is timed.
Timed = Literal["fused", "reference"]


class NoOpponentError(Exception):
    """This test or spec has no incumbent, which says nothing of the kernel."""


class Process:
    """One running incumbent. ``folder`` is made for it, holds its checkout, and is removed with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._popen: subprocess.Popen[bytes] | None = None
        self._requests = self._replies = -1
        self._owner = os.getpid()
        atexit.register(self.end)

    @classmethod
    def in_new_folder(cls) -> Process:
        return cls(Path(tempfile.mkdtemp(prefix="pytest-fusion-incumbent-")))

    def start(self, python: str, settings: Mapping[str, Any], *, start: Path, foreign: bool) -> None:
        """Run ``python`` in the folder ``start``; ``foreign`` leaves this environment's variables for Python behind.

        Raises ``CanaryError`` where it cannot be started.
        """
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        file = self.folder / "serve.json"
        given = {**settings, "requests": theirs_in, "replies": theirs_out, "folder": os.fspath(self.folder)}
        file.write_text(json.dumps(given))
        env = environment(**{VARIABLE: os.fspath(file)})
        for name in ("PYTEST_ADDOPTS", *(("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") if foreign else ())):
            env.pop(name, None)
        try:
            with self.log.open("wb") as log:
                # In a session of its own: Ctrl-C is ours to handle, and ends it in order.
                self._popen = subprocess.Popen(
                    [python, "-c", _BOOT, os.fspath(_PACKAGE), os.fspath(file)],
                    cwd=start,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs_in, theirs_out),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(ours_out)
            os.close(ours_in)
            raise CanaryError(f"the incumbent's process cannot be started: {python}: {error}") from None
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._requests, self._replies = ours_out, ours_in

    @property
    def log(self) -> Path:
        return self.folder / "output.txt"

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def ask(
        self, op: str, *, seconds: float | None, pulse: Callable[[], None] = lambda: None, **what: Any
    ) -> dict[str, Any]:
        """One question and its answer. Raises ``Gone``; ``NoOpponentError`` and ``CanaryError`` for refusals.

        ``seconds`` is the limit of each call that the kernel makes for it; ``pulse`` is called as these end.
        """
        number = secrets.token_hex(4)
        send(self._requests, {"id": number, "op": op, **what})
        while True:
            answer = receive(self._replies, seconds)
            if answer.get("id") == number and "pulse" not in answer:
                break
            pulse()
        if "gone" in answer:
            raise Gone(str(answer["gone"]))
        if "missing" in answer:
            raise NoOpponentError(str(answer["missing"]))
        if "error" in answer:
            raise CanaryError(f"the incumbent's process: {answer['error']}")
        return answer

    def last_words(self) -> str:
        """The end of what it printed."""
        try:
            return self.log.read_text(errors="replace").strip()[-_LAST_WORDS:]
        except OSError:
            return ""

    def stop(self) -> None:
        """End the process, whatever it does; the folder stays."""
        popen, self._popen = self._popen, None
        for fd in (self._requests, self._replies):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._requests = self._replies = -1
        if popen is None:
            return
        try:
            popen.wait(_END_S)  # its pipe is closed
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also what it has started, which would keep a GPU.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()

    def end(self) -> None:
        """Leave no process and no folder. A forked child, which did not make them, leaves both alone."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.end)
        try:
            self.stop()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


class Remote:
    """The kernel of a process, asked case by case; ``seconds`` is the limit of each question."""

    def __init__(self, process: Process, device: torch.device, seconds: float) -> None:
        self._process, self._device, self._seconds = process, device, seconds
        # Told whenever the process shows that it is alive.
        self.pulse: Callable[[], None] = lambda: None

    def _ask(self, op: str, case: Case, **what: Any) -> dict[str, Any]:
        return self._process.ask(op, seconds=self._seconds, pulse=self.pulse, case=case.as_json(), **what)

    def judge(self, case: Case, *, again: bool, alone: bool = False) -> Ran:
        answer = self._ask("judge", case, again=again, alone=alone)
        return Ran.from_json(answer["ran"])

    def measure(self, case: Case) -> Measured:
        file = self._process.folder / "results"
        answer = self._ask("measure", case, file=os.fspath(file))
        found = Measured(str(answer["inputs"]), str(answer["reference"]), {}, answer["memory"], str(answer["problem"]))
        if answer["results"]:
            found.outputs = read_tensors(file, self._device)
            file.unlink(missing_ok=True)
        return found

    def count(self, case: Case) -> Counts | Uncounted:
        answer = self._ask("count", case)
        return Counts.from_json(answer["counts"]) if "counts" in answer else Uncounted(str(answer["reason"]))

    def compiled(self, keys: Sequence[str]) -> Compiled:
        return Compiled.from_json(self._process.ask("compiled", seconds=self._seconds, keys=list(keys)))

    def spills(self, sized: Sequence[tuple[str, Case]]) -> Spills:
        cases = [[text, case.as_json()] for text, case in sized]
        return Spills.from_json(self._process.ask("spills", seconds=START_S, sized=cases))

    def timer(self, case: Case, what: Timed) -> RemoteTimer:
        """What `paired_latency.timer` is there. Raises ``CanaryError`` where it cannot be timed."""
        return RemoteTimer(self, str(self._ask("time", case, what=what)["source"]))

    def sample(self) -> float:
        """Seconds a call, of what :meth:`timer` made last."""
        return float(self._process.ask("sample", seconds=self._seconds, pulse=self.pulse)["seconds"])

    def untime(self) -> None:
        """Free what is timed."""
        self._process.ask("untime", seconds=self._seconds)


class RemoteTimer:
    """A batch of calls in the other process: device seconds are measured there, the question is no part of them.

    ``source`` is a digest of the function's source.
    """

    def __init__(self, remote: Remote, source: str) -> None:
        self._remote, self.source = remote, source

    def seconds(self) -> float:
        return self._remote.sample()
