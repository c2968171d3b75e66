"""A case is plain data: JSON both ways."""

from __future__ import annotations

import enum
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.case.value_json import decode, encode, written
from pytest_fusion.errors import ReplayError
from pytest_fusion.spec.dtypes import KNOWN
from pytest_fusion.spec.inputs import LAYOUTS

NAMES = st.text("abxyz_", min_size=1, max_size=4)


class Mode(enum.Enum):
    SUM = "sum"


class Word(enum.StrEnum):
    MEAN = "mean"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.sampled_from([Mode.SUM, Word.MEAN, torch.float16, torch.relu, math.sqrt]),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)  # fmt: skip

CASES = st.builds(
    Case,
    sizes=st.dictionaries(NAMES, st.integers(0, 99) | st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=3),
    dtype=st.sampled_from(KNOWN),
    tensors=st.dictionaries(
        NAMES,
        st.builds(
            TensorCase,
            st.sampled_from(KNOWN),
            st.builds(Layout, st.sampled_from(LAYOUTS), st.integers(0, 7), st.integers(0, 1)),
            st.sampled_from(["unit", "nan", "0"]),
        ),
        max_size=3,
    ),
    absent=st.sets(NAMES, max_size=2).map(lambda names: tuple(sorted(names))),
    drawn=st.dictionaries(NAMES, PLAIN, max_size=3),
    seed=st.integers(0, 2**63),
    multiprocessors=st.none() | st.integers(1, 200),
)


@settings(max_examples=200, deadline=None)
@given(CASES)
def test_a_case_survives_json(case: Case) -> None:
    """Written as JSON and read again, a case is equal to itself, its key too."""
    again = Case.from_json(json.loads(json.dumps(case.as_json(), allow_nan=False)))
    assert again == case
    assert again.key() == case.key()


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_a_drawn_value_survives_json_with_its_type(value: Any) -> None:
    """Tuples stay tuples, enums enums (those that are strings too), dtypes and functions themselves."""
    again = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert again == value
    assert type(again) is type(value)


def test_infinities_and_nan_survive_json() -> None:
    """JSON has no NaN, so these travel by name."""
    assert decode(encode(-math.inf)) == -math.inf
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((0.0, math.inf), "(0.0, inf)"),
        ((1,), "(1,)"),
        ([-math.inf, None, "x"], "[-inf, None, 'x']"),
        ({"a": (1, 2), "tuple": True}, "{'a': (1, 2), 'tuple': True}"),
        (torch.float16, "torch.float16"),
        (Mode.SUM, "Mode.SUM"),
        (torch.relu, "torch.relu"),
        (math.sqrt, "math.sqrt"),
        (True, "True"),
    ],
)
def test_a_drawn_value_is_told_as_python_writes_it(value: Any, text: str) -> None:
    """How it is stored is not what a person reads."""
    assert written(encode(value)) == text


def test_a_value_without_json_form_says_what_to_draw_instead() -> None:
    """An object that cannot be written is kept by its repr, and reading it names the alternatives."""
    data = encode({1: "keys that are no strings"})
    assert "opaque" in data
    with pytest.raises(ReplayError, match="draw plain values, enums, dtypes or importable functions"):
        decode(data)
    assert "opaque" in encode(lambda x: x)


@pytest.mark.parametrize(
    "data",
    [
        {"import": "no_such_module:f"},
        {"import": "math:no_such_function"},
        {"enum": "tests.nowhere:Mode", "name": "SUM"},
        {"dtype": "torch.float99"},
        {"what": 1},
    ],
    ids=str,
)
def test_a_foreign_drawn_value_is_named(data: Any) -> None:
    """What is not importable here raises with the value in the message."""
    with pytest.raises(ReplayError, match="drawn value"):
        decode(data)


@pytest.mark.parametrize("broken", [None, [], {}, {"dims": 3}, {"dims": {"a": "b"}, "dtype": "float32", "inputs": {}}])
def test_what_is_not_a_case_is_refused(broken: Any) -> None:
    """Data of another form raise ``ReplayError`` and nothing else."""
    with pytest.raises(ReplayError, match="not a case"):
        Case.from_json(broken)


def test_a_layout_reads_as_kind_variant_and_offset() -> None:
    """``padded/1+4`` is the second padded layout at storage offset 4."""
    assert str(Layout("padded", 4, 1)) == "padded/1+4"
    assert Layout().plain
    assert not Layout(offset=1).plain
