"""Whether Triton's interpreter is on and corrected here, and how it differs from a GPU; imports almost nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from pytest_fusion.interpreter.scoped import listed


@dataclass(slots=True)
class LaneState:
    """``problem``: why results are missing or need care. ``version``: of the corrected Triton."""

    installed: bool = False
    problem: str | None = None
    version: str | None = None


STATE = LaneState()
_notes: dict[str, int] = {}
_rounded: list[dict[Any, None]] = []


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
    """Record a difference from a GPU's computation."""
    _notes[text] = _notes.get(text, 0) + 1


def notes() -> tuple[str, ...]:
    """The differences from a GPU since the process began, in the order of their first occurrence."""
    return tuple(_notes)


def counted_notes() -> dict[str, int]:
    """How often each note was recorded; the difference of two calls belongs to the code between them."""
    return dict(_notes)


def products_into(sites: dict[Any, None]) -> AbstractContextManager[object]:
    """Collect the lines of products whose float32 factors lose digits when a GPU rounds them to TF32."""
    return listed(_rounded, sites)


def product_rounded(site: Any, *, loses: Callable[[], bool]) -> None:
    """Report a product at a line; computes ``loses`` (digits) until it is true once."""
    if _rounded and site not in _rounded[-1] and loses():
        _rounded[-1][site] = None
