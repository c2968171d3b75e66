"""Simulated rollouts: calls of a made-up service, what a canary would see of them, and what is done about it.

What is seen is what a canary in a process notes. In shadow, of each compared call: whether the candidate raised, was
beyond its tolerance, or did what may never be seen; a quarter of them is timed, one in five of those with the incumbent
beside itself, and ten pairs in either order of one bucket and arm make a block; one in `REFEREED` is held against the
reference. While it serves: every call that raised, and of those that did not `verify`.

Two ask at once, as in a process: `FirstFaults`, at every run, and the judge at looks that lie ever further apart.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pytest_fusion.canary.evidence.evidence_counts import Arm, Cell, Evidence, Tally
from pytest_fusion.canary.evidence.promotion_rules import RULES, Rules
from pytest_fusion.canary.evidence.rollout_judge import Decision, judge
from pytest_fusion.canary.live.comparing.call_pairs import HALF, ITSELF
from pytest_fusion.canary.live.policy import Policy

BUCKETS = {"2^7": 0.40, "2^8": 0.25, "2^9": 0.15, "2^10": 0.08, "2^11": 0.05, "2^12": 0.04, "2^13": 0.02, "2^14": 0.01}
POLICY = Policy()
# The referee has 2 % of a thread: some 20 ms a call make one call a second, of 20 compared ones in a busy process.
REFEREED = 20
# Of one call's log ratio of errors. Softmaxes of 1 x 128 to 16 x 1024, rounded once more or not, had 0.06 to 0.28.
ERRORS_SCATTER = 0.2
# Of one pair's log ratio of latencies: a shared machine, 2 % of pairs 30 % off, the second run 2 % faster.
PAIRS_SCATTER, OUTLIERS, OUTLIER, SECOND = 0.03, 0.02, math.log(1.3), -0.02
# Looks, each so much further than the last: more would only find what is wrong up to 20 % earlier.
GROWTH = 1.2
FIRST_LOOK = 10


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is wrong with it, over all calls or, with ``bucket``, in that one alone.

    ``wrong`` and ``raises`` are rates per call; ``slower`` and ``coarser`` are shares by which latency and error grow.
    """

    name: str
    wrong: float = 0.0
    raises: float = 0.0
    slower: float = 0.0
    coarser: float = 0.0
    bucket: str = ""


EQUAL = Candidate("equal")
# A tolerance is calibrated for the elements of a call, not for all calls that there will ever be.
NEARLY = Candidate("equal, 1 in 100,000 calls beyond tolerance", wrong=1e-5)
BAD = (
    Candidate("wrong on 1 in 10,000 calls", wrong=1e-4),
    Candidate("5 % slower", slower=0.05),
    Candidate("30 % less accurate", coarser=0.30),
    Candidate("wrong on 1 in 10 calls of one bucket, 2 % of the traffic", wrong=0.1, bucket="2^13"),
    Candidate("raises on every call of one bucket, 1 % of the traffic", raises=1.0, bucket="2^14"),
    Candidate("30 % slower in one bucket, 2 % of the traffic", slower=0.30, bucket="2^13"),
)


@dataclass(frozen=True, slots=True)
class End:
    """How a rollout ended, and after how many comparisons, or calls that the candidate was given to serve.

    ``wrong`` are the results beyond tolerance that callers were given, ``raised`` the calls that the incumbent had to
    serve instead.
    """

    decision: Decision
    calls: int
    reasons: tuple[str, ...] = field(default=())
    wrong: int = 0
    raised: int = 0


def shadowed(candidate: Candidate, seed: int, most: int, rules: Rules = RULES) -> End:
    """The shadow stage until it is promoted, sent back, in error, or ``most`` comparisons were made."""
    return _Stage(candidate, seed, most, rules, verify=1.0, shadow=True).end()


def served(candidate: Candidate, seed: int, most: int, verify: float = POLICY.verify, rules: Rules = RULES) -> End:
    """Calls routed to a candidate that was never in shadow, until it is sent back, or ``most`` were its to serve."""
    return _Stage(candidate, seed, most, rules, verify=verify, shadow=False).end()


