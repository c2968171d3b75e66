"""`Ledger`: what one canary saw in one process, counted without loss, and written to the log as what was new."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_fusion.canary.evidence.events import Log
from pytest_fusion.canary.evidence.evidence_counts import Arm, Cell, Collector, Evidence, Tally
from pytest_fusion.canary.evidence.observation import Observation, metrics_of
from pytest_fusion.canary.evidence.promotion_rules import Rules
from pytest_fusion.canary.live.call_counts import Traffic

# Names of counts come with reasons in them, which may be any text.
_MOST_NAMES = 100
_SUMS = ("comparisons", "failures", "elements", "squared_difference", "squared_incumbent")
# After so many blocks all of them are written once more as one sum: what a full disk or the rotation of the log took is
# missing until then, and not for ever.
BLOCKS_PER_TOTAL = 64
# Bytes of evidence in a line of the log, which holds 64 KiB.
_MOST_BYTES = 24_000


class Ledger:
    """Counts of any number of threads, for the rollout that runs.

    ``traffic`` counts the calls. ``write`` puts what is new into the log: a ``block``, numbered from 1 in each rollout,
    and now and then a ``total`` of all blocks since 1. Metrics that ``rules`` do not know are not counted.
    """

    def __init__(self, log: Log, rollout: str, rules: Rules) -> None:
        self._log = log
        self._rules = rules
        self.begin(rollout)

    def begin(self, rollout: str) -> None:
        """Nothing was seen: what a forked child begins with."""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._publish_errors = 0
        self._restart(rollout)

    def _restart(self, rollout: str) -> None:
        self._rollout = rollout
        self.traffic = Traffic(self._rules.most_buckets)
        self._collector = Collector(rollout, self._rules.scales())
        self._sums: dict[str, list[float]] = {}
        self._gpu_s = 0.0
        self._blocks = 0
        self._written = Evidence(rollout)
        self._served: Counter[tuple[str, str]] = Counter()

    def rearm(self, rollout: str) -> None:
        """Evidence of another rollout from now on; the counts go on."""
        self.write()
        with self._lock:
            self._restart(rollout)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(sorted(self._counts.items()))

    def evidence(self) -> Evidence:
        """All that this process saw of the rollout so far."""
        with self._lock:
            return self._evidence()[0]

    def unverified(self) -> int:
        """Calls of the rollout that the candidate served and nobody compared."""
        with self._lock:
            return sum(found.unverified for found in self.traffic.read().values())

    def count(self, what: str) -> None:
        with self._lock:
            self._count(what)

    def _count(self, what: str) -> None:
        self._counts[what if what in self._counts or len(self._counts) < _MOST_NAMES else "others"] += 1

    def pass_by(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], why: str) -> None:
        """A call in shadow that is not looked at; ``why`` where it should have been."""
        self.traffic.slot("shadow", args, kwargs)
        if why:
            self.count(f"skipped: {why}")

    def skip(self, reason: str) -> None:
        """A call that should have been looked at and was not."""
        # Numbers in reasons (MiB) would make a count of each.
        self.count(f"skipped: {'too large to copy' if reason.startswith('the copies would') else reason[:80]}")

    def fell_back(self, reason: str) -> None:
        """A call that was the candidate's, and that the incumbent served."""
        with self._lock:
            self._count("fallbacks")
            self._count(f"fallbacks: {reason}")

    def observe(self, seen: Observation) -> None:
        """One run of the candidate, or of the incumbent in its place. Raises ``KeyError`` for an unknown result."""
        metrics = metrics_of(seen.result)
        with self._lock:
            self._count(f"{'compared' if seen.arm == 'candidate' else 'itself'}: {seen.result}")
            for metric, happened in metrics.items():
                if metric in self._rules.scales():
                    self._collector.add(metric, seen.bucket, float(happened), seen.arm)
            if seen.arm == "itself":
                return
            sums = (1, seen.result != "ok", seen.elements, seen.squared_difference, seen.squared_incumbent)
            block = self._sums.setdefault(seen.bucket, [0.0] * len(sums))
            for i, value in enumerate(sums):
                block[i] += value
        if seen.result != "ok":
            self._log.add("failure", result=seen.result, bucket=seen.bucket, reason=seen.reason, worst=seen.worst)

    def ratio(self, metric: str, bucket: str, value: float, arm: Arm = "candidate") -> None:
        """A log ratio of candidate to incumbent, or of the incumbent to itself."""
        if metric in self._rules.scales():
            self._collector.add(metric, bucket, value, arm)

    def spend(self, gpu_s: float) -> None:
        """Seconds of a GPU that went into looking at the candidate."""
        with self._lock:
            self._gpu_s += gpu_s

    def _evidence(self) -> tuple[Evidence, Counter[tuple[str, str]]]:
        """Evidence, and calls by state and by the kernel that served them."""
        seen = self._collector.evidence()
        calls: Counter[str] = Counter()
        unverified: Counter[str] = Counter()
        served: Counter[tuple[str, str]] = Counter()
        for (state, bucket), found in self.traffic.read().items():
            calls[bucket] += found.calls
            unverified[bucket] += found.unverified
            served[state, "candidate"] += found.candidate
            served[state, "incumbent"] += max(0, found.calls - found.candidate)
        tallies = dict(seen.tallies)
        if "exception" in self._rules.scales():
            # Nobody looked at their values, but they did not raise: without them the rate would be of those compared.
            for bucket, many in unverified.items():
                if many:
                    cell = Cell("exception", bucket)
                    tallies[cell] = tallies.get(cell, Tally()) + Tally({0: many})
        return Evidence(seen.rollout, dict(sorted(calls.items())), dict(sorted(tallies.items()))), served

    def write(self) -> None:
        """Puts what is new into the log; nothing where nothing is."""
        with self._lock:
            evidence, served = self._evidence()
            fresh = evidence.since(self._written)
            counted = self._counts - self._told
            # A call under way is the incumbent's until the candidate has served it: what was told is not taken back.
            arms = served - self._served
            if not (fresh.calls or fresh.tallies or counted):
                return
            self._blocks += 1
            facts = {
                "buckets": {bucket: dict(zip(_SUMS, sums, strict=True)) for bucket, sums in self._sums.items()},
                "counts": dict(self._counts),
                "new": dict(counted),
                "served": [[*where, many] for where, many in sorted(arms.items())],
                "gpu_s": self._gpu_s,
                "publish_errors": self._log.publish_errors - self._publish_errors,
            }
            self._written, self._told, self._sums = evidence, Counter(self._counts), {}
            self._served += arms
            self._gpu_s, self._publish_errors = 0.0, self._log.publish_errors
            self._add("block", self._blocks, fresh, facts)
            if self._blocks % BLOCKS_PER_TOTAL == 0:
                self._add("total", 1, evidence, {})

    def _add(self, kind: str, since: int, evidence: Evidence, facts: Mapping[str, Any]) -> None:
        pieces = list(_pieces(evidence))
        where = {"rollout": self._rollout, "since": since, "block": self._blocks}
        for number, piece in enumerate(pieces, 1):
            first = facts if number == 1 else {}
            self._log.add(kind, **where, part=number, parts=len(pieces), evidence=piece.as_json(), **first)


def _pieces(evidence: Evidence) -> Iterator[Evidence]:
    """The same evidence in parts of which each fits into a line; one part at least."""
    calls, tallies, size = dict(evidence.calls), dict[Cell, Tally](), 0
    for cell, tally in evidence.tallies.items():
        bytes_ = 80 + len(cell.bucket) + 14 * len(tally.counts)
        if tallies and size + bytes_ > _MOST_BYTES:
            yield Evidence(evidence.rollout, calls, tallies)
            calls, tallies, size = {}, {}, 0
        tallies[cell] = tally
        size += bytes_
    yield Evidence(evidence.rollout, calls, tallies)
