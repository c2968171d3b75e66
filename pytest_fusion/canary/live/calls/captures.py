"""Device work of a canary while other threads capture CUDA graphs; `Readback` copies to the host."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of cuda.h: only captures of this thread itself restrict what it may call.
THREAD_LOCAL = 1


@functools.cache
def _driver() -> Any:
    """The CUDA driver's function that sets a thread's capture mode, ``None`` without an NVIDIA driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def _exchange(mode: int) -> int | None:
    """Sets this thread's mode and returns the one before; ``None`` if it was not changed."""
    exchange = _driver()
    now = ctypes.c_int(mode)
    return None if exchange is None or exchange(ctypes.byref(now)) != 0 else now.value


@contextmanager
def beside_captures() -> Iterator[None]:
    """Lets a canary use the device (events, pinned memory, copies, kernels) while other threads capture CUDA graphs.
    torch captures in mode "global": it refuses these calls from *any* thread, even ``Event.query``, and the capture
    becomes invalid (pytorch/pytorch#104487). A thread with its own mode is exempt. No effect before CUDA is started."""
    started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    before = _exchange(THREAD_LOCAL) if started else None
    try:
        yield
    finally:
        if before is not None:
            _exchange(before)


def recorded() -> bool:
    """Whether this call is captured or traced, so that one decision holds for all replays."""
    if torch.compiler.is_compiling():
        return True
    started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


class Readback:
    """Asynchronous copies of tensors to ``host``, in order; valid once ``done``. CPU tensors are not copied."""

    __slots__ = ("_events", "host")

    @beside_captures()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.host: list[Tensor] = []
        self._events: list[Any] = []
        for tensor in tensors:
            if tensor.device.type != "cuda":
                self.host.append(tensor)
                continue
            # Explicit, because pinned memory must not follow torch's default device.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            with torch.cuda.device(tensor.device):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            self._events.append(event)
            self.host.append(host)

    @property
    def done(self) -> bool:
        """Whether all copies have arrived."""
        with beside_captures():
            return all(event.query() for event in self._events)
