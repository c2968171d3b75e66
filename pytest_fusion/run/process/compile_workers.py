"""Jobs handed to compiling processes: several at once, each job with a time limit, a dead process replaced."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_fusion.run.measure.resources.targets import Target
from pytest_fusion.run.process.forkserver import Forked, ForkServer, NotStartedError

JOB_SECONDS = 120.0
# Importing torch, Triton and the users' modules on a busy machine of two cores.
START_SECONDS = 120.0
# A process that has closed its answers may still be writing its core.
_END_SECONDS = 20.0
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
_PACKAGE = str(Path(__file__).resolve().parents[2])
# This package, whichever one the path of who asks would lead to: a checkout of another revision lies on some.
_BOOT = """
import importlib.util, sys
found = importlib.util.spec_from_file_location("pytest_fusion", sys.argv[1] + "/__init__.py",
                                               submodule_search_locations=[sys.argv[1]])
package = sys.modules["pytest_fusion"] = importlib.util.module_from_spec(found)
found.loader.exec_module(package)
from pytest_fusion.run.process.compile_worker import main
main(sys.argv[2:])
"""

_COMMAND = (sys.executable, "-P", "-c", _BOOT, _PACKAGE)
# By process: a forked one has none of its own, and asks its parent's for nothing. ``None``: there can be none.
_servers: dict[int, ForkServer | None] = {}
_starting = threading.Lock()


@dataclass(frozen=True, slots=True)
class Job:
    """What one process is asked for one target; ``data`` is JSON, ``id`` unique among the jobs of one call."""

    id: int
    target: Target
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a job: ``found``, or a ``reason`` why nothing did.

    ``kernel`` is the one that was being compiled, ``crashed`` says that the compiler itself died of it.
    """

    found: Mapping[str, Any] | None
    reason: str = ""
    crashed: bool = False
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class _At:
    """The job that a process is at, and the kernel of it."""

    job: int
    kernel: str = ""


@dataclass(slots=True)
class _Batch:
    """Jobs of one target for one process at a time."""

    target: Target
    jobs: list[Job]
    answers: dict[int, Answer] = field(default_factory=dict)


def ask(
    jobs: Sequence[Job],
    *,
    processes: int | None = None,
    seconds: float = JOB_SECONDS,
    command: Sequence[str] = (),
) -> dict[int, Answer]:
    """The answer to each job, by its id; at most ``processes`` (by default one a core) work at once.

    They are forked from one that has torch and Triton imported, or else, and with a ``command``, started anew.
    """
    wide = max(1, processes or os.cpu_count() or 1)
    batches = _batches(jobs, wide)
    with ThreadPoolExecutor(max_workers=wide) as pool:
        list(pool.map(lambda batch: _settle(batch, command, seconds), batches))
    return {id_: answer for batch in batches for id_, answer in batch.answers.items()}


