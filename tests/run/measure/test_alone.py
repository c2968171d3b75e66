"""A GPU to oneself: who shares it waits for who does not, and nobody waits for ever."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.run.measure.timing.alone import alone, beside

GPU = torch.device("cuda", 0)
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def _started(how: Callable[[torch.device], Any], device: torch.device = GPU) -> tuple[Any, Any, Any]:
    """A process that takes the GPU, says so, and keeps it until it is told."""
    has, let_go = FORK.Event(), FORK.Event()

    def work() -> None:
        with how(device):
            has.set()
            let_go.wait(60)

    process = FORK.Process(target=work)
    process.start()
    return process, has, let_go


def test_sharers_share_and_wait_for_who_is_alone() -> None:
    """Two sharers have it at once; who wants it alone gets it after both, and another GPU meanwhile."""
    first, second = _started(beside), _started(beside)
    assert first[1].wait(30)
    assert second[1].wait(30)
    lone = _started(alone)
    with alone(torch.device("cuda", 1)):
        assert not lone[1].wait(0.3)
    first[2].set()
    assert not lone[1].wait(0.3)
    second[2].set()
    assert lone[1].wait(30)
    late = _started(beside)
    assert not late[1].wait(0.3)
    for process, _, let_go in (first, second, lone, late):
        let_go.set()
        process.join(30)
        assert process.exitcode == 0


def test_who_waits_to_be_alone_is_not_overtaken() -> None:
    """A sharer that comes later does not get it before, though others share it now."""
    sharer = _started(beside)
    assert sharer[1].wait(30)
    lone = _started(alone)
    time.sleep(0.2)
    late = _started(beside)
    assert not late[1].wait(0.3)
    sharer[2].set()
    assert lone[1].wait(30)
    assert not late[1].is_set()
    lone[2].set()
    assert late[1].wait(30)
    late[2].set()
    for process, _, _ in (sharer, lone, late):
        process.join(30)


def test_a_child_that_lives_on_keeps_nothing() -> None:
    """What was forked while it was held does not hold it."""
    with beside(GPU):
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
    try:
        lone = _started(alone)
        assert lone[1].wait(10)
        lone[2].set()
        lone[0].join(30)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_masked_gpu_is_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of all and the first of a mask that begins with it are one; a CPU is nobody's alone."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 3")
    sharer = _started(beside)
    assert sharer[1].wait(30)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    lone = _started(alone, torch.device("cuda", 1))
    assert not lone[1].wait(0.3)
    sharer[2].set()
    assert lone[1].wait(30)
    with beside(torch.device("cpu")):
        pass
    lone[2].set()
    for process, _, _ in (sharer, lone):
        process.join(30)
