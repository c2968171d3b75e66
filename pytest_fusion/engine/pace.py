"""`Pace`: how long a call of a longer row is likely to take, from what shorter ones took.

A kernel that loops over a row of 65,537 in blocks of 128, each with random numbers, interprets for longer than a case
may take. That is no hang, and a row of 4,097 shows almost the same. References can be slow too: scores grow with the
square of a sequence, and a loop in Python runs step by step in seven lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

CALL: Final = "a call"
REFERENCE: Final = "a run of the reference"
# A run expected to exceed this share of a case's seconds is not begun: a case is a dozen calls, some with backward, and
# one or two runs of the reference.
SHARES: Final = {CALL: 1 / 8, REFERENCE: 1 / 2}
# Shorter rows take no longer than a call's overhead, and between closer sizes chance makes the difference.
_SHORTEST, _APART = 1000, 2


class Pace:
    """``limit_s`` is what one case may take, and one call before it counts as endless."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        # For each run and dim, the two longest sizes so far, ascending: they separate overhead from growth.
        self._took: dict[tuple[str, str], list[tuple[int, float]]] = {}

    def note(self, choice: Mapping[str, Any], took_s: float, what: str = CALL) -> None:
        """Record that ``what``, one of ``SHARES``, took so many seconds in a case of this choice."""
        name, size = longest(choice)
        known = self._took.get((what, name), [(0, 0.0)])
        largest, before_s = known[-1]
        if size >= max(_SHORTEST, _APART * largest):
            self._took[what, name] = [known[-1], (size, took_s)]
        elif size >= largest > 0:
            # Other options at this size: rows in chunks of 4 instead of 4096.
            known[-1] = largest, max(before_s, took_s)

    def forbids(self, choice: Mapping[str, Any]) -> str:
        """Why a case of this choice is not begun; empty where it may be."""
        name, size = longest(choice)
        for what, share in SHARES.items():
            (shorter, before_s), (known, took_s) = self._took.get((what, name), [(0, 0.0)] * 2)
            if size < _APART * known or not known:
                continue
            expected_s = took_s + max(took_s - before_s, 0.0) * (size - known) / (known - shorter)
            if expected_s > share * self._limit_s:
                several = " of a dozen calls" if what == CALL else ""
                return (
                    f"{what} took {took_s:.2g} s at {name}={known}, so one at {size} may take {expected_s:.2g} s, "
                    f"where {self._limit_s:g} s are for a case{several}"
                )
        return ""


def longest(choice: Mapping[str, Any]) -> tuple[str, int]:
    """The dim with the largest size that a choice states; a size by name ("one", a batch) is never long."""
    sizes = {name[4:]: size for name, size in choice.items() if name.startswith("dim ") and isinstance(size, int)}
    return max(sizes.items(), key=lambda one: one[1], default=("", 0))
