"""`Rollout`: the evidence of all processes, on all machines with logs in a folder, and its status as text and JSON."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_fusion.canary.evidence.events import read
from pytest_fusion.canary.evidence.evidence_counts import Cell, Evidence, Tally
from pytest_fusion.canary.evidence.promotion_rules import RULES, Rules
from pytest_fusion.canary.evidence.rollout_judge import Judgement, judge
from pytest_fusion.canary.evidence.sequential import percent
from pytest_fusion.canary.live.calls.arguments import OTHERS
from pytest_fusion.canary.live.state import mark_of
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.wording import brief, did_you_mean


class Chain:
    """Adds up pieces of evidence, which may come in any order; a repeated piece counts once."""

    def __init__(self, rollout: str) -> None:
        self._rollout = rollout
        # (first block, last block) -> (number of parts, the parts by number)
        self._pieces: dict[tuple[int, int], tuple[int, dict[int, Evidence]]] = {}
        self._last = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds a ``block`` or ``total`` event; :meth:`evidence` reports an unreadable one as missing."""
        block = event.get("block")
        if type(block) is not int:
            return
        self._last = max(self._last, block)
        try:
            since, part, parts = int(event["since"]), int(event["part"]), int(event["parts"])
            evidence = Evidence.from_json(event["evidence"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return
        if evidence.rollout == self._rollout and 1 <= since <= block and 1 <= part <= parts:
            self._pieces.setdefault((since, block), (parts, {}))[1][part] = evidence

    def evidence(self) -> tuple[Evidence, list[tuple[int, int]]]:
        """The sum of all pieces, and the ranges (first, last) of missing blocks."""
        whole = {span: list(found.values()) for span, (parts, found) in self._pieces.items() if len(found) == parts}
        total, at = Evidence(self._rollout), 0
        missing: list[tuple[int, int]] = []
        while at < self._last:
            ends = [end for start, end in whole if start == at + 1]
            if ends:
                for piece in whole[at + 1, max(ends)]:
                    total += piece
                at = max(ends)
                continue
            following = min((start for start, _ in whole if start > at + 1), default=self._last + 1)
            missing.append((at + 1, following - 1))
            at = following - 1
        return total, missing


# Failures that are shown; all of them are in the logs.
_FAILURES = 5


@dataclass(slots=True)
class Process:
    """The state of a canary in one process; ``last`` is the time of its last event (seconds since the epoch)."""

    process: str
    pid: int
    state: str
    last: float
    tripped: str | None = None
    lost: int = 0


@dataclass(slots=True)
class Rollout:
    """A rollout of one canary in all processes. ``gaps`` are sentences about missing evidence.
    ``served`` counts calls by state and kernel, ``counts`` has the other counts of the blocks."""

    name: str
    rollout: str
    incumbent: str = "?"
    candidate: str = "?"
    began: float = 0.0
    last: float = 0.0
    current: bool = False
    processes: dict[str, Process] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=lambda: Evidence(""))
    gaps: tuple[str, ...] = ()
    trips: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    served: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


class _RolloutBuilder:
    """Builds a `Rollout` from its events."""

    def __init__(self, name: str, rollout: str) -> None:
        self.rollout = Rollout(name, rollout, evidence=Evidence(rollout))
        self.chains: dict[str, Chain] = {}
        self.failures: deque[tuple[float, str]] = deque(maxlen=1000)
        self._counted: set[tuple[str, int]] = set()

    def add(self, event: Mapping[str, Any], process: str) -> None:
        kind, time, found = event["event"], float(event["time"]), self.rollout
        if kind in ("start", "rearm"):
            found.began = min(found.began or time, time)
        found.incumbent = str(event.get("incumbent", found.incumbent))
        found.candidate = str(event.get("candidate", found.candidate))
        found.last = max(found.last, time)
        here = found.processes.setdefault(process, Process(process, int(event["pid"]), "?", time))
        if time >= here.last:
            here.last = time
            here.state = str(event.get("now") or event.get("state") or here.state)
        if kind == "trip" or event.get("tripped"):
            here.tripped = str(event.get("reason") or event.get("tripped"))
            here.state = "tripped"
        if kind == "failure":
            self.failures.append((time, f"{event.get('result')} in {event.get('bucket')}: {event.get('reason')}"))
        if kind in ("block", "total"):
            self.chains.setdefault(process, Chain(found.rollout)).add(event)
        if kind == "block" and event.get("part") == 1 and (process, event.get("block")) not in self._counted:
            self._counted.add((process, event["block"]))
            # Another version may write these in another form, which is left out; the evidence still counts.
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                found.served.update({(str(state), str(arm)): int(many) for state, arm, many in event["served"]})
                found.counts.update({str(what): int(many) for what, many in event["new"].items()})

    def build(self, folder: Path) -> Rollout:
        found = self.rollout
        for process, chain in sorted(self.chains.items()):
            evidence, missing = chain.evidence()
            found.evidence += evidence
            found.gaps += tuple(
                f"the log of {process} lacks evidence: blocks {first} to {last} were lost to a full disk, to its "
                "rotation (Policy(log_mib=...)), or are not yet written"
                for first, last in missing
            )
        tripped = sorted((name, one.tripped) for name, one in found.processes.items() if one.tripped is not None)
        found.trips = tuple(f"tripped by {name}: {reason}" for name, reason in tripped)
        if not tripped:
            with contextlib.suppress(OSError):
                mark = mark_of(folder, found.name, found.rollout)
                found.trips = (f"tripped, by its mark: {mark.read_text(encoding='utf-8', errors='replace').strip()}",)
        found.failures = tuple(text for _, text in sorted(self.failures)[-_FAILURES:])
        found.served = Counter(dict(sorted(found.served.items())))
        found.counts = Counter(dict(sorted(found.counts.items())))
        return found


def gather(folder: Path) -> tuple[list[Rollout], list[str]]:
    """The rollouts in the logs below ``folder``, and a sentence for each file left out. Raises ``CanaryError``."""
    if not folder.is_dir():
        raise CanaryError(f"{folder} is not a folder; give the one that Policy(directory=...) names")
    making: dict[tuple[str, str], _RolloutBuilder] = {}
    left: list[str] = []
    for path in sorted(folder.rglob("*.jsonl")):
        try:
            ours = _read(path, making)
        except OSError as error:
            left.append(f"{path}: {brief(error)}")
            continue
        if not ours:
            left.append(f"{path}: no event of a canary is in it")
    rollouts = sorted((one.build(folder) for one in making.values()), key=lambda one: (one.name, one.last))
    last = {one.name: one for one in rollouts}
    return [replace(one, current=last[one.name] is one) for one in rollouts], left


def _read(path: Path, making: dict[tuple[str, str], _RolloutBuilder]) -> int:
    """Adds the events of a file and returns the number of them that are of canaries."""
    stem = path.name.removesuffix(".jsonl").removesuffix(".1")
    rollouts: dict[str, str] = {}
    many = 0
    for event in read(path):
        texts = isinstance(event.get("name"), str) and isinstance(event.get("event"), str)
        if not texts or type(event.get("pid")) is not int or type(event.get("time")) not in (int, float):
            continue
        many += 1
        name = event["name"]
        # Events without a rollout belong to the one that began last; before the first, they are left out.
        rollout = rollouts[name] = str(event.get("rollout", rollouts.get(name, "")))
        if not rollout:
            continue
        process = str(event.get("process", stem))
        making.setdefault((name, rollout), _RolloutBuilder(name, rollout)).add(event, process)
    return many


def select(rollouts: list[Rollout], name: str | None, rollout: str | None) -> list[Rollout]:
    """The current rollouts, or all with the id ``rollout``, of one or all canaries. Raises ``CanaryError`` for none."""
    if name is not None and name not in {one.name for one in rollouts}:
        raise CanaryError(f"no canary {name!r} has a log here{did_you_mean(name, {one.name for one in rollouts})}")
    named = [one for one in rollouts if name in (None, one.name)]
    found = [one for one in named if (one.current if rollout is None else one.rollout == rollout)]
    if named and not found:
        near = did_you_mean(str(rollout), {one.rollout for one in named})
        raise CanaryError(f"no rollout {rollout!r} has a log here{near}")
    return found


def bounded(evidence: Evidence, most: int) -> Evidence:
    """The evidence with at most ``most`` buckets, the rest merged: several processes may together have more."""
    if len(evidence.buckets()) <= most:
        return evidence
    by_calls = sorted(evidence.buckets(), key=lambda bucket: (-evidence.calls.get(bucket, 0), bucket))
    separate = {*[bucket for bucket in by_calls if bucket != OTHERS][: most - 1]}
    total = Evidence(evidence.rollout)
    for bucket, many in evidence.calls.items():
        total += Evidence(evidence.rollout, {bucket if bucket in separate else OTHERS: many})
    for cell, tally in evidence.tallies.items():
        where = cell if cell.bucket in separate else cell._replace(bucket=OTHERS)
        total += Evidence(evidence.rollout, {}, {where: tally})
    return total


def verdict(rollout: Rollout, rules: Rules = RULES) -> Judgement:
    """The judge's verdict on a rollout. A trip means *rollback*, missing evidence means *error*."""
    found = judge(bounded(rollout.evidence, rules.most_buckets), rules)
    if rollout.trips:
        return replace(found, decision="rollback", reasons=rollout.trips)
    if rollout.gaps and found.decision != "rollback":
        return replace(found, decision="error", reasons=rollout.gaps)
    return found


_SCHEMA = 1
# Rows of processes and of buckets; the rest is summed up in a line.
_ROWS = 20
_REASONS = 12
_HEADER = ("bucket", "calls", "share", "compared", "violations", "exceptions", "faults", "error", "latency", "itself")


def as_json(
    rollouts: Sequence[Rollout], judgements: Mapping[tuple[str, str], Judgement], left: Sequence[str]
) -> dict[str, Any]:
    """``{"schema": 1, "canaries": [...], "left_out": [...]}``; keys may be added, not renamed."""
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
    for process in newest[:_ROWS]:
        yield f"    {process.process}  {process.state}  last event {max(0.0, now - process.last):,.0f} s ago"
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
