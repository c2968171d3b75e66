"""Compiling ahead: forked workers that wait for the first miss, share the work, and end with the test."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pytest_fusion.run.process import preload


def _files(folder: Path, count: int) -> list[str]:
    """Their names, once there are so many; within ten seconds."""
    for _ in range(200):
        if len(found := sorted(path.name for path in folder.iterdir())) >= count:
            return found
        time.sleep(0.05)
    return found


def test_workers_share_the_work_once_they_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker learns its number and how many there are, and gives way; before the start none does anything."""
    monkeypatch.setattr(preload, "workers", lambda: 3)

    mine = os.getpriority(os.PRIO_PROCESS, 0)

    def work(worker: int, workers: int) -> None:
        later = os.getpriority(os.PRIO_PROCESS, 0) > mine or mine == 19
        (tmp_path / f"{worker} of {workers}{', gives way' if later else ''}").touch()

    with preload.compiling_ahead(work) as start:
        assert not list(tmp_path.iterdir())
        start()
        assert _files(tmp_path, 3) == ["0 of 3, gives way", "1 of 3, gives way", "2 of 3, gives way"]


def test_what_a_worker_raises_or_still_does_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One raises, one would go on for ever: the test sees neither, and no process is left."""
    monkeypatch.setattr(preload, "workers", lambda: 2)

    def work(worker: int, _: int) -> None:
        (tmp_path / str(os.getpid())).touch()
        if worker:
            raise RuntimeError("nobody hears this")
        time.sleep(600)

    with preload.compiling_ahead(work) as start:
        start()
        pids = _files(tmp_path, 2)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_with_a_warm_cache_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody calls start: the workers end without having worked."""
    monkeypatch.setattr(preload, "workers", lambda: 1)
    with preload.compiling_ahead(lambda *_: (tmp_path / "worked").touch()):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("processes", "cores", "expected"), [(1, 16, 12), (4, 16, 2), (8, 16, 0), (1, 2, 0)])
def test_cores_are_left_for_the_tests(
    processes: int, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve at most, and none where each worker of pytest-xdist has two cores."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(processes))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert preload.workers() == expected
