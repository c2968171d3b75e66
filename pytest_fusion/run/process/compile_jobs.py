"""Jobs compiled in other processes: several at once, each with a time limit, a dead process replaced.

A worker, one per process, imports torch and Triton and forks them. The imports take 3.5 s of a core, and a test with
``bench=`` needs two processes: for 45 tests they alone took five minutes.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pytest_fusion.run.measure.resources.targets import Target
from pytest_fusion.run.process.fork import Channel, Crash, run_isolated
from pytest_fusion.run.process.supervisor import last_line
from pytest_fusion.run.process.worker import Requests, Worker, WorkerLost, command
from pytest_fusion.spec.wording import grouped

JOB_SECONDS = 120.0
# Importing torch and Triton on a busy machine of two cores.
START_SECONDS = 120.0
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
_COMMAND = command(sys.executable, "pytest_fusion.run.process.compile_worker", options=("-P",))

# By process: a forked one does not use its parent's.
_workers: dict[int, Worker] = {}
_using = threading.Lock()

# Runs a request's jobs in order. The second argument gets ``{"begins": id, "kernel": name}`` before each kernel and
# ``{"id": id, "found": ...}`` after each job.
Work = Callable[[Mapping[str, Any], Callable[[dict[str, Any]], None]], None]


@dataclass(frozen=True, slots=True)
class Job:
    """Data for one process and one target; ``data`` is JSON, ``id`` unique among the jobs of one call."""

    id: int
    target: Target
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result in ``found``, or the ``reason``; ``crashed``: compiling ``kernel`` made the compiler itself crash."""

    found: Mapping[str, Any] | None
    reason: str = ""
    crashed: bool = False
    kernel: str = ""


def compile_all(
    jobs: Sequence[Job],
    *,
    processes: int | None = None,
    seconds: float = JOB_SECONDS,
    command: Sequence[str] = _COMMAND,
) -> dict[int, Answer]:
    """The answer to each job, by its id; at most ``processes`` (default: one a core) run, in a worker (``command``)."""
    wide = max(1, processes or os.cpu_count() or 1)
    path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 - '' must become the current folder
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    request = {"path": path, "environment": environment, "folder": str(Path.cwd()), "limit": seconds, "wide": wide}
    answers: dict[int, Answer] = {}

    def progress(message: dict[str, Any]) -> None:
        if "id" in message:
            number = int(message.pop("id"))
            answers[number] = Answer(**{"found": None, **message})

    with _using:
        # Twice: a killed worker says nothing about the jobs.
        for _ in range(2):
            batches = _batches([job for job in jobs if job.id not in answers], wide)
            try:
                worker = _worker(command, environment)
                limit = START_SECONDS + seconds
                worker.request("compile", seconds=limit, pulse=progress, batches=batches, **request)
                return answers
            except WorkerLost as lost:
                words = last_line(worker.last_output())
                reason = _late(seconds) if lost.late else _ended(_stop_worker(), words)
            except BaseException:
                _stop_worker()  # it is in the middle of a request
                raise
    return {job.id: answers.get(job.id, Answer(None, reason)) for job in jobs}


def _batches(jobs: Sequence[Job], wide: int) -> list[dict[str, Any]]:
    """Batches of one target each: a process models one device. Splits a target if processes would idle."""
    by_target = grouped((job.target.name, {"id": job.id, **job.data}) for job in jobs)
    parts = max(1, wide // max(1, len(by_target)))
    return [
        {"target": target, "jobs": own[part::parts]}
        for target, own in by_target.items()
        for part in range(min(parts, len(own)))
    ]


def _worker(command: Sequence[str], environment: Mapping[str, str]) -> Worker:
    """This process's worker, started at first use."""
    if os.getpid() not in _workers:
        _workers[os.getpid()] = Worker(command, env=environment)
        atexit.register(_stop_worker)
    return _workers[os.getpid()]


def _stop_worker() -> int:
    """The exit status of this process's worker; the next jobs start another one."""
    atexit.unregister(_stop_worker)
    found = _workers.pop(os.getpid(), None)
    return found.stop() if found is not None else 0


def serve(requests: str, replies: str, work: Work) -> NoReturn:
    """Inside the worker: fork a process for each batch of a request, until the other end is closed."""
    link = Requests(int(requests), int(replies))
    received: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                received.put(link.next())
        except WorkerLost:
            os._exit(0)  # also in the middle of a request; forked processes die with this one

    # A short answer is one write, a long one several.
    lock = threading.Lock()

    def progress(message: dict[str, Any]) -> None:
        with lock:
            link.answer(pulse=message)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        request = received.get()
        batches = [{**request, **batch} for batch in request["batches"]]
        with ThreadPoolExecutor(max_workers=request["wide"]) as pool:
            list(pool.map(lambda batch: _settle(batch, work, progress), batches))
        link.answer(done=True)


def _settle(batch: Mapping[str, Any], work: Work, progress: Callable[[dict[str, Any]], None]) -> None:
    """Answer every job; a process that dies or hangs loses one job, and the next process continues."""
    pending = {job["id"]: job for job in batch["jobs"]}
    # The process's current job and its kernel.
    current: dict[str, Any] = {}

    def on_note(message: dict[str, Any]) -> None:
        current.clear()
        if "begins" in message:
            current.update(message)
        else:
            del pending[message["id"]]
        progress(message)

    while pending:
        current.clear()
        rest = {**batch, "jobs": list(pending.values())}
        outcome = run_isolated(
            partial(_work, work, rest),
            time_limit_s=batch["limit"],
            wall_clock=True,
            forward=False,
            on_note=on_note,
        )
        if not pending:
            return
        died = outcome if isinstance(outcome, Crash) else Crash("exit", "", None, "")
        reason = _late(batch["limit"]) if died.kind == "timeout" else _ended(died.code, last_line(died.stderr_tail))
        # If it reached no job, the next process would not either. A process that dies between kernels dies of its
        # module or the launcher, not of the compiler.
        lost = [current["begins"]] if current else list(pending)
        kernel = current.get("kernel", "")
        crashed = bool(kernel) and died.kind == "signal" and -died.code in _CRASHES
        for number in lost:
            del pending[number]
            progress({"id": number, "reason": reason, "crashed": crashed, "kernel": kernel})


def _work(work: Work, request: Mapping[str, Any], channel: Channel) -> None:
    """Run a batch in its own process; it ends as a program would, with the traceback as its last output."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    try:
        work(request, channel.note)
        return
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the last lines show the error
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


def _late(seconds: float) -> str:
    return f"it did not compile within {seconds:.0f} s"


def _ended(status: int, words: str) -> str:
    words = words or "it printed nothing"
    if -status in _CRASHES:
        return f"the compiling process died of {signal.Signals(-status).name}: {words}"
    return f"the compiling process ended with status {status}: {words}"
