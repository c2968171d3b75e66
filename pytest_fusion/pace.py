"""`Pace`: what a call of a longer row is likely to take, from what shorter ones took.

A kernel that loops over a row of 65,537 in blocks of 128, each with its random numbers, interprets for longer than a
case may take: that is no hang, and the case tells next to nothing that one of 4,097 did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A case is a dozen calls, some of which go backward: the share of its seconds from which on one is not begun.
_SHARE = 1 / 8
# Shorter rows take what each call takes, and of sizes that lie close together chance tells the difference.
_SHORTEST, _APART = 1000, 2


class Pace:
    """``limit_s`` is what one case may take, and one call before it passes for one that never ends."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        # By dim, the two longest sizes so far, ascending: what does not grow with the size is told from what does.
        self._took: dict[str, list[tuple[int, float]]] = {}

    def note(self, choice: Mapping[str, Any], call_s: float) -> None:
        """A call of a case of this choice took so many seconds."""
        name, size = _longest(choice)
        known = self._took.get(name, [(0, 0.0)])
        longest, took_s = known[-1]
        if size >= max(_SHORTEST, _APART * longest):
            self._took[name] = [known[-1], (size, call_s)]
        elif size >= longest > 0:
            # Other options at such a size: rows in chunks of 4 instead of 4096.
            known[-1] = longest, max(took_s, call_s)

    def forbids(self, choice: Mapping[str, Any]) -> str:
        """Why a case of this choice is not begun; empty where it may be."""
        name, size = _longest(choice)
        (shorter, before_s), (known, took_s) = self._took.get(name, [(0, 0.0)] * 2)
        if size < _APART * known or not known:
            return ""
        expected_s = took_s + max(took_s - before_s, 0.0) * (size - known) / (known - shorter)
        if expected_s <= _SHARE * self._limit_s:
            return ""
        return (
            f"a call took {took_s:.2g} s at {name}={known}, so one at {size} may take {expected_s:.2g} s, where "
            f"{self._limit_s:g} s are for a case of a dozen calls"
        )


def _longest(choice: Mapping[str, Any]) -> tuple[str, int]:
    sizes = {name[4:]: size for name, size in choice.items() if name.startswith("dim ") and isinstance(size, int)}
    return max(sizes.items(), key=lambda one: one[1], default=("", 0))
