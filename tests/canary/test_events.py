"""The event log: what is read of it after a kill, on a full disk, past its bound, and from a forked child."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion import canary
from pytest_fusion.canary import Policy
from pytest_fusion.canary.evidence.events import Log, read
from pytest_fusion.canary.evidence.fleet import gather

_KILLED = """
import sys, torch
from pathlib import Path
from pytest_fusion import canary
from pytest_fusion.canary import Policy

def wrong(x):
    raise RuntimeError("x" * 500)

policy = Policy(shadow=1.0, directory=sys.argv[1], trip_after=1000, interval_s=0.001)
kernel = canary("k", incumbent=lambda x: x * 2, candidate=wrong, policy=policy)
for _ in range(20):
    kernel(torch.ones(2))
kernel.refresh()
print("ready", flush=True)
while True:
    kernel(torch.ones(2))
"""


@pytest.mark.slow
def test_a_killed_process_leaves_a_log_that_is_read(tmp_path: Path) -> None:
    """SIGKILL while events are written: all that was flushed is read, in order, each event once."""
    with subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL

    (path,) = tmp_path.glob("*.jsonl")
    events = list(read(path))
    numbers = [event["n"] for event in events]
    assert numbers == list(range(1, len(events) + 1))
    assert sum(event["event"] == "failure" for event in events) >= 20
    assert {event["pid"] for event in events} == {process.pid}


def test_a_log_is_readable_wherever_it_ends(tmp_path: Path) -> None:
    """A process killed at any byte of its log: all whole lines before it are read, and add up to what they say."""
    whole = tmp_path / "whole"
    kernel = canary(
        "k",
        incumbent=lambda x: x * 2,
        candidate=lambda x: x + x,
        policy=Policy(shadow=1.0, timed=0.0, directory=whole, interval_s=3600),
    )
    for number in range(3):
        kernel(torch.ones(2 + number))
        kernel.refresh()
    kernel.close()
    (path,) = whole.glob("*.jsonl")
    data = path.read_bytes()
    events = list(read(path))
    cut = tmp_path / "cut" / path.name
    cut.parent.mkdir()
    told = []
    for end in range(0, len(data) + 1, 7):
        cut.write_bytes(data[:end])
        lines = data[:end].count(b"\n")
        assert list(read(cut)) == events[:lines]
        rollouts, _ = gather(cut.parent)
        told.append(sum(rollouts[0].evidence.calls.values()) if rollouts else 0)
        assert all(one.gaps == () for one in rollouts)

    assert told == sorted(told)
    assert sorted({0, *told}) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_process_that_ends_in_peace_leaves_all_its_events(tmp_path: Path) -> None:
    """What its thread had not yet written is written at exit."""
    code = _KILLED.partition("kernel.refresh()")[0].replace("0.001", "3600")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)

    (path,) = tmp_path.glob("*.jsonl")
    assert sum(event["event"] == "failure" for event in read(path)) == 20


def test_two_threads_that_flush_write_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread flushes while the first stands before its first line: its events come after."""
    log = Log("k", tmp_path, 1 << 20)
    write = os.write
    others: list[threading.Thread] = []

    def slow(handle: int, data: bytes) -> int:
        if not others:
            log.add("second")
            others.append(threading.Thread(target=log.flush))
            others[0].start()
            others[0].join(0.2)  # without a lock of its own it would be done by now
        return write(handle, data)

    monkeypatch.setattr(os, "write", slow)
    log.add("first")
    log.flush()
    others[0].join()

    assert log.path is not None
    assert [event["event"] for event in read(log.path)] == ["first", "second"]


def test_a_publisher_may_flush(tmp_path: Path) -> None:
    """What a publisher adds and flushes is written after what it was told of, and nobody waits for himself."""

    def publish(event: Mapping[str, Any]) -> None:
        if event["event"] == "first":
            log.add("second")
            log.flush()

    log = Log("k", tmp_path, 1 << 20, [publish])
    log.add("first")
    log.flush()

    assert log.path is not None
    assert [event["event"] for event in read(log.path)] == ["first", "second"]


