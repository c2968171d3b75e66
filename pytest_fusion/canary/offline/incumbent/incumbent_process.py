"""The incumbent's own process and its kernel: started, called, and removed with its folder at the end."""

from __future__ import annotations

import atexit
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from pytest_fusion.canary.offline.case_pairs import Ran
from pytest_fusion.canary.offline.kernel import Kernel, Measured, read_tensors
from pytest_fusion.canary.offline.taken import Compiled, Spills
from pytest_fusion.case.case_model import Case
from pytest_fusion.errors import CanaryError
from pytest_fusion.run.measure.launches import Counts, Uncounted
from pytest_fusion.run.measure.tools.again import environment
from pytest_fusion.run.process.worker import Worker, WorkerLost, command

# Names the file with the process's settings. With it, pytest leaves reports and other people's files alone.
VARIABLE = "PYTEST_FUSION_SERVES"
# Collecting a project and importing torch takes some ten seconds, on a busy machine a minute.
START_S = 300.0
_LAST_OUTPUT = 1500
_MODULE = "pytest_fusion.canary.offline.incumbent.serving"
# Which of a spec's functions is timed.
Timed = Literal["fused", "reference"]


class NoOpponentError(Exception):
    """This test or spec has no incumbent; that says nothing about the kernel."""


class Process:
    """One running incumbent. Its ``folder`` is new, holds the checkout, and is removed with the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._worker: Worker | None = None
        self._owner = os.getpid()
        atexit.register(self.end)

    def start(self, python: str, settings: Mapping[str, Any], *, start: Path, foreign: bool) -> None:
        """Runs ``python`` in ``start``; ``foreign`` drops our variables for Python. Raises ``CanaryError``."""
        file = self.folder / "serve.json"
        file.write_text(json.dumps({**settings, "folder": os.fspath(self.folder)}))
        env = environment(**{VARIABLE: os.fspath(file)})
        for name in ("PYTEST_ADDOPTS", *(("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") if foreign else ())):
            env.pop(name, None)
        self.stop()
        try:
            self._worker = Worker(command(python, _MODULE, os.fspath(file)), env=env, start=start)
        except OSError as error:
            raise CanaryError(f"the incumbent's process cannot be started: {python}: {error}") from None

    @property
    def running(self) -> bool:
        return self._worker is not None and self._worker.running

    def request(self, op: str, *, seconds: float, **what: Any) -> dict[str, Any]:
        """Send a request and return the answer. Raises ``WorkerLost``; ``NoOpponentError``, ``CanaryError`` if refused.
        ``seconds`` limits each call that the kernel makes for it."""
        return self.begin(op, seconds=seconds, **what)()

    def begin(
        self, op: str, *, seconds: float, pulse: Callable[[], None] = lambda: None, **what: Any
    ) -> Callable[[], dict[str, Any]]:
        """Send a request; what is returned waits for its answer, as `request` does, or is never called. ``pulse`` is
        called after each call that the kernel makes."""
        worker = self._worker
        if worker is None:
            raise WorkerLost("its pipe is closed")
        number = worker.send(op, **what)

        def answered() -> dict[str, Any]:
            answer = worker.answer(number, seconds=seconds, pulse=lambda _: pulse())
            if "gone" in answer:
                raise WorkerLost(str(answer["gone"]))
            if "missing" in answer:
                raise NoOpponentError(str(answer["missing"]))
            if "error" in answer:
                raise CanaryError(f"the incumbent's process: {answer['error']}")
            return answer

        return answered

    def last_output(self) -> str:
        return self._worker.last_output().strip()[-_LAST_OUTPUT:] if self._worker is not None else ""

    def stop(self) -> None:
        """End the process, busy or not; the folder stays."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    def end(self) -> None:
        """Removes the process and its folder. A forked child did not make them and leaves both alone."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.end)
        try:
            self.stop()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


class Remote:
    """The kernel of a process, case by case; ``seconds`` is the limit of each request."""

    def __init__(self, process: Process, device: torch.device, seconds: float) -> None:
        self._process, self._device, self._seconds = process, device, seconds
        # Called whenever the process shows that it is alive.
        self.pulse: Callable[[], None] = lambda: None

    def _request(self, op: str, **what: Any) -> Any:
        """What the method ``op`` of `ServedKernel` returns."""
        return self._begin(op, **what)()["found"]

    def _begin(self, op: str, *, seconds: float | None = None, **what: Any) -> Callable[[], dict[str, Any]]:
        return self._process.begin(op, seconds=seconds or self._seconds, pulse=self.pulse, **what)

    def judge(self, case: Case, *, again: bool, alone: bool = False) -> Ran:
        return self.judging(case, again=again, alone=alone)()

    def judging(self, case: Case, *, again: bool, alone: bool = False) -> Callable[[], Ran]:
        """`judge`, which goes on until the result is wanted."""
        answered = self._begin("judge", case=case.as_json(), again=again, alone=alone)
        return lambda: Ran(**answered()["found"])

    def measure(self, case: Case) -> Measured:
        return self.measuring(case)()

    def measuring(self, case: Case) -> Callable[[], Measured]:
        """`measure`, which goes on until the result is wanted."""
        file = self._process.folder / "results"
        answered = self._begin("measure", case=case.as_json(), file=os.fspath(file))

        def measured() -> Measured:
            found = answered()["found"]
            has_outputs = found.pop("results")
            result = Measured(**found)
            if has_outputs:
                result.outputs = read_tensors(file, self._device)
                file.unlink(missing_ok=True)
            return result

        return measured

    def count(self, case: Case) -> Counts | Uncounted:
        found = self._request("count", case=case.as_json())
        return Uncounted(found) if isinstance(found, str) else Counts.from_json(found)

    def compiled(self, keys: Sequence[str]) -> Compiled:
        return Compiled(**self._request("compiled", keys=list(keys)))

    def spills(self, sized: Sequence[tuple[str, Case]]) -> Spills:
        return self.spilling(sized)()

    def spilling(self, sized: Sequence[tuple[str, Case]]) -> Callable[[], Spills]:
        """`spills`, which goes on until the result is wanted."""
        cases = [[text, case.as_json()] for text, case in sized]
        answered = self._begin("spills", seconds=START_S, sized=cases)
        return lambda: Spills(**answered()["found"])

    def timer(self, case: Case, what: Timed) -> RemoteTimer:
        """A timer like `paired_latency.timer`, in the process. Raises ``CanaryError`` if the case cannot be timed."""
        source = str(self._request("time", case=case.as_json(), what=what))
        return RemoteTimer(lambda: float(self._request("sample")), source)

    def untime(self) -> None:
        """Free the tensors of the batch that was timed."""
        self._request("untime")


# A kernel that can be judged and measured case by case, in this or another process.
Opponent = Kernel | Remote


class RemoteTimer(NamedTuple):
    """Times a batch of calls in the other process, in its device seconds; ``source`` is a digest of the function."""

    seconds: Callable[[], float]
    source: str
