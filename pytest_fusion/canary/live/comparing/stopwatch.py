"""`Span`: the duration of one call, by the host's clock or by two events of a CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch


def clock_of(devices: Iterable[torch.device]) -> torch.device | None:
    """The CUDA device whose stream times a call on ``devices``; ``None`` for the host's clock.

    Raises ``ValueError`` for several of them: no single stream covers the whole call.
    """
    found = {device for device in devices if device.type == "cuda"}
    if len(found) > 1:
        raise ValueError(f"the call is on {len(found)} devices, and no single clock covers it")
    return found.pop() if found else None


class Span:
    """A time measurement. ``begin`` and ``end`` wait for no device; ``seconds`` is for another thread.

    On a device it is the time between two events of the current stream: GPU time where work is queued, and with the
    launch where the GPU is idle. On the host it is wall-clock time.
    """

    __slots__ = ("_device", "_start", "_stop")

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._start: Any = None
        self._stop: Any = None

    def begin(self) -> None:
        self._start = self._now()

    def end(self) -> None:
        self._stop = self._now()

    def _now(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        return event

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` with timing; time that the caller spends around it does not count."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            try:
                return call(*args, **kwargs)
            finally:
                self.end()

        return timed

    def seconds(self) -> float | None:
        """The duration; ``None`` until the device has finished, or if it never began."""
        if self._start is None or self._stop is None:
            return None
        if self._device is None:
            return float(self._stop - self._start)
        if not self._stop.query():
            return None
        return float(self._start.elapsed_time(self._stop)) / 1e3
