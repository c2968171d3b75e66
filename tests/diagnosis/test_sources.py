"""Elements of inputs that reach results which must not know them, besides all that they should know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_fusion import dim, tensor, values
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.rules.sources import beyond
from tests.sweeps import sweep

T = torch.Tensor
GRID = {"x": tensor("b h w")}
BOUNDS = {name: dim(1) for name in "bhw"}
SIZES = {"dim b": 1, "dim h": 2, "dim w": 3}
ROWS = {"x": tensor("rows n", values=values.normal())}
PAIR = {"x": tensor("rows n", values=values.normal()), "y": tensor("rows n", values=values.normal())}


def stencil(x: T) -> T:
    p = F.pad(x, (1, 1, 1, 1))
    return p[:, :-2, 1:-1] + p[:, 2:, 1:-1] + p[:, 1:-1, :-2] + p[:, 1:-1, 2:] - 4 * x


def wrapped(x: T) -> T:
    return x.roll(1, 1) + x.roll(-1, 1) + x.roll(1, 2) + x.roll(-1, 2) - 4 * x


def across_rows(x: T) -> T:
    """The neighbours along a row by their place in memory: those of an end lie in another row."""
    flat = F.pad(x.flatten(1), (1, 1))
    p = F.pad(x, (0, 0, 1, 1))
    return p[:, :-2] + p[:, 2:] + (flat[:, :-2] + flat[:, 2:]).view(x.shape) - 4 * x


WRONG: dict[str, tuple[Callable[[T], T], Callable[[T], T], dict[str, Any], dict[str, int]]] = {
    "wrapped": (wrapped, stencil, GRID, SIZES),
    "rows": (across_rows, stencil, GRID, SIZES),
}


@sweep("name", WRONG, fast=("rows",))
def test_what_a_result_must_not_know_is_named(lab_of: Any, name: str) -> None:
    """A stencil that goes on at the other end, or in the next row, knows all that it should and more."""
    fused, reference, inputs, sizes = WRONG[name]
    found = diagnose(lab_of(fused, reference, inputs, sizes, dims=BOUNDS, dtypes="float32"))
    assert found.cause == "wrong-index-map", found
    assert found.evidence[0].endswith("which it must not; the same for other values")


def window(x: T, wide: int) -> T:
    """Each element and those before it in its row, so many in all."""
    return functools.reduce(torch.add, (F.pad(x, (back, 0))[..., : x.shape[-1]] for back in range(wide)))


@pytest.mark.parametrize("size", [3, 5])
def test_a_window_that_is_one_too_wide_is_off_by_one(lab_of: Any, size: int) -> None:
    """What it knows besides lies next to what it must; of three elements that is at the other end as well."""
    lab = lab_of(lambda x: window(x, 3), lambda x: window(x, 2), ROWS, {"dim rows": 1, "dim n": size}, dtypes="float32")
    found = beyond(lab)
    assert found is not None
    assert found.cause == "off-by-one-mask"
    assert "one past those that it must know along axis 1" in found.evidence[0]


def test_a_window_that_wraps_around_is_not_off_by_one(lab_of: Any) -> None:
    """The last of a row is no neighbour of its first once the row is long."""

    def around(x: T) -> T:
        return x + x.roll(1, 1)

    found = beyond(lab_of(around, lambda x: window(x, 2), ROWS, {"dim rows": 1, "dim n": 3}, dtypes="float32"))
    assert found is not None
    assert found.cause == "wrong-index-map"


SAME: dict[str, tuple[Callable[[T, T], T], Callable[[T, T], T]]] = {
    "a gate that never closes": (lambda x, y: F.gelu(x) * y, lambda x, y: F.relu(x) * y),
    "another sign": (lambda x, y: x - y, lambda x, y: x + y),
    "a smooth maximum": (lambda x, y: torch.logaddexp(x, y), lambda x, y: torch.maximum(x, y)),  # noqa: PLW0108
}


@sweep("name", SAME, fast=("a smooth maximum",))
def test_another_formula_of_the_same_elements_knows_no_more(lab_of: Any, name: str) -> None:
    """What counts at some seeds alone is no element of another place."""
    fused, reference = SAME[name]
    assert beyond(lab_of(fused, reference, PAIR, {"dim rows": 2, "dim n": 3}, dtypes="float32")) is None


@pytest.mark.slow
def test_what_wraps_around_is_met_in_three(lab_of: Any) -> None:
    """Of one element the neighbour is itself, and of two the left one is the right one."""
    found = diagnose(
        lab_of(wrapped, stencil, GRID, {"dim b": 1, "dim h": 1, "dim w": 1}, dims=BOUNDS, dtypes="float32")
    )
    assert found.cause == "wrong-index-map", found


def attended(q: T, k: T, v: T, wide: int) -> T:
    back = torch.arange(len(q))[:, None] - torch.arange(len(k))
    return torch.softmax((q @ k.T).masked_fill((back < 0) | (back >= wide), -torch.inf), -1) @ v


ATTENTION: dict[str, tuple[Callable[[T, T, T], T], str, str]] = {
    "a window": (lambda q, k, v: attended(q, k, v, 2), "off-by-one-mask", "v["),
    "queries": (lambda q, k, v: attended(q, k, v, 1) + q, "wrong-index-map", "q["),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTION)
def test_what_counts_beside_a_second_key_alone_is_innocent(lab_of: Any, name: str) -> None:
    """Of one key no query matters; of a window that is one too wide it does, as the value does that should not."""
    fused, cause, named = ATTENTION[name]
    inputs = {name: tensor("m d", values=values.normal()) for name in "qkv"}
    lab = lab_of(fused, lambda q, k, v: attended(q, k, v, 1), inputs, {"dim m": 2, "dim d": 1},
                 dims={"m": dim(1), "d": dim(1)}, dtypes="float32")  # fmt: skip
    found = beyond(lab)
    assert found is not None
    assert found.cause == cause, found
    assert f" changes with {named}" in found.evidence[0]


def test_a_window_is_sought_along_each_dim(lab_of: Any) -> None:
    """More sequences tell nothing of two keys, of which one is next to either end of the other; more keys do."""
    inputs = {"x": tensor("b n", values=values.normal())}
    sizes, bounds = {"dim b": 2, "dim n": 2}, {"b": dim(1), "n": dim(1)}
    lab = lab_of(lambda x: window(x, 2), lambda x: window(x, 1), inputs, sizes, dims=bounds, dtypes="float32")
    found = beyond(lab)
    assert found is not None
    assert found.cause == "off-by-one-mask", found
