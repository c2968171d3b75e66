"""Tensors inside containers."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import torch

from pytest_fusion.case.containers import map_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Box:
    inside: Any
    label: str = "a"


def test_every_container_keeps_its_type_and_gets_new_tensors() -> None:
    """Lists, tuples, named tuples, dicts of any kind and dataclasses are rebuilt around the replaced tensors."""
    t = torch.ones(2)
    value = {"a": [t, 3], "b": (t, None), "c": Pair(t, "x"), "d": Box([t]), "e": collections.OrderedDict(k=t)}
    made = map_tensors(value, lambda x: x + 1)
    assert made["a"][1] == 3
    assert isinstance(made["c"], Pair)
    assert isinstance(made["d"], Box)
    assert isinstance(made["e"], collections.OrderedDict)
    for found in (made["a"][0], made["b"][0], made["c"].left, made["d"].inside[0], made["e"]["k"]):
        assert found.tolist() == [2, 2]
    assert t.tolist() == [1, 1]
    assert value["d"].inside[0] is t


def test_lists_are_new_even_without_tensors() -> None:
    """What a kernel appends to a list that it was given is not seen by the reference."""
    value = [1, [2]]
    made = map_tensors(value, torch.clone)
    made[1].append(3)
    assert value == [1, [2]]


def test_a_tuple_without_tensors_is_passed_on() -> None:
    """A shape, which cannot be rebuilt like any tuple, stays itself."""
    size = torch.ones(2, 3).size()
    assert map_tensors(size, torch.clone) is size
    assert map_tensors(slice(1, 2), torch.clone) == slice(1, 2)
