"""One thing that the device did within a call, as plain data, and how long a call keeps it busy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Activity(NamedTuple):
    """Its name and ``kind`` (``"kernel"``, ``"memcpy"``, ``"memset"``), and when, in seconds.

    ``start`` counts from the beginning of the first one of the call.
    """

    name: str
    kind: str
    start: float
    seconds: float


def busy(timeline: Iterable[Activity]) -> float:
    """Seconds in which anything ran: activities of several streams may overlap."""
    total, reached = 0.0, 0.0
    for one in sorted(timeline, key=lambda activity: activity.start):
        end = one.start + one.seconds
        total += max(0.0, end - max(one.start, reached))
        reached = max(reached, end)
    return total
