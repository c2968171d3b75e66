"""What a kernel returns, as leaves with paths."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from pytest_fusion.case.containers import leaves, nesting


@dataclasses.dataclass
class Result:
    out: Any
    lse: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


T = torch.ones(2)


@pytest.mark.parametrize(
    ("value", "paths", "text"),
    [
        (T, [""], "tensor"),
        (None, [""], "None"),
        ((T, 3), ["[0]", "[1]"], "(tensor, int)"),
        ([T, [None]], ["[0]", "[1][0]"], "(tensor, (None))"),
        ({"b": T, "a": 1.5}, ["['b']", "['a']"], "{'a': float, 'b': tensor}"),
        (Result(T), [".out", ".lse"], "Result{out: tensor, lse: None}"),
        (Pair(T, {1: T}), ["[0]", "[1][1]"], "(tensor, {1: tensor})"),
        ((), [], "()"),
        (Result, [""], "type"),
    ],
    ids=str,
)
def test_every_nesting_has_named_leaves_and_a_text(value: Any, paths: list[str], text: str) -> None:
    """Tuples, lists, dicts and dataclasses are descended, anything else is a leaf; the text is of the containers."""
    assert [leaf.path for leaf in leaves(value)] == paths
    assert nesting(value) == text


def test_a_leaf_knows_whether_it_is_a_tensor() -> None:
    """Numbers and None are leaves without being tensors."""
    assert [leaf.is_tensor for leaf in leaves((T, 1, None))] == [True, False, False]
