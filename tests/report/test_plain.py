"""Whatever a check leaves in its evidence leaves the process as exact builtin types."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_fusion.report.json_file import plain


class Level(enum.IntEnum):
    HIGH = 3


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: np.float32


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.float32("inf"), "inf"),
        (torch.tensor(3), 3),
        (float("nan"), "nan"),
        (-float("inf"), "-inf"),
        (Level.HIGH, 3),
        (torch.float16, "torch.float16"),
        (Path("a/b"), "a/b"),
        ((1, (2, 3)), [1, [2, 3]]),
        ({3, 1, 2}, [1, 2, 3]),
        ({1: "a", None: "b"}, {"1": "a", "None": "b"}),
        (Point(0.25, np.float32(1)), {"x": 0.25, "y": 1.0}),
        ("bad \udce9 byte", "bad \\udce9 byte"),
    ],
)
def test_known_values(value: object, expected: object) -> None:
    """Scalars, enums, paths, dtypes, sets and dataclasses each have one plain form."""
    found = plain(value)

    assert found == expected
    assert type(found) is type(expected)


def _exact(value: object) -> bool:
    if type(value) is list:
        return all(_exact(item) for item in value)
    if type(value) is dict:
        return all(type(key) is str and _exact(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(codec=None)),
    st.floats(width=32).map(np.float32),
    st.integers(-128, 127).map(np.int8),
    st.binary(max_size=3),
    st.complex_numbers(),
)
nested = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.dictionaries(st.one_of(st.text(), st.integers()), inner)
    ),
    max_leaves=12,
)


@given(nested)
def test_anything_becomes_strict_utf8_json(value: object) -> None:
    """Every nesting of scalars ends as exact builtins that strict JSON writes and reads back unchanged."""
    found = plain(value)

    assert _exact(found)
    assert json.loads(json.dumps(found, allow_nan=False).encode("utf-8")) == found
