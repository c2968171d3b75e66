"""Simulated rollouts: calls of a made-up service, what a canary would see of them, and the judge's verdicts.

Of every call that is compared: whether the candidate was beyond its tolerance, raised, or did what may never be seen.
Of every block of 20 calls of one bucket: the log ratios of error and of latency. Errors scatter by 15 % from block to
block, latencies by 1 % with 2 % of blocks 30 % off either way, as on a shared machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pytest_fusion.canary.evidence import Collector
from pytest_fusion.canary.judge import Decision, judge
from pytest_fusion.canary.rules import RULES, Rules

BUCKETS = {"2^7": 0.40, "2^8": 0.25, "2^9": 0.15, "2^10": 0.08, "2^11": 0.05, "2^12": 0.04, "2^13": 0.02, "2^14": 0.01}
BLOCK = 20
# Comparisons at which the judge looks: each 10 % further than the last, from 10 on. More looks would only cost time
# here and find what is wrong up to 10 % earlier.
LOOKS = tuple(sorted({round(10 * 1.1**step) for step in range(120)}))


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
    """How a rollout ended, and after how many comparisons."""

    decision: Decision
    comparisons: int
    reasons: tuple[str, ...] = field(default=())


def rollout(candidate: Candidate, seed: int, most: int, rules: Rules = RULES) -> End:
    """One rollout until it is promoted, sent back, in error, or ``most`` comparisons were made."""
    generator = np.random.default_rng(seed)
    collector = Collector(candidate.name, rules.scales())
    names, shares = list(BUCKETS), np.array(list(BUCKETS.values()))
    done, compared = 0, np.zeros(len(names), dtype=np.int64)
    for value in _latency(generator, 100):
        collector.add("latency_ratio", names[0], float(value), arm="itself")
    for look in (*(one for one in LOOKS if one < most), most):
        calls = generator.multinomial(look - done, shares)
        # A block is complete when the bucket has seen so many calls, at whichever look.
        blocks = (compared + calls) // BLOCK - compared // BLOCK
        for name, many, complete in zip(names, calls, blocks, strict=True):
            _observe(collector, candidate, name, int(many), int(complete), generator)
        done, compared = look, compared + calls
        found = judge(collector.evidence(), rules, intervals=False)
        if found.decision in ("promote", "rollback", "error"):
            return End(found.decision, done, found.reasons)
    return End(found.decision, done, found.reasons)


def _observe(
    collector: Collector, candidate: Candidate, bucket: str, calls: int, blocks: int, generator: np.random.Generator
) -> None:
    here = candidate.bucket in ("", bucket)
    collector.call(bucket, calls)
    events = {
        "fault": 0,
        "violation": int(generator.binomial(calls, candidate.wrong if here else 0.0)),
        "exception": int(generator.binomial(calls, candidate.raises if here else 0.0)),
    }
    for metric, many in events.items():
        collector.add(metric, bucket, 0.0, many=calls - many)
        collector.add(metric, bucket, 1.0, many=many)
    errors = 0.15 * generator.standard_normal(blocks) + (math.log1p(candidate.coarser) if here else 0.0)
    latencies = _latency(generator, blocks) + (math.log1p(candidate.slower) if here else 0.0)
    for metric, values in (("error_ratio", errors), ("latency_ratio", latencies)):
        for value in values:
            collector.add(metric, bucket, float(value))


def _latency(generator: np.random.Generator, blocks: int) -> NDArray[np.float64]:
    outliers = math.log(1.3) * generator.choice((-1, 1), blocks) * (generator.random(blocks) < 0.02)
    return 0.01 * generator.standard_normal(blocks) + outliers
