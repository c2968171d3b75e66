"""What was written where nothing may be written, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Zone = Literal["before", "after", "between"]


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of one tensor's surroundings that changed.

    ``zone`` is ``"before"`` the tensor's first own element, ``"after"`` its last one, or ``"between"`` them (row
    padding, skipped columns). ``elements`` is how far, in elements of storage, the changed element nearest to an own
    element lies from it: 1 is the very next one. ``count`` is the number of changed bytes found.
    """

    name: str
    zone: Zone
    elements: int
    count: int


@dataclass(frozen=True, slots=True)
class Change:
    """Own elements of one tensor whose bits changed: how many, and the index of the first."""

    name: str
    count: int
    first: tuple[int, ...]
