"""The watchdog: which calls of the candidate run too long, and what can be done about it from outside."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any


class CandidateHungError(BaseException):
    """Raised by the watchdog inside a candidate that ran too long; no ``except Exception`` of a kernel swallows it."""


class _Entry:
    __slots__ = ("sent", "since", "thread", "token")

    def __init__(self, since: float) -> None:
        self.thread = threading.get_ident()
        self.since = since
        # Whoever pops it decides how the run ends: popping is atomic, so it is one of the two.
        self.token = [None]
        self.sent = False

    def claim(self) -> bool:
        try:
            self.token.pop()
        except IndexError:
            return False
        return True


class Watchdog:
    """Runs calls and notes when they began; ``look`` interrupts those that began too long ago.

    Python code is interrupted where it stands and the caller of ``run`` gets ``CandidateHungError``. Code that never
    returns to Python (a kernel, a lock in C) cannot be: its thread stays, the others are served by the incumbent.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Nothing runs: what a forked child begins with."""
        self._running: dict[int, _Entry] = {}

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``call`` returns or raises; ``CandidateHungError`` where it was interrupted."""
        entry = _Entry(self._clock())
        self._running[id(entry)] = entry
        try:
            try:
                result = call(*args, **kwargs)
            finally:
                if not entry.claim():
                    # The interrupt is on its way, and must not reach whoever runs after this frame.
                    while not entry.sent:
                        time.sleep(0.0005)
                    for _ in range(10):
                        time.sleep(0)
            return result
        finally:
            self._running.pop(id(entry), None)

    def look(self) -> int:
        """Interrupts what runs for too long; how many calls that were."""
        late = [entry for entry in list(self._running.values()) if self._clock() - entry.since > self._timeout_s]
        caught = [entry for entry in late if entry.claim()]
        for entry in caught:
            try:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(entry.thread), ctypes.py_object(CandidateHungError)
                )
            finally:
                entry.sent = True
        return len(caught)