def test_a_line_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    """At every byte where a write can end, the events before it are read and nothing else is."""
    log = Log("k", tmp_path, 1 << 20)
    for number in range(3):
        log.add("state", now=f"é{number}")
    log.flush()
    assert log.path is not None
    whole = log.path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]

    for length in range(len(whole) + 1):
        log.path.write_bytes(whole[:length])
        assert len(list(read(log.path))) == sum(end <= length for end in ends)


def test_the_log_is_bounded_and_keeps_the_latest(tmp_path: Path) -> None:
    """However many events there are, the files stay below the bound, and the last event is there."""
    log = Log("k", tmp_path, 20_000)
    for number in range(2000):
        log.add("failure", number=number)
        if number % 50 == 0:
            log.flush()
    log.flush()

    files = list(tmp_path.iterdir())
    assert len(files) == 2
    assert sum(file.stat().st_size for file in files) <= 20_000
    assert log.path is not None
    assert list(read(log.path))[-1]["number"] == 1999


def test_a_full_disk_breaks_no_call_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that cannot be written are lost and counted; the candidate is still sent back."""

    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    kernel = canary(
        "k",
        incumbent=lambda x: x * 2,
        candidate=lambda x: x * 3,
        policy=Policy(shadow=1.0, directory=tmp_path, interval_s=3600, trip_after=1),
    )
    monkeypatch.setattr(os, "write", full)
    result = kernel(torch.ones(2))
    kernel.refresh()
    monkeypatch.undo()

    assert torch.equal(result, torch.full((2,), 2.0))
    assert kernel.state == "tripped"
    assert kernel.status()["lost_events"] > 0


def test_a_folder_that_cannot_be_made_breaks_no_call(tmp_path: Path) -> None:
    """A directory below a file is no place for a log; the canary serves without one."""
    (tmp_path / "file").write_text("")
    kernel = canary(
        "k",
        incumbent=lambda x: x * 2,
        candidate=lambda x: x + x,
        policy=Policy(shadow=1.0, directory=tmp_path / "file" / "below", interval_s=3600, rollout="r"),
    )
    assert torch.equal(kernel(torch.ones(2)), torch.full((2,), 2.0))
    kernel.refresh()
    assert kernel.status()["lost_events"] > 0


def test_a_publisher_that_raises_breaks_nothing_and_hides_nothing_from_the_others() -> None:
    """Its errors are counted; the next publisher is told all the same."""
    heard: list[Any] = []

    def broken(event: Any) -> None:
        raise RuntimeError("unreachable")

    kernel = canary(
        "k",
        incumbent=lambda x: x * 2,
        candidate=lambda x: x * 3,
        policy=Policy(shadow=1.0, interval_s=3600, trip_after=1),
        publishers=[broken, heard.append],
    )
    kernel(torch.ones(2))
    kernel.refresh()

    assert [event["event"] for event in heard if event["event"] in ("failure", "trip")] == ["failure", "trip"]
    assert kernel.status()["publish_errors"] == len(heard)


@pytest.mark.slow
def test_a_forked_child_counts_and_writes_for_itself(tmp_path: Path) -> None:
    """After a fork with the locks held, the child serves, counts from nothing and has a log file of its own."""
    code = """
import os, sys, torch
from pytest_fusion import canary
from pytest_fusion.canary import Policy
policy = Policy(shadow=1.0, directory=sys.argv[1], interval_s=3600)
kernel = canary("k", incumbent=lambda x: x * 2, candidate=lambda x: x + x, policy=policy)
kernel(torch.ones(2))
kernel.refresh()
kernel._lock.acquire(); kernel._log._lock.acquire()
child = os.fork()
if child == 0:
    kernel(torch.ones(2)); kernel(torch.ones(2))
    kernel.refresh()
    os._exit(0 if kernel.status()["counts"] == {"compared: ok": 2} else 1)
kernel._log._lock.release()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, check=False)

    assert done.returncode == 0
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
