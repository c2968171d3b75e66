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
    """Bytes around one tensor that changed, in ``zone`` ``"before"`` its first own element, ``"after"`` its last, or
    ``"between"`` them (row padding, skipped columns). ``elements`` and ``farthest`` are the least and the greatest
    distance of a changed element from the own elements, in elements: 1 is the next one. ``count`` is the changed bytes;
    written fill bytes do not show."""

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
