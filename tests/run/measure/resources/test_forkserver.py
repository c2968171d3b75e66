"""Processes forked by another one: they end as they end, and nobody waits for those that never come."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fusion.run.process.forkserver import ForkServer, NotStartedError

SERVER = """
import json, os, signal, sys
sys.path.insert(0, {root!r})
from pytest_fusion.run.process import forkserver

def work(answers):
    deed = sys.stdin.read()
    print("to standard output")
    if deed == "raise":
        raise ValueError("it is " + deed)
    if deed == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if deed == "exit":
        sys.exit(3)
    if deed == "hang":
        signal.pause()
    os.write(answers, (deed + " in " + str(os.getsid(0) == os.getpid())).encode())

forkserver.serve(int(sys.argv[1]), work)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """One whose processes do what they are told."""
    path = tmp_path_factory.mktemp("server") / "server.py"
    path.write_text(SERVER.format(root=str(Path(__file__).parents[4])), encoding="utf-8")
    found = ForkServer([sys.executable, str(path)], os.environ)
    yield found
    found.close()


def _asked(server: ForkServer, deed: str) -> tuple[int, str, str]:
    """How a process ended that was told this, what it answered, and its last words."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said, os.fdopen(reading, "rb") as answers:
        given.write(deed.encode())
        given.seek(0)
        process = server.fork(given.fileno(), said.fileno(), writing, 60.0)
        os.close(writing)
        answered = answers.read().decode()
        status = process.wait(60.0)
        said.seek(0)
        return status, answered, said.read().decode().strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("deed", "status", "words"), [("raise", 1, "ValueError: it is raise"), ("die", -11, ""), ("exit", 3, "")]
)
def test_how_a_process_ended_is_known(server: ForkServer, deed: str, status: int, words: str) -> None:
    """An exception, a signal and an exit are told apart, and the server goes on."""
    assert _asked(server, deed) == (status, "", words)
    assert _asked(server, "work") == (0, "work in True", "")


def test_who_waits_too_long_is_told(server: ForkServer) -> None:
    """A process that hangs can be killed by the number of its session, and then it has ended by that."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(b"hang")
        given.seek(0)
        process = server.fork(given.fileno(), said.fileno(), writing, 60.0)
        os.close(writing)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        os.killpg(process.pid, 9)
        assert process.wait(60.0) == -9
        os.close(reading)


def test_a_server_that_cannot_start_forks_nothing() -> None:
    """Whoever asks is told so, however often."""
    gone = ForkServer([sys.executable, "-c", "raise SystemExit('no torch')"], os.environ)
    for _ in range(2):
        with pytest.raises(NotStartedError):
            _asked(gone, "work")
    gone.close()
