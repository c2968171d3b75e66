"""`Evidence`: observations of a rollout in one or many processes, as counts that add up; JSON both ways."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pytest_fusion.canary.evidence.sequential import Scale

# The candidate beside the incumbent, or the incumbent beside itself (an A/A test of the judge).
Arm = Literal["candidate", "itself"]
_SCHEMA = 1


class Cell(NamedTuple):
    """The key under which observations are counted. ``bucket`` is a class of shapes, bounded in number."""

    metric: str
    bucket: str
    arm: Arm = "candidate"


@dataclass(frozen=True, slots=True)
class Tally:
    """How often each index of a metric's scale occurred; ``broken`` counts observations that were NaN."""

    counts: Mapping[int, int] = field(default_factory=dict)
    broken: int = 0

    def __post_init__(self) -> None:
        numbers = (*self.counts, *self.counts.values(), self.broken)
        if {*map(type, numbers)} != {int} or min(numbers) < 0:
            raise ValueError(f"indices and counts are integers from 0 on, not {dict(self.counts)}, {self.broken}")

    @property
    def seen(self) -> int:
        """Observations that were numbers."""
        return sum(self.counts.values())

    def __add__(self, other: Tally) -> Tally:
        counts = Counter(self.counts)
        counts.update(other.counts)
        return Tally(dict(sorted(counts.items())), self.broken + other.broken)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All observations of a rollout. Added evidence must be of disjoint observations: repeated ones count twice.
    ``calls`` has all calls of each bucket, compared or not: the weight of the bucket."""

    rollout: str
    calls: Mapping[str, int] = field(default_factory=dict)
    tallies: Mapping[Cell, Tally] = field(default_factory=dict)

    def __add__(self, other: Evidence) -> Evidence:
        """The sum. Raises ``ValueError`` for evidence of another rollout: another candidate, salt or rules."""
        if self.rollout != other.rollout:
            raise ValueError(f"evidence of rollouts {self.rollout!r} and {other.rollout!r} cannot be added")
        calls = Counter(self.calls)
        calls.update(other.calls)
        tallies = dict(self.tallies)
        for cell, tally in other.tallies.items():
            tallies[cell] = tallies[cell] + tally if cell in tallies else tally
        return Evidence(self.rollout, dict(sorted(calls.items())), dict(sorted(tallies.items())))

    def since(self, earlier: Evidence) -> Evidence:
        """The evidence after ``earlier``, which this one contains: ``earlier + later.since(earlier) == later``."""
        calls = {bucket: count - earlier.calls.get(bucket, 0) for bucket, count in self.calls.items()}
        tallies: dict[Cell, Tally] = {}
        for cell, tally in self.tallies.items():
            before = earlier.tallies.get(cell, Tally())
            counts = {index: count - before.counts.get(index, 0) for index, count in tally.counts.items()}
            fresh = Tally({index: count for index, count in counts.items() if count}, tally.broken - before.broken)
            if fresh.counts or fresh.broken:
                tallies[cell] = fresh
        return Evidence(self.rollout, {bucket: count for bucket, count in calls.items() if count}, tallies)

    def buckets(self) -> list[str]:
        """All buckets with calls or observations, sorted."""
        return sorted({*self.calls, *(cell.bucket for cell in self.tallies)})

    def pooled(self, metric: str, arm: Arm = "candidate") -> Tally:
        """The tally of a metric over all buckets."""
        found = (tally for cell, tally in self.tallies.items() if (cell.metric, cell.arm) == (metric, arm))
        return sum(found, Tally())

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": _SCHEMA,
            "rollout": self.rollout,
            "calls": dict(sorted(self.calls.items())),
            "tallies": [
                {
                    **cell._asdict(),
                    "counts": {str(index): count for index, count in sorted(tally.counts.items())},
                    "broken": tally.broken,
                }
                for cell, tally in sorted(self.tallies.items())
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evidence:
        """Reads what `as_json` made. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for other data."""
        if data["schema"] != _SCHEMA:
            raise ValueError(f"evidence of schema {data['schema']!r}, and {_SCHEMA} is known")
        tallies: dict[Cell, Tally] = {}
        for one in data["tallies"]:
            if one["arm"] not in ("candidate", "itself"):
                raise ValueError(f"the arm {one['arm']!r} is neither 'candidate' nor 'itself'")
            cell = Cell(str(one["metric"]), str(one["bucket"]), one["arm"])
            tally = Tally({int(index): _count(count) for index, count in one["counts"].items()}, _count(one["broken"]))
            tallies[cell] = tallies[cell] + tally if cell in tallies else tally
        calls = {str(bucket): _count(count) for bucket, count in data["calls"].items()}
        return cls(str(data["rollout"]), calls, tallies)


class Collector:
    """Counts the observations of one process, from any thread. A metric without a scale raises ``KeyError``."""

    def __init__(self, rollout: str, scales: Mapping[str, Scale]) -> None:
        self._rollout = rollout
        self._scales = dict(scales)
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._counts: dict[Cell, Counter[int]] = {}
        self._broken: Counter[Cell] = Counter()

    def call(self, bucket: str, many: int = 1) -> None:
        """Counts calls, compared or not."""
        with self._lock:
            self._calls[bucket] += many

    def add(self, metric: str, bucket: str, value: float, arm: Arm = "candidate", many: int = 1) -> None:
        """Counts an observation, or ``many`` equal ones. NaN counts as broken, infinity as the end of the scale."""
        cell = Cell(metric, bucket, arm)
        scale = self._scales[metric]
        with self._lock:
            counts = self._counts.setdefault(cell, Counter())
            if math.isnan(value):
                self._broken[cell] += many
            else:
                counts[scale.index(value)] += many

    def evidence(self) -> Evidence:
        with self._lock:
            tallies = {
                cell: Tally(dict(sorted(counts.items())), self._broken[cell])
                for cell, counts in sorted(self._counts.items())
            }
            return Evidence(self._rollout, dict(sorted(self._calls.items())), tallies)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a count is an integer from 0 on, not {value!r}")
    return value
