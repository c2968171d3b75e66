"""The status of rollouts as text and JSON: states, counts, a row for each bucket, and the judge's verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_fusion.canary.evidence.evidence_counts import Cell, Evidence, Tally
from pytest_fusion.canary.evidence.fleet import Process, Rollout, bounded
from pytest_fusion.canary.evidence.promotion_rules import Rules
from pytest_fusion.canary.evidence.rollout_judge import Judgement
from pytest_fusion.canary.evidence.sequential import percent

_SCHEMA = 1
# Rows of processes and of buckets; the rest is summed up in a line.
_ROWS = 20
_REASONS = 12
_HEADER = ("bucket", "calls", "share", "compared", "violations", "exceptions", "faults", "error", "latency", "itself")


def as_json(
    rollouts: Sequence[Rollout], judgements: Mapping[tuple[str, str], Judgement], left: Sequence[str]
) -> dict[str, Any]:
    """``{"schema": 1, "canaries": [...], "left_out": [...]}``; keys are added, never renamed."""
    return {
        "schema": _SCHEMA,
        "canaries": [_rollout_json(one, judgements.get((one.name, one.rollout))) for one in rollouts],
        "left_out": list(left),
    }


def _rollout_json(one: Rollout, judgement: Judgement | None) -> dict[str, Any]:
    return {
        **{name: getattr(one, name) for name in one.__slots__},
        "states": dict(sorted(Counter(process.state for process in one.processes.values()).items())),
        "processes": [{name: getattr(p, name) for name in p.__slots__} for p in one.processes.values()],
        "served": [[state, arm, many] for (state, arm), many in one.served.items()],
        "evidence": one.evidence.as_json(),
        "judgement": None if judgement is None else judgement.as_json(),
    }


def lines(one: Rollout, judgement: Judgement | None, rules: Rules, now: float) -> Iterator[str]:
    """A rollout as text; ``now`` is in seconds since the epoch."""
    states = Counter(process.state for process in one.processes.values())
    listed = ", ".join(f"{state} in {many}" for state, many in sorted(states.items()))
    yield f"{one.name}, rollout {one.rollout}: {one.incumbent} -> {one.candidate}"
    yield f"  processes: {listed}"
    newest = sorted(one.processes.values(), key=lambda process: -process.last)
    yield from (f"    {_process(process, now)}" for process in newest[:_ROWS])
    if len(newest) > _ROWS:
        yield f"    and {len(newest) - _ROWS} processes with older events"
    served = ", ".join(f"{arm} {many:,} in {state}" for (state, arm), many in one.served.items() if many)
    yield f"  calls: {served or 'none'}"
    if one.counts:
        yield f"  counts: {', '.join(f'{what} {many:,}' for what, many in one.counts.items())}"
    yield from _table(bounded(one.evidence, rules.most_buckets), rules)
    yield from (f"  failure: {text}" for text in one.failures)
    yield from (f"  {text}" for text in one.trips)
    yield from (f"  {text}" for text in one.gaps)
    if judgement is not None:
        yield f"  verdict: {judgement.decision}"
        yield from (f"    {reason}" for reason in judgement.reasons[:_REASONS])
        if len(judgement.reasons) > _REASONS:
            yield f"    and {len(judgement.reasons) - _REASONS} more; --json has them"


def _process(process: Process, now: float) -> str:
    return f"{process.process}  {process.state}  last event {max(0.0, now - process.last):,.0f} s ago"


def _table(evidence: Evidence, rules: Rules) -> Iterator[str]:
    if not evidence.buckets():
        return
    total = sum(evidence.calls.values())
    names = sorted(evidence.buckets(), key=lambda bucket: (-evidence.calls.get(bucket, 0), bucket))
    rows = [_HEADER, *(_row(evidence, rules, name, total) for name in names[:_ROWS])]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    for name, *cells in rows:
        yield "  ".join((f"    {name.ljust(first)}", *map(str.rjust, cells, others)))
    if len(names) > _ROWS:
        rest = sum(evidence.calls.get(name, 0) for name in names[_ROWS:])
        yield f"    and {len(names) - _ROWS} buckets with {rest:,} calls"


def _row(evidence: Evidence, rules: Rules, bucket: str, total: int) -> tuple[str, ...]:
    calls = evidence.calls.get(bucket, 0)

    def tally(metric: str, arm: Any = "candidate") -> Tally:
        return evidence.tallies.get(Cell(metric, bucket, arm), Tally())

    def ratio(metric: str, arm: Any = "candidate") -> str:
        seen, scale = tally(metric, arm), rules.scales().get(metric)
        return percent(seen.counts, scale) if scale and seen.seen else "-"

    share = f"{100 * calls / total:.1f} %" if total else "-"
    events = [f"{tally(metric).counts.get(1, 0):,}" for metric in ("violation", "exception", "fault")]
    ratios = ratio("error_ratio"), ratio("latency_ratio"), ratio("latency_ratio", "itself")
    return (bucket, f"{calls:,}", share, f"{tally('violation').seen:,}", *events, *ratios)
