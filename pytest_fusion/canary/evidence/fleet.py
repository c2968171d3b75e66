"""`Rollout`: the evidence of all processes, on all machines with logs in a folder, about one rollout."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_fusion.canary.evidence.events import read
from pytest_fusion.canary.evidence.evidence_counts import Evidence
from pytest_fusion.canary.evidence.promotion_rules import RULES, Rules
from pytest_fusion.canary.evidence.rollout_judge import Judgement, judge
from pytest_fusion.canary.live.call_counts import OTHERS
from pytest_fusion.canary.live.state import mark_of
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.wording import brief, did_you_mean


class Chain:
    """Adds up pieces of evidence, which may come in any order; a repeated piece counts once."""

    def __init__(self, rollout: str) -> None:
        self._rollout = rollout
        # Blocks since and up to -> parts, and how many there are of them.
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
    """A rollout of one canary in all processes.

    ``gaps`` says which evidence is missing, ``served`` counts calls by state and kernel, ``counts`` has the other
    counts of the blocks that were read.
    """

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
    served: dict[tuple[str, str], int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class _RolloutBuilder:
    """Builds a `Rollout` from its events."""

    def __init__(self, name: str, rollout: str) -> None:
        self.rollout = Rollout(name, rollout)
        self.chains: dict[str, Chain] = {}
        self.trips: dict[str, str] = {}
        self.failures: deque[tuple[float, str]] = deque(maxlen=1000)
        self.served: Counter[tuple[str, str]] = Counter()
        self.counts: Counter[str] = Counter()
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
            self.trips[process] = here.tripped
        if kind == "failure":
            self.failures.append((time, f"{event.get('result')} in {event.get('bucket')}: {event.get('reason')}"))
        if kind in ("block", "total"):
            self.chains.setdefault(process, Chain(found.rollout)).add(event)
        if kind == "block" and event.get("part") == 1 and (process, event.get("block")) not in self._counted:
            self._counted.add((process, event["block"]))
            # Another version may write other forms of these, which are left out; the evidence still counts.
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                self.served.update({(str(state), str(arm)): int(many) for state, arm, many in event["served"]})
                self.counts.update({str(what): int(many) for what, many in event["new"].items()})

    def build(self, folder: Path) -> Rollout:
        total, gaps = Evidence(self.rollout.rollout), []
        for process, chain in sorted(self.chains.items()):
            evidence, missing = chain.evidence()
            total += evidence
            gaps += [
                f"the log of {process} lacks evidence: blocks {first} to {last} were lost to a full disk, to its "
                "rotation (Policy(log_mib=...)), or are not yet written"
                for first, last in missing
            ]
        trips = [f"tripped by {process}: {reason}" for process, reason in sorted(self.trips.items())]
        if not trips:
            with contextlib.suppress(OSError):
                mark = mark_of(folder, self.rollout.name, self.rollout.rollout)
                trips = [f"tripped, by its mark: {mark.read_text(encoding='utf-8', errors='replace').strip()}"]
        failures = [text for _, text in sorted(self.failures)[-_FAILURES:]]
        return replace(
            self.rollout,
            evidence=total,
            gaps=tuple(gaps),
            trips=tuple(trips),
            failures=tuple(failures),
            served=dict(sorted(self.served.items())),
            counts=dict(sorted(self.counts.items())),
        )


def gather(folder: Path) -> tuple[list[Rollout], list[str]]:
    """The rollouts in the logs below ``folder``, by name and time, and a sentence for each file left out.

    The last one of each name is ``current``. Raises ``CanaryError`` where there is no such folder.
    """
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
        if not _is_ours(event):
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


def _is_ours(event: Mapping[str, Any]) -> bool:
    texts = isinstance(event.get("name"), str) and isinstance(event.get("event"), str)
    return texts and type(event.get("pid")) is int and type(event.get("time")) in (int, float)


def select(rollouts: list[Rollout], name: str | None, rollout: str | None) -> list[Rollout]:
    """The current rollouts, or all with the id ``rollout``, of one or all canaries. Raises ``CanaryError`` for none."""
    if name is not None and name not in {one.name for one in rollouts}:
        raise CanaryError(f"no canary {name!r} has a log here{did_you_mean(name, {one.name for one in rollouts})}")
    named = [one for one in rollouts if name in (None, one.name)]
    found = [one for one in named if (one.current if rollout is None else one.rollout == rollout)]
    if named and not found:
        raise CanaryError(
            f"no rollout {rollout!r} has a log here{did_you_mean(str(rollout), {o.rollout for o in named})}"
        )
    return found


def bounded(evidence: Evidence, most: int) -> Evidence:
    """The same evidence with at most ``most`` buckets; those with the fewest calls are merged.

    Each process respects the bound by itself, but processes with different shapes may exceed it together.
    """
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
