"""`Ledger`: counts the observations of one canary in one process, and writes new ones to the log."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_fusion.canary.evidence.events import Log
from pytest_fusion.canary.evidence.evidence_counts import Arm, Cell, Collector, Evidence, Tally
from pytest_fusion.canary.evidence.observation import Observation, metrics_of
from pytest_fusion.canary.evidence.promotion_rules import Rules
from pytest_fusion.canary.live.calls.arguments import Traffic

# Names of counts contain reasons, which may be any text.
_MOST_NAMES = 100
# Blocks between two written sums. What a full disk or log rotation lost is missing only until the next sum.
BLOCKS_PER_TOTAL = 64
# Bytes of evidence in a line of the log, which holds 64 KiB.
_MOST_BYTES = 24_000


class Ledger:
    """Counts for the current rollout, from any thread; ``write`` logs a ``block`` of what is new, or a ``total``."""

    def __init__(self, log: Log, rollout: str, rules: Rules) -> None:
        self._log = log
        self._rules = rules
        self.begin(rollout)

    def begin(self, rollout: str) -> None:
        """Starts empty, as in a new or a forked process."""
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._logged: Counter[str] = Counter()
        self._publish_errors = 0
        self._restart(rollout)

    def _restart(self, rollout: str) -> None:
        self._rollout = rollout
        self.traffic = Traffic(self._rules.most_buckets)
        self._collector = Collector(rollout, self._rules.scales())
        self._gpu_s = 0.0
        self._blocks = 0
        self._written = Evidence(rollout)
        self._served: Counter[tuple[str, str]] = Counter()

    def rearm(self, rollout: str) -> None:
        """Starts the evidence of another rollout; the counts continue."""
        self.write()
        with self._lock:
            self._restart(rollout)

    def counts(self) -> dict[str, int]:
        """All counts of this process, by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def evidence(self) -> Evidence:
        """The evidence of this process about the rollout so far."""
        with self._lock:
            return self._evidence()[0]

    def unverified(self) -> int:
        """The number of the rollout's calls that the candidate served and that were not compared."""
        with self._lock:
            return sum(found.unverified for found in self.traffic.read().values())

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what if what in self._counts or len(self._counts) < _MOST_NAMES else "others"] += 1

    def skip(self, reason: str) -> None:
        """Counts a call that was sampled but not compared."""
        # A reason with numbers (MiB) would make a new count for each.
        self.count(f"skipped: {'too large to copy' if reason.startswith('the copies would') else reason[:80]}")

    def fell_back(self, reason: str) -> None:
        """Counts a call that was routed to the candidate and served by the incumbent."""
        with self._lock:
            self.count("fallbacks")
            self.count(f"fallbacks: {reason}")

    def observe(self, seen: Observation) -> None:
        """Counts a run of the candidate, or of the incumbent in its place. ``KeyError`` for an unknown result."""
        metrics = metrics_of(seen.result)
        with self._lock:
            self.count(f"{'compared' if seen.arm == 'candidate' else 'itself'}: {seen.result}")
            for metric, happened in metrics.items():
                if metric in self._rules.scales():
                    self._collector.add(metric, seen.bucket, float(happened), seen.arm)
        if seen.result != "ok" and seen.arm != "itself":
            self._log.add("failure", result=seen.result, bucket=seen.bucket, reason=seen.reason, worst=seen.worst)

    def ratio(self, metric: str, bucket: str, value: float, arm: Arm = "candidate") -> None:
        """Counts a log ratio of candidate to incumbent, or of the incumbent to itself."""
        if metric in self._rules.scales():
            self._collector.add(metric, bucket, value, arm)

    def spend(self, gpu_s: float) -> None:
        """Adds GPU seconds that were spent on comparing."""
        with self._lock:
            self._gpu_s += gpu_s

    def _evidence(self) -> tuple[Evidence, Counter[tuple[str, str]]]:
        """The evidence, and the calls by state and by the kernel that served them."""
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
            # They did not raise. Without them the rate would be that of compared calls only.
            for bucket, many in unverified.items():
                if many:
                    cell = Cell("exception", bucket)
                    tallies[cell] = tallies.get(cell, Tally()) + Tally({0: many})
        return Evidence(seen.rollout, dict(sorted(calls.items())), dict(sorted(tallies.items()))), served

    def write(self) -> None:
        """Logs what is new, if anything is."""
        with self._lock:
            evidence, served = self._evidence()
            fresh = evidence.since(self._written)
            counted = self._counts - self._logged
            # A call under way counts as the incumbent's until the candidate has served it: logged counts never fall.
            arms = served - self._served
            if not (fresh.calls or fresh.tallies or counted):
                return
            self._blocks += 1
            facts = {
                "counts": dict(self._counts),
                "new": dict(counted),
                "served": [[*where, many] for where, many in sorted(arms.items())],
                "gpu_s": self._gpu_s,
                "publish_errors": self._log.publish_errors - self._publish_errors,
            }
            self._written, self._logged = evidence, Counter(self._counts)
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
    """The evidence in one or more parts that each fit into a line of the log."""
    calls, tallies, size = dict(evidence.calls), dict[Cell, Tally](), 0
    for cell, tally in evidence.tallies.items():
        bytes_ = 80 + len(cell.bucket) + 14 * len(tally.counts)
        if tallies and size + bytes_ > _MOST_BYTES:
            yield Evidence(evidence.rollout, calls, tallies)
            calls, tallies, size = {}, {}, 0
        tallies[cell] = tally
        size += bytes_
    yield Evidence(evidence.rollout, calls, tallies)
