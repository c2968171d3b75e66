"""Counts as they are stored."""

from __future__ import annotations

import json

import pytest

from pytest_fusion.run.measure.launches import Counts

COUNTS = Counts(3, 1, 0, (("aten::mul", 1), ("k", 2)), "modelled", None, ("code that nobody sees",))


def test_counts_survive_json() -> None:
    """What is written is read back equal, with an agreement and without."""
    for counts in (COUNTS, Counts(0, 0, 2, (), "graph", True)):
        assert Counts.from_json(json.loads(json.dumps(counts.as_json()))) == counts


@pytest.mark.parametrize(
    "change",
    [
        {"kernels": "three"},
        {"kernels": None},
        {"names": [["k"]]},
        {"names": 3},
        {"method": "guessed"},
        {"agreed": "yes"},
    ],
    ids=str,
)
def test_other_data_are_refused(change: dict[str, object]) -> None:
    """An edited file is an error and no count."""
    with pytest.raises(ValueError, match="no launch counts"):
        Counts.from_json({**COUNTS.as_json(), **change})


def test_a_missing_key_is_refused() -> None:
    """The same of a file that lacks something."""
    with pytest.raises(ValueError, match="no launch counts"):
        Counts.from_json({"kernels": 1})
