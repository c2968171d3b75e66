"""Scalars for JUnit XML, through ``item.user_properties`` (its writer reads those of the teardown report)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_fusion.report.phrases import worst_ratio
from pytest_fusion.report.record import TestRecord

Scalar = str | int | float
_TIMES = ("fused_s", "reference_s")
# A record has their logarithms.
_RATIOS = ("ratio", "low", "high")


def properties(record: TestRecord) -> list[tuple[str, Scalar]]:
    """``fusion_*`` and ``fusion.bench.<case>.<role>.<fact>`` values; only scalars, as JUnit writes ``str(value)``."""
    found: dict[str, Scalar | None] = {
        "fusion_verdict": record.verdict,
        "fusion_cases": record.cases,
        "fusion_rejected": sum(record.rejected.values()),
        "fusion_failed_check": record.failed_check,
        "fusion_cause": record.cause,
        "fusion_findings": ", ".join(dict.fromkeys(one["code"] for one in record.findings)) or None,
        "fusion_worst_ratio": worst_ratio(record),
        "fusion_grade": record.grade,
        "fusion_replay": record.replay,
        "fusion_off": ", ".join(record.off) or None,
        "fusion_canary": record.canary.get("verdict"),
    }
    return [*((name, value) for name, value in found.items() if value is not None), *_bench(record)]


def _bench(record: TestRecord) -> Iterator[tuple[str, Scalar]]:
    """Facts, measures and times of each row; ``latency.ratio`` is the fused call's time over the reference's."""
    for row in record.bench.get("rows", ()):
        stem = f"fusion.bench.{row['case']}.{row['role']}"
        for name, value in (*row.get("facts", {}).items(), *row.get("measures", {}).items(), *_latency(row)):
            if _is_number(value):
                yield f"{stem}.{name}", value
        counted = row.get("methods", {}).get("launches")
        if counted:
            yield f"{stem}.launches.method", str(counted)
    for one in record.bench.get("compared", ()):
        yield f"fusion.bench.{one['case']}.{one['role']}.verdict", str(one["verdict"])
    for one in record.bench.get("counters", ()):
        for name in ("dram_read_bytes", "dram_written_bytes"):
            if _is_number(one.get(name)):
                yield f"fusion.bench.{one['case']}.{one['role']}.counters.{name}", one[name]
    for one in record.bench.get("limits", ()):
        yield f"fusion.bench.{one['case']}.{one['role']}.limit.{one['limit']}", str(one["verdict"])


def _latency(row: Mapping[str, Any]) -> Iterator[tuple[str, Scalar]]:
    found = row.get("latency") or {}
    yield from ((f"latency.{name}", found[name]) for name in _TIMES if name in found)
    for name in _RATIOS:
        if _is_number(found.get(name)) and abs(found[name]) < 50:
            yield f"latency.{name}", math.exp(found[name])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
