"""How many kernels, copies and fills one call launches, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Method = Literal["graph", "profiler", "modelled"]


@dataclass(frozen=True, slots=True)
class Counts:
    """The launches of one call; ``memcpy`` and ``memset`` run on copy engines; ``names`` are the kernels' names,
    sorted, with their counts. ``method``: ``"graph"`` (nodes of a captured CUDA graph), ``"profiler"`` (CUPTI's
    records) or ``"modelled"`` (a lower bound from interpreted launches and torch operators). ``agreed``: a second
    method counted the same; ``None`` without one. ``doubts``: why the true number may be larger, or, for a modelled
    call, differ."""

    kernels: int
    memcpy: int
    memset: int
    names: tuple[tuple[str, int], ...]
    method: Method
    agreed: bool | None = None
    doubts: tuple[str, ...] = ()

    @property
    def totals(self) -> tuple[int, int, int]:
        """Kernels, copies, fills: two methods must agree on them."""
        return self.kernels, self.memcpy, self.memset

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "names": list(map(list, self.names)), "doubts": list(self.doubts)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Counts:
        names = tuple((str(name), int(count)) for name, count in data["names"])
        return cls(**{**data, "names": names, "doubts": tuple(data["doubts"])})


@dataclass(frozen=True, slots=True)
class Uncounted:
    """No number, with the reason: a wrong one would be compared exactly."""

    reason: str


def named(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Each name with its count, sorted by name."""
    return tuple(sorted(Counter(names).items()))
