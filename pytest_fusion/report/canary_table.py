"""Verdicts of a canary, as a table for the terminal and as rows for the page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_fusion.report.phrases import one_line
from pytest_fusion.report.record import TestRecord

# The verdict that needs attention first.
ORDER = ("rollback", "error", "nodata", "hold", "promote")
_COLOURS = {
    "rollback": {"red": True, "bold": True},
    "error": {"red": True},
    "nodata": {"yellow": True},
    "hold": {"yellow": True},
    "promote": {"green": True},
}
_MOST_PAIRS = 40
# Standings of a case that readers need not see, such as both passing.
_QUIET = ("passes", "not-asked")

Line = tuple[str, Mapping[str, bool]]


def canary_lines(records: Sequence[TestRecord]) -> list[Line]:
    """A line for each test, its reasons below, and the total; empty if no test was compared."""
    found = _compared(records)
    if not found:
        return []
    width = max(len(record.nodeid) for record in found)
    incumbents = dict.fromkeys(_incumbent(record.canary["incumbent"]) for record in found)
    lines: list[Line] = [(f"canary against {', '.join(incumbents)}", {"bold": True})]
    for record in found:
        comparison = record.canary
        verdict = comparison["verdict"]
        lines.append((f"{verdict:<9} {record.nodeid:<{width}}  {_figures(comparison)}", _COLOURS[verdict]))
        lines += [(f"          {one_line(reason)}", {}) for reason in comparison["reasons"]]
        lines += [(f"          note: {one_line(note)}", {}) for note in comparison["notes"]]
    lines += [(advice, {"yellow": True}) for advice in _advice(found)]
    counts = Counter(record.canary["verdict"] for record in found)
    total = ", ".join(f"{counts[name]} {name}" for name in ORDER if counts[name])
    lines.append((f"canary: {total}", _COLOURS[decision(records)]))
    return lines


def decision(records: Iterable[TestRecord]) -> str:
    """The gravest verdict of all tests; ``"nodata"`` if none was compared."""
    verdicts = {record.canary["verdict"] for record in records if record.canary}
    return next((name for name in ORDER if name in verdicts), "nodata")


def canary_rows(records: Sequence[TestRecord]) -> list[dict[str, Any]]:
    """The rows of the page, gravest first."""
    return [_row(record) for record in _compared(records)]


def _compared(records: Sequence[TestRecord]) -> list[TestRecord]:
    return sorted((r for r in records if r.canary), key=lambda r: ORDER.index(r.canary["verdict"]))


def _incumbent(about: Mapping[str, Any]) -> str:
    commit = str(about.get("commit", ""))[:12]
    return f"{about['text']} ({commit})" if commit and commit not in str(about["text"]) else str(about["text"])


def _figures(comparison: Mapping[str, Any]) -> str:
    counts = comparison["counts"]
    return ", ".join([f"{counts[name]} {name}" for name in counts if name != "not-asked"]) or "no case"


def _advice(records: Sequence[TestRecord]) -> list[str]:
    """How to get a decision without metrics that were not measured; undecided metrics need more cases instead."""
    missing = dict.fromkeys(
        metric["metric"]
        for record in records
        if record.canary["verdict"] == "hold"
        for metric in record.canary["metrics"]
        if metric["status"] == "nodata" and metric["value"] is None and metric["role"] != "muted"
    )
    if not missing:
        return []
    return [f"on hold: metrics were not measured; to decide without them: --fusion-canary-without {','.join(missing)}"]


def _row(record: TestRecord) -> dict[str, Any]:
    comparison = record.canary
    loud = [pair for pair in comparison["pairs"] if pair["standing"] not in _QUIET]
    return {
        "verdict": comparison["verdict"],
        "name": record.nodeid,
        "incumbent": _incumbent(comparison["incumbent"]),
        "reasons": tuple(comparison["reasons"]),
        "metrics": tuple((m["metric"], m["status"], m["role"], m["words"]) for m in comparison["metrics"]),
        "cases": _figures(comparison),
        "pairs": tuple(
            (p["standing"], p["text"], _arm(p["candidate"]), _arm(p["incumbent"]), p["reason"])
            for p in loud[:_MOST_PAIRS]
        ),
        "more": max(0, len(loud) - _MOST_PAIRS),
        "latency": tuple(map(_latency, comparison["latency"])),
        "notes": tuple(comparison["notes"]),
    }


def _latency(timing: Mapping[str, Any]) -> tuple[str, ...]:
    """Size, its share of the recorded calls, microseconds of both kernels, and their ratio with its interval."""
    ratio, low, high = (f"{math.exp(timing[name]):.3f}" for name in ("ratio", "low", "high"))
    share = f"{timing['share']:.1%}" if timing.get("share") else ""
    ours, theirs = (f"{1e6 * timing[name]:.4g}" for name in ("candidate_s", "incumbent_s"))
    return timing["text"], share, ours, theirs, f"{ratio} ({low} to {high})"


def _arm(ran: Mapping[str, Any]) -> str:
    return str(ran["verdict"] if ran["verdict"] == "pass" else f"{ran['verdict']}: {ran['check']}")
