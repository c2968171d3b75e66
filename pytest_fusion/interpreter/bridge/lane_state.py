"""Whether Triton's interpreter is switched on and corrected in this process; `hook` writes it, others read it.

A module of its own, because what `hook` installs (`named_device`, by way of `launcher`) asks for it too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LaneState:
    """``problem``: why results are missing or to be read with care. ``version``: of the corrected Triton."""

    installed: bool = False
    problem: str | None = None
    version: str | None = None


STATE = LaneState()


def problem() -> str | None:
    """Why interpreted results are missing or to be read with care; ``None`` when there is nothing to say."""
    return STATE.problem


def version() -> str | None:
    """The version of the corrected Triton; ``None`` before it was imported."""
    return STATE.version


def installed() -> bool:
    """Whether Triton was imported and corrected."""
    return STATE.installed
