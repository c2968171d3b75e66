"""A test in a process of its own: how it is called, what it inherits, and that it ends whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_fusion.run.measure.tools.again import Again, ended, environment


def test_the_program_writes_nothing_where_the_run_does(tmp_path: Path) -> None:
    """Reports of the second process go to its own folder, baselines are left alone."""
    program = Again("t.py::test_a[x y]", tmp_path, "cuda:1").program(tmp_path / "own")
    assert program[:3] == [sys.executable, "-m", "pytest"]
    assert program[-1] == "t.py::test_a[x y]"
    assert {"--fusion-device=cuda:1", "--fusion-update=none", "--fusion-isolate=off"} <= set(program)
    assert f"--fusion-json={tmp_path}/own/fusion-json" in program


def test_what_pytest_put_into_the_environment_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a worker of pytest-xdist, or write into the summary of a CI step."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "s.md")
    monkeypatch.setenv("MY_SETTING", "kept")
    found = environment(MORE="1")
    assert (found["MY_SETTING"], found["MORE"]) == ("kept", "1")
    assert not {"PYTEST_XDIST_WORKER", "GITHUB_STEP_SUMMARY", "PYTEST_CURRENT_TEST"} & set(found)


def test_both_streams_and_the_status_are_told(tmp_path: Path) -> None:
    """The last line that says something stands for the rest."""
    end = ended(["sh", "-c", "echo one; echo; echo two >&2; exit 3"], start=tmp_path, env=os.environ, seconds=60)
    assert (end.code, end.last_line) == (3, "two")
    assert "one" in end.output
    assert ended(["true"], start=tmp_path, env=os.environ, seconds=60).last_line == "no output"


def test_what_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """A kernel that hangs in a grandchild would keep the GPU."""
    script = "sleep 600 & echo $! > pid; wait"
    with pytest.raises(subprocess.TimeoutExpired):
        ended(["sh", "-c", script], start=tmp_path, env=os.environ, seconds=1)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not _runs(pid):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} still runs")


def _runs(pid: int) -> bool:
    """A process that ended and that nobody waited for still has a number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
