"""`Pace`: what a call of a longer row is likely to take, from what shorter ones took.

A kernel that loops over a row of 65,537 in blocks of 128, each with its random numbers, interprets for longer than a
case may take: that is no hang, and the case tells next to nothing that one of 4,097 did not. The same is true of a
reference: its scores grow with the square of a sequence, and a loop of its own runs step by step in seven lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

CALL: Final = "a call"
REFERENCE: Final = "a run of the reference"
# The share of a case's seconds from which on one is not begun. A case is a dozen calls, some of which go backward, and
# a run or two of the reference, each of which may take that long alone.
SHARES: Final = {CALL: 1 / 8, REFERENCE: 1 / 2}
# Shorter rows take what each call takes, and of sizes that lie close together chance tells the difference.
_SHORTEST, _APART = 1000, 2


class Pace:
    """``limit_s`` is what one case may take, and one call before it passes for one that never ends."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        # By what is run and by dim, the two longest sizes so far, ascending: what does not grow with the size is told
        # from what does.
        self._took: dict[tuple[str, str], list[tuple[int, float]]] = {}

    def note(self, choice: Mapping[str, Any], took_s: float, what: str = CALL) -> None:
        """It took so many seconds in a case of this choice; ``what`` is one of ``SHARES``."""
        name, size = longest(choice)
        known = self._took.get((what, name), [(0, 0.0)])
        largest, before_s = known[-1]
        if size >= max(_SHORTEST, _APART * largest):
            self._took[what, name] = [known[-1], (size, took_s)]
        elif size >= largest > 0:
            # Other options at such a size: rows in chunks of 4 instead of 4096.
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
    """The dim with the largest size that a choice states; a size by name ("one", a batch) is never a long one."""
    sizes = {name[4:]: size for name, size in choice.items() if name.startswith("dim ") and isinstance(size, int)}
    return max(sizes.items(), key=lambda one: one[1], default=("", 0))
