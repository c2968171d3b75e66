"""CUDA graphs that other threads capture: what this thread asks of a device in the meantime must not break them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of cuda.h: only captures of this thread itself restrict what it may call.
THREAD_LOCAL = 1


@functools.cache
def _driver() -> Any:
    """The driver that this process has loaded, ``None`` where there is none of NVIDIA's."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def _exchange(mode: int) -> int | None:
    """This thread's mode until now; ``None`` where it was not changed."""
    exchange = _driver()
    now = ctypes.c_int(mode)
    return None if exchange is None or exchange(ctypes.byref(now)) != 0 else now.value


@contextmanager
def beside_captures() -> Iterator[None]:
    """For work of a canary's own on a device: whether an event has happened, pinned memory, copies, the other kernel.

    torch captures in the mode "global" (``capture_error_mode``), in which such a call by *any* thread, ``Event.query``
    too, is refused and makes the capture invalid (pytorch/pytorch#104487). A thread in its own mode is left out.
    Nothing is changed before CUDA was started.
    """
    started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    before = _exchange(THREAD_LOCAL) if started else None
    try:
        yield
    finally:
        if before is not None:
            _exchange(before)


def recorded() -> bool:
    """Whether this call is captured or traced, and so decided once for many."""
    if torch.compiler.is_compiling():
        return True
    started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()
