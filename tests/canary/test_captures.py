"""What a canary asks of a device while another thread captures a CUDA graph, told by a driver that only notes it."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch

from pytest_fusion.canary.live.calls import captures
from pytest_fusion.canary.live.calls.captures import THREAD_LOCAL, Readback, beside_captures
from tests.canary.kernels import Kernel, double, made

GLOBAL = 0


class _Driver:
    """``cuThreadExchangeStreamCaptureMode``: each thread has a mode; ``answer`` is what it returns."""

    def __init__(self, answer: int = 0) -> None:
        self._own, self.answer = threading.local(), answer

    @property
    def mode(self) -> int:
        return int(getattr(self._own, "mode", GLOBAL))

    def __call__(self, given: Any) -> int:
        if self.answer == 0:
            cell = ctypes.cast(given, ctypes.POINTER(ctypes.c_int)).contents
            self._own.mode, cell.value = cell.value, self.mode
        return self.answer


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    found = _Driver()
    monkeypatch.setattr(captures, "_driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return found


def test_the_mode_of_the_thread_is_put_back(driver: _Driver) -> None:
    """Inside only the thread's own captures restrict it; afterwards, also after an error, all do as before."""
    with beside_captures():
        with beside_captures():
            assert driver.mode == THREAD_LOCAL
        assert driver.mode == THREAD_LOCAL
    assert driver.mode == GLOBAL
    with pytest.raises(ValueError, match="x"), beside_captures():
        raise ValueError("x")

    assert driver.mode == GLOBAL


def test_an_event_is_asked_in_that_mode(driver: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a result has arrived is asked as a thread that no other thread's capture can refuse, or be broken by."""
    seen: list[int] = []

    class Event:
        def query(self) -> bool:
            seen.append(driver.mode)
            return True

    back = Readback([])
    back._events.append(Event())

    assert back.done
    assert seen == [THREAD_LOCAL]
    assert driver.mode == GLOBAL


def test_the_candidates_run_and_the_reading_are_in_that_mode(driver: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sampled call does beyond the incumbent, and what the thread that tends does, breaks no capture."""
    modes: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def noting(who: str) -> Kernel:
        return lambda x: modes.update({who: driver.mode}) or double(x)

    kernel = made(noting("incumbent"), noting("candidate"), shadow=1.0)
    look = kernel._measures.look
    monkeypatch.setattr(kernel._measures, "look", lambda: modes.update(tended=driver.mode) or look())
    kernel(torch.ones(3))
    kernel.refresh()

    assert modes == {"incumbent": GLOBAL, "candidate": THREAD_LOCAL, "tended": THREAD_LOCAL}


def test_a_driver_that_refuses_changes_nothing(driver: _Driver) -> None:
    """Without a context, or without NVIDIA's driver, work goes on in the mode that the thread has."""
    driver.answer = 3
    with beside_captures():
        assert driver.mode == GLOBAL

    assert driver.mode == GLOBAL
