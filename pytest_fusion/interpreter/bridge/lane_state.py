"""Whether Triton's interpreter is switched on and corrected in this process, and what it computed unlike a GPU.

A module without imports of the package: what `hook` installs reads it too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LaneState:
    """``problem``: why results are missing or need care. ``version``: of the corrected Triton."""

    installed: bool = False
    problem: str | None = None
    version: str | None = None


STATE = LaneState()
_notes: dict[str, int] = {}


def problem() -> str | None:
    """Why interpreted results are missing or need care; ``None`` without a problem."""
    return STATE.problem


def version() -> str | None:
    """The version of the corrected Triton; ``None`` before it was imported."""
    return STATE.version


def installed() -> bool:
    """Whether Triton was imported and corrected."""
    return STATE.installed


def note(text: str) -> None:
    """Record that something was computed otherwise than a GPU computes it."""
    _notes[text] = _notes.get(text, 0) + 1


def notes() -> tuple[str, ...]:
    """What was computed otherwise than on a GPU since the process began, in the order of its first time."""
    return tuple(_notes)


def counted_notes() -> dict[str, int]:
    """How often each note was recorded; the difference of two calls belongs to what ran between them."""
    return dict(_notes)
