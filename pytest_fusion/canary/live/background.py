"""The one background thread of a process, for the files, clocks and results of its canaries."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from typing import Protocol


class Tended(Protocol):
    """An object with background work. ``tend`` must not block for long; what it raises is dropped."""

    @property
    def interval_s(self) -> float: ...

    def tend(self) -> None: ...

    def after_fork(self) -> None: ...

    def at_exit(self) -> None: ...


_lock = threading.Lock()
_wake = threading.Event()
_tended: weakref.WeakSet[Tended] = weakref.WeakSet()
_thread: threading.Thread | None = None


def add(one: Tended) -> None:
    """Calls ``one.tend`` every ``interval_s``, until it is removed or garbage collected."""
    global _thread
    with _lock:
        _tended.add(one)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_loop, name="pytest-fusion-canary", daemon=True)
            _thread.start()
    _wake.set()


def remove(one: Tended) -> None:
    with _lock:
        _tended.discard(one)


def _loop() -> None:
    while True:
        shortest = 60.0
        with _lock:
            refs = [weakref.ref(one) for one in _tended]
        for ref in refs:
            one = ref()
            if one is not None:
                shortest = min(shortest, one.interval_s)
                # An error here must not end the thread that can still roll back.
                with contextlib.suppress(Exception):
                    one.tend()
            del one
        _wake.wait(shortest)
        _wake.clear()


def _after_fork() -> None:
    """Restarts the thread with new locks: a forked child has no thread, and its locks may be held."""
    global _lock, _wake, _thread
    _lock, _wake, _thread = threading.Lock(), threading.Event(), None
    for one in list(_tended):
        with contextlib.suppress(Exception):
            one.after_fork()
            add(one)


def _at_exit() -> None:
    """Writes what is pending when a process ends normally."""
    with _lock:
        tended = list(_tended)
    for one in tended:
        with contextlib.suppress(Exception):
            one.at_exit()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
