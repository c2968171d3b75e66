"""How many kernels, copies and fills one call launches, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Method = Literal["graph", "profiler", "modelled"]


@dataclass(frozen=True, slots=True)
class Counts:
    """The launches of one call.

    ``kernels`` on the device, ``memcpy`` and ``memset`` that its copy engines do; ``names`` are the kernels' names with
    how often each is launched, sorted by name. ``method``: ``"graph"`` for the nodes of a captured CUDA graph,
    ``"profiler"`` for CUPTI's records, ``"modelled"`` for a lower bound from interpreted launches and operators of
    torch. ``agreed``: a second method counted the same; ``None`` where none was asked. ``doubts``: what the method
    cannot see of this call, so that the true number may be larger, or of a modelled call of another kind.
    """

    kernels: int
    memcpy: int
    memset: int
    names: tuple[tuple[str, int], ...]
    method: Method
    agreed: bool | None = None
    doubts: tuple[str, ...] = ()

    @property
    def totals(self) -> tuple[int, int, int]:
        """Kernels, copies, fills: what must be equal between two methods."""
        return self.kernels, self.memcpy, self.memset

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "names": list(map(list, self.names)), "doubts": list(self.doubts)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Counts:
        """Reads what ``as_json`` made, from another process of this package."""
        names = tuple((str(name), int(count)) for name, count in data["names"])
        return cls(**{**data, "names": names, "doubts": tuple(data["doubts"])})


@dataclass(frozen=True, slots=True)
class Uncounted:
    """No number, and why: a wrong one would be compared exactly."""

    reason: str


def named(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Each name with how often it comes, sorted by name."""
    return tuple(sorted(Counter(names).items()))
