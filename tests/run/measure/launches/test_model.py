"""Counts as they are stored."""

from __future__ import annotations

import json

from pytest_fusion.run.measure.launches import Counts

COUNTS = Counts(3, 1, 0, (("aten::mul", 1), ("k", 2)), "modelled", None, ("code that nobody sees",))


def test_counts_survive_json() -> None:
    """What is written is read back equal, with an agreement and without."""
    for counts in (COUNTS, Counts(0, 0, 2, (), "graph", True)):
        assert Counts.from_json(json.loads(json.dumps(counts.as_json()))) == counts
