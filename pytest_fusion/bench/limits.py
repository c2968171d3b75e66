"""Compares measured rows with `bench_limits=`: over, within, or not known; needs no baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_fusion.bench.baseline.bootstrap import FEWEST
from pytest_fusion.bench.baseline.facts import group
from pytest_fusion.bench.baseline.row import Key, Latency, Row
from pytest_fusion.run.measure.timing.roofline import share
from pytest_fusion.spec.wording import grouped, with_number

LimitStatus = Literal["over", "within", "unknown"]

# Uncertainty of a time alone, as a log: medians of ten runs of a 9.7 us kernel differ by 1 % on one H200, and the
# ceiling is measured no better. A ratio has its own interval.
_ALONE = 0.02
# As in the judgement of latencies: nothing counts below so many times the A/A spread.
_SPREADS = 3
_USUAL = {"timer": "graph", "cache": "cold"}


@dataclass(frozen=True, slots=True)
class Limited:
    """The verdict on one limit in one row; ``limit`` is its name, ``reason`` what was found and allowed."""

    key: Key
    limit: str
    verdict: LimitStatus
    reason: str

    @property
    def failed(self) -> bool:
        return self.verdict == "over"

    def as_json(self) -> dict[str, str]:
        key = self.key
        return {
            "case": key.case, "role": key.role, "limit": self.limit, "verdict": self.verdict, "reason": self.reason
        }  # fmt: skip


def limited(rows: Sequence[Row], limits: Mapping[str, float], *, noisy: str = "") -> list[Limited]:
    """Every limit in every row of a forward call of the kernel; ``"unknown"`` if nothing was measured, or the value is
    too close to the limit to decide. ``noisy`` says why no latency of this machine is judged."""
    found: list[Limited] = []
    for row in rows:
        # A row of no call, such as the recompilations of a sweep, has neither of them.
        if row.role != "fused" or not (row.latency or {"bytes", "launches", "memory"} & set(map(group, row.facts))):
            continue
        for name, allowed in limits.items():
            verdict, reason = _peak(row, int(allowed)) if name == "peak_memory" else _time(row, name, allowed, noisy)
            found.append(Limited(row.key, name, verdict, f"{name}: {reason}"))
    return found


def notes(found: Sequence[Limited]) -> list[str]:
    """The limits that could not be judged, each reason once, with the number of cases."""
    cases = grouped((one.reason, one.key.case) for one in found if one.verdict == "unknown")
    return [f"bench_limits not judged in {with_number(same)}: {reason}" for reason, same in cases.items()]


def _time(row: Row, name: str, allowed: float, noisy: str) -> tuple[LimitStatus, str]:
    latency = row.latency
    if latency is None:
        return "unknown", "no latency was measured; interpreted kernels have none, a GPU is needed"
    if noisy:
        return "unknown", noisy
    if latency.aa is None:
        return "unknown", "this machine was not measured against itself, so no latency is judged"
    return _ratio(latency, allowed) if name == "latency_ratio" else _bandwidth(row, latency, allowed)


def _ratio(latency: Latency, allowed: float) -> tuple[LimitStatus, str]:
    if len(latency.blocks) < FEWEST:
        return "unknown", f"{len(latency.blocks)} blocks were measured, and {FEWEST} are needed for an interval"
    timer = latency.method.get("timer", "")
    if "/" in timer:
        # Events hold the gaps of the host, a graph does not.
        return "unknown", f"the two calls were timed in two ways ({timer}), which do not compare"
    found, low, high = (math.exp(value) for value in (latency.ratio, latency.low, latency.high))
    text = f"{found:.3g} times the reference's time ({low:.3g} to {high:.3g}), at most {allowed:g} is allowed"
    apart = abs(latency.ratio - math.log(allowed)) > _SPREADS * (latency.aa or 0.0)
    if apart and low > allowed:
        return "over", text
    if apart and high < allowed:
        return "within", text
    return "unknown", f"{text}: too close to decide; more time for each case narrows the interval"


def _bandwidth(row: Row, latency: Latency, allowed: float) -> tuple[LimitStatus, str]:
    moved, ceiling = row.facts.get("bytes.algorithmic"), row.measures.get("copy_bytes_per_s")
    found = share(moved, latency.fused_s, ceiling)
    if found is None:
        lacks = "the bytes of inputs and outputs are not known" if not moved else "no copy bandwidth was measured"
        return "unknown", f"{lacks if latency.fused_s else 'the time is zero'}, so there is no share of it"
    odd = [
        f"{name} {latency.method[name]}" for name in _USUAL if latency.method.get(name, _USUAL[name]) != _USUAL[name]
    ]
    if odd:
        return "unknown", f"timed otherwise ({', '.join(odd)}) than the copy that it is a share of"
    rate = (moved or 0) / latency.fused_s
    reached = f"{_rate(rate)} is {100 * found:.3g} % of the {_rate(ceiling or 0.0)} of a copy"
    text = f"{reached}, at least {100 * allowed:.3g} % is required"
    margin = max(_SPREADS * (latency.aa or 0.0), _ALONE)
    away = math.log(found / allowed)
    if abs(away) <= margin:
        return "unknown", f"{text}: too close to decide"
    return ("within" if away > 0 else "over"), text


def _peak(row: Row, allowed: int) -> tuple[LimitStatus, str]:
    found = row.facts.get("memory.peak")
    if found is None:
        return "unknown", "no device memory was measured; a GPU is needed"
    text = f"{_size(found)} above the inputs, at most {_size(allowed)} is allowed"
    return ("over" if found > allowed else "within"), text


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e12:.3g} TB/s" if bytes_per_s >= 1e12 else f"{bytes_per_s / 1e9:.3g} GB/s"


def _size(size: int) -> str:
    """Exact bytes, with a readable unit: ``"67,108,865 B (64.0 MiB)"``."""
    return f"{size:,} B ({size / 2**20:.1f} MiB)" if size >= 2**20 else f"{size:,} B"
