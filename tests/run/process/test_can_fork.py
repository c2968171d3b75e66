"""When a child may be forked at all, and when a process's CUDA is lost."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

import pytest
import torch

from pytest_fusion.run.process import fork
from pytest_fusion.run.process.fork import can_fork, cuda_is_poisoned
from tests.run.process.waiting import eventually

LINUX = sys.platform.startswith("linux")


def test_can_fork_here() -> None:
    """A Linux process without CUDA can fork, and asking starts no CUDA."""
    if not LINUX or torch.cuda.is_initialized():
        pytest.skip("needs Linux and a process that has not started CUDA")
    assert can_fork() is None
    assert not torch.cuda.is_initialized()


def test_can_fork_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA that is or is being initialised, autograd's device threads and a system without fork are each named."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert "CUDA is initialised" in (can_fork() or "")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda._tls, "is_initializing", True, raising=False)
        assert "CUDA is initialised" in (can_fork() or "")
    with monkeypatch.context() as patch:
        patch.setattr(fork, "_thread_names", lambda: ["python\n", "pt_autograd_0\n"])
        assert "autograd" in (can_fork() or "")
    with monkeypatch.context() as patch:
        patch.delattr(os, "fork")
        assert "no fork" in (can_fork() or "")


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_thread_names() -> None:
    """The threads of this process are found by the names that the system shows."""
    done = threading.Event()

    def named() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_autograd_9", 0, 0, 0)
        done.wait()

    thread = threading.Thread(target=named)
    thread.start()
    try:
        assert eventually(lambda: "autograd" in (can_fork() or ""))
    finally:
        done.set()
        thread.join()


def test_poison_is_seen_on_the_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA is lost when the error stays; one that surfaces once, and a full memory, are not that."""

    def failing(errors: list[Exception | None]) -> Any:
        remaining = iter(errors)

        def synchronize() -> None:
            error = next(remaining)
            if error is not None:
                raise error

        return synchronize

    sticky = RuntimeError("CUDA error: an illegal memory access was encountered")
    full = torch.cuda.OutOfMemoryError("full")
    no_kernel = RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ...")
    monkeypatch.setattr(torch, "ones", lambda *args, **kwargs: torch.zeros(()))
    assert cuda_is_poisoned() is False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for errors, expected in (
        ([None, None], False),
        ([sticky, None], False),
        ([sticky, sticky], True),
        ([full, full], False),
        ([no_kernel, no_kernel], False),
    ):
        monkeypatch.setattr(torch.cuda, "synchronize", failing(errors))
        assert cuda_is_poisoned() is expected