class _Stage:
    """All that happens in so many calls, drawn at once; rows are looks, columns buckets."""

    def __init__(
        self, candidate: Candidate, seed: int, most: int, rules: Rules, *, verify: float, shadow: bool
    ) -> None:
        self._draw = draw = np.random.default_rng(seed)
        self._candidate, self._rules = candidate, rules
        self._looks = [*_looks(most)]
        before = np.array([0, *self._looks[:-1]])
        steps = np.diff([0, *self._looks])
        here = np.array([candidate.bucket in ("", name) for name in BUCKETS])
        calls = draw.multinomial(steps, list(BUCKETS.values()))
        raised = draw.binomial(calls, candidate.raises * here)
        wrong = draw.binomial(calls - raised, candidate.wrong * here)
        found = draw.binomial(wrong, verify)
        compared = found + draw.binomial(calls - raised - wrong, verify)
        self._calls = calls.cumsum(0)
        self._events = {
            "exception": (self._calls, raised.cumsum(0)),
            "fault": (compared.cumsum(0), np.zeros_like(calls)),
            "violation": (compared.cumsum(0), found.cumsum(0)),
        }
        # Values by what they are of, and how many of them there are at each look.
        self._values: dict[Cell, tuple[list[int], list[int]]] = {}
        if shadow:
            for column, name in enumerate(BUCKETS):
                self._time(name, calls[:, column] - raised[:, column], bool(here[column]))
                self._referee(name, calls[:, column] - raised[:, column], bool(here[column]))
        self._raised = self._places(before, steps, raised.sum(1))
        self._wrong = self._places(before, steps, wrong.sum(1))
        # A window of compared calls is wider on the axis of calls where few are compared.
        windows = POLICY.trip_window, POLICY.trip_window / verify
        self._fault = _third(self._raised, self._places(before, steps, found.sum(1)), windows)

    def end(self) -> End:
        """What the first faults or the judge say, whoever is first; as it stands when all calls were made."""
        counted: dict[Cell, Counter[int]] = {cell: Counter() for cell in self._values}
        for row, done in enumerate(self._looks):
            if self._fault is not None and self._fault <= done:
                return self._end("rollback", math.ceil(self._fault), ("failures",))
            for cell, (values, many) in self._values.items():
                counted[cell].update(values[many[row - 1] if row else 0 : many[row]])
            found = judge(self._evidence(row, counted), self._rules, intervals=False)
            if found.decision in ("promote", "rollback", "error") or done == self._looks[-1]:
                return self._end(found.decision, done, found.reasons)
        raise AssertionError("there is a last look")

    def _end(self, decision: Decision, at: int, reasons: tuple[str, ...]) -> End:
        return End(decision, at, reasons, bisect_right(self._wrong, at), bisect_right(self._raised, at))

    def _evidence(self, row: int, counted: Mapping[Cell, Counter[int]]) -> Evidence:
        tallies = {cell: Tally(dict(counts)) for cell, counts in counted.items()}
        for metric, (many, bad) in self._events.items():
            for name, all_, some in zip(BUCKETS, many[row].tolist(), bad[row].tolist(), strict=True):
                tallies[Cell(metric, name)] = Tally({0: all_ - some, 1: some} if some else {0: all_})
        return Evidence(self._candidate.name, dict(zip(BUCKETS, self._calls[row].tolist(), strict=True)), tallies)

    def _time(self, bucket: str, calls: NDArray[np.int64], here: bool) -> None:
        timed = self._draw.binomial(calls, POLICY.timed)
        itself = self._draw.binomial(timed, ITSELF)
        arms: tuple[tuple[Arm, NDArray[np.int64]], ...] = ("itself", itself), ("candidate", timed - itself)
        for arm, many in arms:
            first = self._draw.binomial(many, 0.5)
            blocks = np.minimum(first.cumsum(), (many - first).cumsum()) // HALF
            shape = int(blocks[-1]), 2, HALF
            outliers = OUTLIER * self._draw.choice((-1, 1), shape) * (self._draw.random(shape) < OUTLIERS)
            pairs = PAIRS_SCATTER * self._draw.standard_normal(shape) + outliers + np.array([[SECOND], [-SECOND]])
            middle = math.log1p(self._candidate.slower) if here and arm == "candidate" else 0.0
            self._keep(Cell("latency_ratio", bucket, arm), middle + np.median(pairs, axis=2).mean(axis=1), blocks)

    def _referee(self, bucket: str, calls: NDArray[np.int64], here: bool) -> None:
        judged = self._draw.binomial(calls, 1 / REFEREED).cumsum()
        middle = math.log1p(self._candidate.coarser) if here else 0.0
        errors = middle + ERRORS_SCATTER * self._draw.standard_normal(int(judged[-1]))
        self._keep(Cell("error_ratio", bucket), errors, judged)

    def _keep(self, cell: Cell, values: NDArray[np.float64], many: NDArray[np.int64]) -> None:
        scale = self._rules.scales()[cell.metric]
        indices = np.rint((values.clip(scale.low, scale.high) - scale.low) / scale.step).astype(np.int64)
        self._values[cell] = indices.tolist(), many.tolist()

    def _places(self, before: NDArray[np.int64], steps: NDArray[np.int64], many: NDArray[np.int64]) -> list[float]:
        """Failures lie anywhere between two looks."""
        shares = self._draw.random(int(many.sum()))
        return sorted((np.repeat(before, many) + np.repeat(steps, many) * shares).tolist())


def _looks(most: int) -> Iterator[int]:
    look = FIRST_LOOK
    while look < most:
        yield look
        look = round(GROWTH * look)
    yield most


def _third(raised: Sequence[float], found: Sequence[float], windows: tuple[float, float]) -> float | None:
    """Where `FirstFaults` trips: so many errors and violations, each in a window of its own."""
    for at in sorted((*raised, *found)):
        errors = bisect_right(raised, at) - bisect_right(raised, at - windows[0])
        if errors + bisect_right(found, at) - bisect_right(found, at - windows[1]) >= POLICY.trip_after:
            return at
    return None
