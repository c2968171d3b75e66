"""Writes to memory where none are allowed, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Zone = Literal["before", "after", "between"]
# One stretch of a zone: ``elements``, ``farthest`` and ``count`` as in `Damage`.
Part = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of one tensor's surroundings that changed.

    ``zone`` is ``"before"`` the tensor's first own element, ``"after"`` its last one, or ``"between"`` them (row
    padding, skipped columns). ``elements`` and ``farthest`` are how far, in elements of storage, the changed elements
    nearest to an own element and farthest from any lie from it: 1 is the very next one. ``count`` is the number of
    changed bytes found, which may be fewer than were written: of what a load past another tensor brought, most bytes
    are the fill that lies here too.
    """

    name: str
    zone: Zone
    elements: int
    farthest: int
    count: int

    @classmethod
    def of(cls, name: str, zone: Zone, parts: Sequence[Part]) -> Damage:
        """The damage of several stretches of one zone."""
        nearest, farthest, counts = zip(*parts, strict=True)
        return cls(name, zone, min(nearest), max(farthest), sum(counts))


@dataclass(frozen=True, slots=True)
class Change:
    """Own elements of one tensor whose bits changed: how many, and the index of the first."""

    name: str
    count: int
    first: tuple[int, ...]
