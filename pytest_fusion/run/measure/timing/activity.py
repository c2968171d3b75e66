"""One thing that the device did within a call, as plain data."""

from __future__ import annotations

from typing import NamedTuple


class Activity(NamedTuple):
    """Its name and ``kind`` (``"kernel"``, ``"memcpy"``, ``"memset"``), and when, in seconds.

    ``start`` counts from the beginning of the first one of the call.
    """

    name: str
    kind: str
    start: float
    seconds: float
