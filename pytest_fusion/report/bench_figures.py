"""Costs of one measured call beside its reference, for reports; unmeasured ones are ``None``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.measure.timing.roofline import Bound, bound, share

# The usual method of measuring times; anything else is shown with the number.
RECORD = {"timer": "graph", "cache": "cold", "warm-up": "steady"}


@dataclass(frozen=True, slots=True)
class Figures:
    """One row of a test that is not its reference. ``test`` is a test's name without its file, ``case`` sizes and dtype
    as text, ``role`` is ``"fused"``, ``"fused backward"`` or ``"compiled"``. ``row``, the reference's ``other`` and
    hardware ``counters`` are JSON, empty if there are none. ``size``, bytes of the forward call's inputs and outputs,
    orders cases."""

    test: str
    case: str
    role: str
    row: Mapping[str, Any]
    other: Mapping[str, Any]
    size: int | None
    verdict: str = ""
    counters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def series(self) -> str:
        """``"fused"`` or ``"compiled"``: the first word of the role."""
        return self.role.partition(" ")[0]

    @property
    def phase(self) -> str:
        """The rest of the role: ``"backward"``, or nothing for the forward call."""
        return self.role.partition(" ")[2]

    @property
    def label(self) -> str:
        """The case, with the role if that is not the usual one."""
        role = self.phase if self.series == "fused" else self.role
        return f"{self.case}, {role}" if role else self.case

    @property
    def timed(self) -> bool:
        return bool(self.row.get("latency"))

    @property
    def fused_s(self) -> float | None:
        return _positive(self.row.get("latency") or {}, "fused_s")

    @property
    def reference_s(self) -> float | None:
        return _positive(self.row.get("latency") or {}, "reference_s")

    @property
    def speed_up(self) -> tuple[float, float, float] | None:
        """How many times faster than the reference, with the ends of its interval."""
        latency = self.row.get("latency") or {}
        found = [latency.get(name) for name in ("ratio", "high", "low")]
        # JSON has text for numbers that are not finite, and e to the 50 is no ratio of two times.
        logs = [value for value in found if isinstance(value, int | float) and abs(value) < 50]
        if len(logs) < len(found):
            return None
        middle, low, high = (math.exp(-value) for value in logs)
        return middle, low, high

    @property
    def unusual(self) -> str:
        """How the latency was measured if that is unusual: ``"timer events, cache warm"``."""
        method = (self.row.get("latency") or {}).get("method", {})
        return ", ".join(f"{name} {method[name]}" for name in RECORD if method.get(name, RECORD[name]) != RECORD[name])

    @property
    def moved(self) -> int | None:
        """Bytes of inputs and outputs, each once."""
        return self.fact("bytes.algorithmic")

    @property
    def flops(self) -> int | None:
        """Of the reference's matrix products: the work to do, however it is done."""
        return self.reference_fact("work.flops")

    @property
    def copy_share(self) -> float | None:
        return share(self.moved, self.fused_s, self.measure("copy_bytes_per_s"))

    @property
    def matmul_share(self) -> float | None:
        return share(self.flops, self.fused_s, self.measure("matmul_flops_per_s"))

    @property
    def bound(self) -> Bound | None:
        rates = [self.measure(name) for name in ("copy_bytes_per_s", "matmul_flops_per_s")]
        return bound(self.moved, self.flops, rates, [self.measure(name) for name in ("host_s", "span_s", "busy_s")])

    def fact(self, name: str) -> int | None:
        return _fact(self.row, name)

    def reference_fact(self, name: str) -> int | None:
        return _fact(self.other, name)

    def measure(self, name: str) -> float | None:
        return _positive(self.row.get("measures") or {}, name)


def figures(records: Iterable[TestRecord]) -> list[Figures]:
    """The measured calls of all tests, in the order of the run, and rows without a call (recompilations of a sweep)."""
    return [one for record in records if record.bench for one in _of(record)]


def _of(record: TestRecord) -> list[Figures]:
    rows = {(row["case"], row["role"]): row for row in record.bench.get("rows", ())}
    verdicts = {(one["case"], one["role"]): _verdict(one) for one in record.bench.get("compared", ())}
    counters = {(one["case"], one["role"]): one for one in record.bench.get("counters", ()) if "launches" in one}
    found = []
    for (case, role), row in rows.items():
        series, _, phase = role.partition(" ")
        if series == "reference":
            continue
        found.append(
            Figures(
                test=record.nodeid.rpartition("::")[2],
                case=case,
                role=role,
                row=row,
                other=rows.get((case, f"reference {phase}".rstrip()), {}),
                size=_fact(row, "bytes.algorithmic") or _fact(rows.get((case, "fused"), {}), "bytes.algorithmic"),
                verdict=verdicts.get((case, role), ""),
                counters=counters.get((case, role), {}),
            )
        )
    return found


def _verdict(compared: Mapping[str, Any]) -> str:
    """The verdict on a row; ``"accepted"`` if it regressed and this run writes the new baseline."""
    taken = any(change["verdict"] == "accepted" for change in compared.get("changes", ()))
    return "accepted" if taken else str(compared["verdict"])


def _fact(row: Mapping[str, Any], name: str) -> int | None:
    value = row.get("facts", {}).get(name)
    return value if isinstance(value, int) else None


def _positive(numbers: Mapping[str, Any], name: str) -> float | None:
    """A time or a rate, ``None`` if it is 0, which was not measured, or text, which JSON has for non-finite numbers."""
    value = numbers.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else None
