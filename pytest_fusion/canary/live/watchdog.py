"""`Watchdog`: interrupts calls of the candidate that run too long."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class CandidateHungError(BaseException):
    """Raised by the watchdog inside a candidate that ran too long; no ``except Exception`` of a kernel swallows it."""


@dataclass(slots=True, eq=False)
class _Entry:
    since: float
    thread: int = field(default_factory=threading.get_ident)
    # The call and the watchdog race to acquire it, never waiting: the winner decides how the run ends.
    ended: threading.Lock = field(default_factory=threading.Lock)
    sent: bool = False


class Watchdog:
    """Runs calls; ``look`` raises ``CandidateHungError`` in those that began too long ago. Code that never returns to
    Python (a kernel, a lock in C) is not interrupted: its thread hangs, and the incumbent serves the others."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.clear()

    def clear(self) -> None:
        """Forgets all running calls, as in a forked child."""
        self._running: dict[int, _Entry] = {}

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what ``call`` returns. Raises what it raises, and ``CandidateHungError`` if it was interrupted."""
        entry = _Entry(time.monotonic())
        self._running[id(entry)] = entry
        try:
            try:
                result = call(*args, **kwargs)
            finally:
                if not entry.ended.acquire(blocking=False):
                    # The interrupt is on its way, and must not reach code that runs after this frame.
                    while not entry.sent:
                        time.sleep(0.0005)
                    for _ in range(10):
                        time.sleep(0)
            return result
        finally:
            self._running.pop(id(entry), None)

    def look(self) -> int:
        """Interrupts calls that run for too long and returns their number."""
        late = [entry for entry in list(self._running.values()) if time.monotonic() - entry.since > self._timeout_s]
        caught = [entry for entry in late if entry.ended.acquire(blocking=False)]
        for entry in caught:
            try:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(entry.thread), ctypes.py_object(CandidateHungError)
                )
            finally:
                entry.sent = True
        return len(caught)