def _batches(jobs: Sequence[Job], wide: int) -> list[_Batch]:
    """Jobs of each target together: a process models one device. A target is split where processes would idle."""
    by_target: dict[str, list[Job]] = {}
    for job in jobs:
        by_target.setdefault(job.target.name, []).append(job)
    parts = max(1, wide // max(1, len(by_target)))
    return [
        _Batch(own[0].target, own[part::parts])
        for own in by_target.values()
        for part in range(parts)
        if own[part::parts]
    ]


def _settle(batch: _Batch, command: Sequence[str], seconds: float) -> None:
    """Answer every job; a process that dies or hangs takes one job with it, the next one goes on."""
    while True:
        pending = [job for job in batch.jobs if job.id not in batch.answers]
        if not pending:
            return
        lost, answer = _process(batch, pending, command, seconds)
        if lost is None and answer is not None:
            # It did not get as far as any job, and would not the next time.
            batch.answers.update({job.id: answer for job in pending})
        elif lost is not None and answer is not None:
            batch.answers[lost] = answer


def _environment(path: Sequence[str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return own | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _process(
    batch: _Batch, pending: Sequence[Job], command: Sequence[str], seconds: float
) -> tuple[int | None, Answer | None]:
    """Run one process over ``pending``: the job that it was lost on and why, ``(None, None)`` if it answered all."""
    path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 - '' must become the current folder
    jobs = [{"id": job.id, **job.data} for job in pending]
    environment = _environment(path)
    folder = str(Path.cwd())
    request = json.dumps(
        {"path": path, "target": batch.target.name, "jobs": jobs, "environment": environment, "folder": folder}
    )
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said, os.fdopen(reading, "rb", 0) as answers:
        given.write(request.encode())
        given.seek(0)
        process = _started(command, environment, given.fileno(), said.fileno(), writing)
        os.close(writing)
        late = True
        try:
            current, late = _listen(batch, answers, seconds)
        finally:
            _end(process, wait=0.0 if late else _END_SECONDS)
        if late:
            limit = seconds if current is not None else START_SECONDS
            return _lost(current, Answer(None, f"it did not compile within {limit:.0f} s"))
        if all(job.id in batch.answers for job in pending):
            return None, None
        said.seek(0)
        words = said.read()[-2000:].decode(errors="replace").strip().splitlines()
        return _lost(current, _died(process.returncode, words[-1] if words else "it said nothing"))


def _started(
    command: Sequence[str], environment: Mapping[str, str], given: int, said: int, writing: int
) -> subprocess.Popen[bytes] | Forked:
    server = None if command else _server(environment)
    if server is not None:
        try:
            return server.fork(given, said, writing, START_SECONDS)
        except (NotStartedError, subprocess.TimeoutExpired):
            _give_up()
    return subprocess.Popen(
        [*(command or (*_COMMAND, "answer")), str(writing)],
        stdin=given,
        stdout=subprocess.DEVNULL,
        stderr=said,
        env=dict(environment),
        pass_fds=(writing,),
        start_new_session=True,
    )


def _server(environment: Mapping[str, str]) -> ForkServer | None:
    """This process's own, started when first asked for; ``None`` where there can be none."""
    with _starting:
        if os.getpid() not in _servers:
            known = hasattr(os, "fork") and hasattr(socket, "send_fds")
            _servers[os.getpid()] = ForkServer((*_COMMAND, "serve"), environment) if known else None
            atexit.register(_give_up)
        return _servers[os.getpid()]


def _give_up() -> None:
    """Of this process's server: what is asked from now on has processes that are started anew."""
    found, _servers[os.getpid()] = _servers.get(os.getpid()), None
    if found is not None:
        found.close()


def _lost(at: _At | None, answer: Answer) -> tuple[int | None, Answer]:
    """A process that dies between kernels dies of what its module or the launcher does, not of the compiler."""
    if at is None or not at.kernel:
        return (None if at is None else at.job), replace(answer, crashed=False)
    return at.job, replace(answer, kernel=at.kernel)


def _listen(batch: _Batch, answers: Any, seconds: float) -> tuple[_At | None, bool]:
    """Take answers until the process closes its end: the job it was at, and whether its time ran out."""
    current: _At | None = None
    held, deadline = b"", time.monotonic() + START_SECONDS
    while True:
        ready, _, _ = select.select([answers], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return current, True
        block = os.read(answers.fileno(), 1 << 16)
        if not block:
            return current, False
        *lines, held = (held + block).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "begins" in message:
                current = _At(int(message["begins"]), str(message.get("kernel", "")))
            else:
                batch.answers[int(message.pop("id"))] = Answer(message)
                current = None
        if lines:
            deadline = time.monotonic() + seconds


def _end(process: subprocess.Popen[bytes] | Forked, wait: float) -> None:
    """Wait so many seconds for its end; then it and the compilers that it started are killed."""
    try:
        process.wait(timeout=wait)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=_END_SECONDS)


def _died(status: int | None, words: str) -> Answer:
    if status is not None and status < 0 and -status in _CRASHES:
        name = signal.Signals(-status).name
        return Answer(None, f"the compiling process died of {name}: {words}", crashed=True)
    return Answer(None, f"the compiling process ended with status {status}: {words}")
