"""Kernels in float32 beside references in float64, and kernels that are further off than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion import dim, tensor, values
from pytest_fusion.diagnosis.diagnose import diagnose
from tests.sweeps import sweep

T = torch.Tensor
ROWS = {"x": tensor("rows n", values=values.normal())}
BOUNDS = {"rows": dim(1), "n": dim(1)}
SIZES = {"dim rows": 5, "dim n": 40}


def softmax(x: T) -> T:
    return x.double().softmax(-1).to(x.dtype)


def total(x: T) -> T:
    return x.sum(-1, dtype=torch.float64).to(x.dtype)


def in_turn(x: T) -> T:
    added = torch.zeros(len(x))
    for column in x.unbind(-1):
        added = added + column
    return added


def diagnosed(lab_of: Any, fused: Callable[[T], T], reference: Callable[[T], T]) -> Any:
    # At seed 0 a sum in turn is right by chance.
    change = {"change": lambda case: case.with_(seed=1)}
    return diagnose(lab_of(fused, reference, ROWS, SIZES, dims=BOUNDS, dtypes="float32", **change))


HONEST: dict[str, tuple[Callable[[T], T], Callable[[T], T]]] = {
    "softmax": (lambda x: x.softmax(-1), softmax),
    "sum": (in_turn, total),
}


@pytest.mark.parametrize("name", HONEST)
def test_a_reference_in_float64_is_named(lab_of: Any, name: str) -> None:
    """The kernel is off by no more than the reference itself is in float32."""
    found = diagnosed(lab_of, *HONEST[name])
    assert found.cause == "wider-reference", found
    assert found.evidence[0].startswith("in float32 the reference itself is off by")


WRONG: dict[str, tuple[Callable[[T], T], Callable[[T], T]]] = {
    "16 bits": (lambda x: x.bfloat16().float().softmax(-1), softmax),
    "another formula": (lambda x: total(x) * 1.001, total),
    "in float32": (lambda x: (x * 1.00001).softmax(-1), lambda x: x.softmax(-1)),
}


@sweep("name", WRONG)
def test_what_float32_does_not_explain_is_another_matter(lab_of: Any, name: str) -> None:
    """An input of 16 bits, a factor, and an error beside a reference in float32."""
    assert diagnosed(lab_of, *WRONG[name]).cause != "wider-reference"
