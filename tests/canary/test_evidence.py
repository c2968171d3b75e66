"""Evidence of many processes: adding is exact in any order, JSON loses nothing, threads lose no count."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_fusion.canary.evidence.evidence_counts import Cell, Collector, Evidence, Tally
from pytest_fusion.canary.evidence.sequential import RATE, Scale

COUNTS = st.integers(0, 2**70)
CELLS = st.builds(
    Cell,
    st.sampled_from(["violation", "latency_ratio"]),
    st.sampled_from("abc"),
    st.sampled_from(["candidate", "itself"]),
)
EVIDENCE = st.builds(
    Evidence,
    st.just("r1"),
    st.dictionaries(st.sampled_from("abc"), COUNTS),
    st.dictionaries(CELLS, st.builds(Tally, st.dictionaries(st.integers(0, 3), COUNTS), COUNTS)),
)
SCALES = {"violation": RATE, "latency_ratio": Scale(-0.25, 0.25, 0.001)}


@given(EVIDENCE, EVIDENCE, EVIDENCE)
@settings(max_examples=100, deadline=None)
def test_adding_is_associative_and_commutative(a: Evidence, b: Evidence, c: Evidence) -> None:
    """Whoever reads the processes' files in whatever order and grouping gets the same evidence."""
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Evidence("r1") == a


@given(EVIDENCE, EVIDENCE)
@settings(max_examples=100, deadline=None)
def test_json_loses_nothing(a: Evidence, b: Evidence) -> None:
    """Evidence comes back from JSON as it was, and JSON of a sum does not depend on the order."""
    assert Evidence.from_json(json.loads(json.dumps(a.as_json()))) == a
    assert json.dumps((a + b).as_json()) == json.dumps((b + a).as_json())


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-1, 1), st.integers(0, 3)), max_size=40))
@settings(max_examples=50, deadline=None)
def test_processes_together_saw_what_one_would_have(seen: list[tuple[str, float, int]]) -> None:
    """The sum over processes is the evidence of a single process that saw all calls."""
    one, parts = Collector("r1", SCALES), [Collector("r1", SCALES) for _ in range(4)]
    for bucket, value, process in seen:
        for collector in (one, parts[process]):
            collector.call(bucket)
            collector.add("latency_ratio", bucket, value)

    assert sum((part.evidence() for part in parts), Evidence("r1")) == one.evidence()


def test_another_rollout_is_not_added() -> None:
    """Evidence about another candidate is refused."""
    with pytest.raises(ValueError, match="'r1' and 'r2'"):
        Evidence("r1") + Evidence("r2")


def test_threads_lose_no_count() -> None:
    """32 threads that add at once are all counted."""
    collector = Collector("r1", SCALES)

    def work(number: int) -> None:
        for turn in range(200):
            collector.call("a")
            collector.add("violation", "a", float(turn % 100 == number % 100))

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(work, range(32)))

    evidence = collector.evidence()
    assert evidence.calls == {"a": 6400}
    assert evidence.pooled("violation").counts == {0: 6336, 1: 64}


def test_nan_is_counted_as_broken_and_infinity_as_the_end() -> None:
    """A ratio that is no number is no observation; an infinite one is the worst."""
    collector = Collector("r1", SCALES)
    for value in (math.nan, math.inf, 0.0):
        collector.add("latency_ratio", "a", value)

    assert collector.evidence().pooled("latency_ratio") == Tally({250: 1, 500: 1}, broken=1)


def test_a_metric_without_a_scale_is_refused() -> None:
    """A misspelt metric is an error where it is written, and leaves nothing behind."""
    collector = Collector("r1", SCALES)

    with pytest.raises(KeyError, match="latency"):
        collector.add("latency", "a", 0.0)
    assert collector.evidence() == Evidence("r1")


GOOD = {"schema": 1, "rollout": "r1", "calls": {"a": 1}, "tallies": []}


@pytest.mark.parametrize(
    "wrong",
    [
        {"schema": 2},
        {"calls": {"a": 1.5}},
        {"calls": {"a": -1}},
        {"calls": {"a": True}},
        {"tallies": [{"metric": "m", "bucket": "a", "arm": "other", "counts": {}, "broken": 0}]},
        {"tallies": [{"metric": "m", "bucket": "a", "arm": "itself", "counts": {"-1": 3}, "broken": 0}]},
        {"tallies": [{"metric": "m", "bucket": "a", "arm": "itself", "counts": {"x": 3}, "broken": 0}]},
        {"tallies": [{"metric": "m"}]},
    ],
)
def test_what_is_not_evidence_is_refused(wrong: dict[str, Any]) -> None:
    """A damaged file raises and is not read as less evidence."""
    assert Evidence.from_json(GOOD) == Evidence("r1", {"a": 1})
    with pytest.raises((KeyError, TypeError, ValueError)):
        Evidence.from_json({**GOOD, **wrong})
