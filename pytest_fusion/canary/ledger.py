"""`Ledger`: what one canary saw in one process: counts, and sums by class of shapes; written as what was new."""

from __future__ import annotations

import threading
from collections import Counter

from pytest_fusion.canary.events import Log
from pytest_fusion.canary.rule import Observation

# Names of counts come with reasons in them, which may be any text.
_MOST_NAMES = 100
_SUMS = ("comparisons", "failures", "elements", "squared_difference", "squared_incumbent")


class Ledger:
    """Counts of any number of threads. ``rollout`` is the one that what comes next is counted for."""

    def __init__(self, log: Log, rollout: str) -> None:
        self._log = log
        self.rollout = rollout
        self.begin()

    def begin(self) -> None:
        """Nothing was seen: what a forked child begins with."""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._block: dict[str, list[float]] = {}

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(sorted(self._counts.items()))

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what if what in self._counts or len(self._counts) < _MOST_NAMES else "others"] += 1

    def skip(self, reason: str) -> None:
        """A call that should have been looked at and was not."""
        # Numbers in reasons (MiB) would make a count of each.
        self.count(f"skipped: {'too large to copy' if reason.startswith('the copies would') else reason[:80]}")

    def observe(self, seen: Observation) -> None:
        """One run of the candidate."""
        with self._lock:
            self._counts[f"compared: {seen.result}"] += 1
            sums = (1, seen.result != "ok", seen.elements, seen.squared_difference, seen.squared_incumbent)
            block = self._block.setdefault(seen.bucket, [0.0] * len(sums))
            for i, value in enumerate(sums):
                block[i] += value
        if seen.result != "ok":
            self._log.add("failure", result=seen.result, bucket=seen.bucket, reason=seen.reason, worst=seen.worst)

    def write(self) -> None:
        """Puts what is new into the log."""
        with self._lock:
            blocks, self._block = self._block, {}
            if not blocks:
                return
            buckets = {bucket: dict(zip(_SUMS, sums, strict=True)) for bucket, sums in blocks.items()}
            self._log.add("block", rollout=self.rollout, buckets=buckets, counts=dict(self._counts))
