"""Messages between two processes arrive as they were, and an end that is closed or silent is noticed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fusion.run.process.worker import Messages, Worker, WorkerLost
from tests.run.process.children import LINUX, alive
from tests.run.process.waiting import eventually


@pytest.fixture
def pipe() -> Iterator[list[int]]:
    ends = list(os.pipe())
    yield ends
    for end in ends:
        if end >= 0:
            os.close(end)


def test_messages(pipe: list[int]) -> None:
    """Two messages written at once are read one by one."""
    messages = Messages(*pipe)
    messages.send({"a": 1})
    messages.send({"text": "ü" * 10_000})
    assert messages.receive() == {"a": 1}
    assert messages.receive(5.0) == {"text": "ü" * 10_000}


def test_a_closed_pipe_and_a_silent_one(pipe: list[int]) -> None:
    """Whoever waits for a process that is gone, or says nothing in time, is told which of the two it is."""
    reader, writer = pipe
    messages = Messages(reader, writer)
    with pytest.raises(WorkerLost) as silent:
        messages.receive(0.0)
    os.write(writer, b"\0\0")
    os.close(writer)
    pipe[1] = -1
    with pytest.raises(WorkerLost) as closed:
        messages.receive()
    assert (silent.value.late, closed.value.late) == (True, False)
    other_reader, pipe[1] = os.pipe()
    os.close(other_reader)
    with pytest.raises(WorkerLost):
        Messages(reader, pipe[1]).send({})


WORKER = """
import subprocess, sys
sys.path.insert(0, {root!r})
from pytest_fusion.run.process.worker import Requests

link = Requests(*map(int, sys.argv[1:]))
while True:
    request = link.next()
    if request["op"] == "exit":
        sys.exit("as requested")
    if request["op"] == "start":
        link.answer(pid=subprocess.Popen(["sleep", "600"]).pid)
    if request["op"] == "add":
        link.answer(pulse=1)
        link.answer(sum=request["a"] + request["b"])
"""


@pytest.fixture
def worker() -> Iterator[Worker]:
    program = WORKER.format(root=str(Path(__file__).parents[3]))
    found = Worker([sys.executable, "-c", program], env=os.environ)
    yield found
    if found.running:
        found.stop()


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_a_worker_answers_and_ends_with_what_it_started(worker: Worker) -> None:
    """Reports of progress come before the answer; what the worker started does not outlive it."""
    pulses: list[int] = []
    assert worker.request("add", seconds=60.0, pulse=pulses.append, a=1, b=2)["sum"] == 3
    assert pulses == [1]
    pid = worker.request("start", seconds=60.0)["pid"]
    worker.stop()
    assert eventually(lambda: not alive(pid))


def test_an_answer_may_wait_or_not_be_wanted(worker: Worker) -> None:
    """The worker starts on a request before its answer is read; an answer that is never read is skipped by the next."""
    number = worker.send("add", a=1, b=2)
    assert worker.answer(number, seconds=60.0)["sum"] == 3
    worker.send("add", a=3, b=4)
    assert worker.request("add", seconds=60.0, a=5, b=6)["sum"] == 11


def test_how_a_worker_ended_is_known(worker: Worker) -> None:
    """Its last output and its status, which is not 0."""
    with pytest.raises(WorkerLost, match="its pipe is closed"):
        worker.request("exit", seconds=60.0)
    assert (worker.last_output(), worker.stop()) == ("as requested\n", 1)


def test_a_worker_that_cannot_start_leaves_nothing_open() -> None:
    """Every descriptor is closed again."""
    before = list(Path("/proc/self/fd").iterdir()) if LINUX else []
    with pytest.raises(OSError, match="no such program"):
        Worker(["/no such program"], env=os.environ)
    assert len(list(Path("/proc/self/fd").iterdir()) if LINUX else []) == len(before)
