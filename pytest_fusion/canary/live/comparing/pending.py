"""`Comparisons`: a queue of comparisons that the device has not finished; finished ones become observations."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from pytest_fusion.canary.evidence.evidence_counts import Arm
from pytest_fusion.canary.evidence.observation import Observation
from pytest_fusion.canary.live.calls.captures import Readback
from pytest_fusion.canary.live.calls.copies import Copies
from pytest_fusion.canary.live.comparing.result_compare import FIELDS, compare, exactly, sums_of
from pytest_fusion.spec.promises import Tolerance

# With so many comparisons unfinished, the device gets no further ones.
MOST_WAITING = 256


@dataclass(slots=True)
class _Waiting:
    bucket: str
    arm: Arm
    since: float
    labels: list[str]
    held: list[bool]
    rows: Readback
    call: Any


class Comparisons:
    """A bounded queue of comparisons. ``submit`` waits for no device; ``ready`` is for one thread."""

    def __init__(
        self,
        tolerance: Tolerance | None,
        writes: Collection[str] | None,
        scratch: Collection[str],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tolerance = tolerance
        self._writes = writes
        self._scratch = frozenset(scratch)
        self._timeout_s = timeout_s
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Empties the queue, as in a forked child."""
        self._waiting: deque[_Waiting] = deque()
        self._reading = threading.Lock()

    @property
    def full(self) -> bool:
        return len(self._waiting) >= MOST_WAITING

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(
        self,
        incumbent: object,
        candidate: object,
        copies: Copies,
        bucket: str,
        *,
        copied: str,
        arm: Arm = "candidate",
        call: Any = None,
    ) -> Observation | None:
        """Compares two results and the arguments afterwards; returns an observation where no device is needed.

        ``copied`` is the kernel that ran on the copies: ``"candidate"`` or ``"incumbent"``; where ``arm`` is
        ``"itself"``, the incumbent ran there in the candidate's place. ``call`` goes with the observation.
        """
        results = compare(incumbent, candidate, self._tolerance)
        if results.reason:
            return Observation("structure", bucket, results.reason, arm=arm, call=call)
        labels = ["the result" for _ in results.sums]
        held = [False for _ in results.sums]
        rows = list(results.sums)
        for pair in copies.pairs:
            if pair.name in self._scratch:
                continue
            one, other = (pair.original, pair.copy) if copied == "candidate" else (pair.copy, pair.original)
            undeclared = self._writes is not None and pair.name not in self._writes
            labels.append(f"argument {pair.name!r}")
            held.append(undeclared)
            rows.append(exactly(one, other) if undeclared else sums_of(one, other, self._tolerance))
        self._waiting.append(_Waiting(bucket, arm, self._clock(), labels, held, Readback(rows), call))
        return None

    def ready(self) -> list[Observation]:
        """The finished comparisons, oldest first; one that the device did not finish in time is a hang."""
        found: list[Observation] = []
        with self._reading:
            while self._waiting:
                first = self._waiting[0]
                if not first.rows.done:
                    if self._clock() - first.since <= self._timeout_s:
                        break
                    self._waiting.clear()
                    reason = f"its device did not finish the call in {self._timeout_s:g} s"
                    found.append(Observation("hang", first.bucket, reason))
                    break
                self._waiting.popleft()
                found.append(replace(_observation(first), arm=first.arm))
        return found


def _observation(done: _Waiting) -> Observation:
    worst_result, reason = "ok", ""
    elements = beyond = 0
    worst = difference = square = 0.0
    for label, held, host in zip(done.labels, done.held, done.rows.host, strict=True):
        row = dict(zip(FIELDS, host.tolist(), strict=True))
        if held and row["beyond"]:
            reason = f"{label} was changed, and is not among those declared in writes"
            return Observation("inputs", done.bucket, reason, call=done.call)
        if row["nonfinite"]:
            worst_result = "nonfinite"
            reason = f"{label}: {row['nonfinite']:.0f} elements are finite in one kernel's and not in the other's"
        elif row["beyond"] and worst_result == "ok":
            worst_result = "violation"
            reason = (
                f"{label}: {row['beyond']:.0f} of {row['elements']:.0f} elements differ by more than is allowed, "
                f"the worst by {row['worst']:.3g} times that"
            )
        elements += int(row["elements"])
        beyond += int(row["beyond"])
        worst = max(worst, row["worst"])
        difference += row["squared_difference"]
        square += row["squared_incumbent"]
    return Observation(worst_result, done.bucket, reason, elements, beyond, worst, difference, square, call=done.call)
