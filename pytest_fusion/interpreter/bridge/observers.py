"""Who is told about launches, and what the lane has to say about how it computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pytest_fusion.interpreter.launch import Launch

_callbacks: list[Callable[[Launch], None]] = []
_notes: dict[str, int] = {}


@contextmanager
def observe(callback: Callable[[Launch], None]) -> Iterator[None]:
    """Call ``callback`` before each interpreted launch; what it raises propagates out of the launch."""
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


def announce(launch: Launch) -> None:
    """Tell every observer of ``launch``, oldest first."""
    for callback in tuple(_callbacks):
        callback(launch)


def watched() -> bool:
    """Whether anybody observes."""
    return bool(_callbacks)


def note(text: str) -> None:
    """Remember that something was computed otherwise than a GPU computes it."""
    _notes[text] = _notes.get(text, 0) + 1


def notes() -> tuple[str, ...]:
    """What was computed otherwise than on a GPU since the process began, in the order it was met."""
    return tuple(_notes)


def noted() -> int:
    """How often anything was noted since the process began."""
    return sum(_notes.values())


def counted_notes() -> dict[str, int]:
    """How often each was noted: what is new since an earlier answer belongs to what ran since."""
    return dict(_notes)
