"""Check ``invariance``: dims that cannot be cut into slices are unknown, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion import values
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.inputs import tensor

T = torch.Tensor
INPUTS = {"x": tensor("rows hidden"), "w": tensor("hidden")}


def reference(x: T, w: T) -> T:
    return (x * w).sum(-1)


INDEX = {"i": tensor("tokens", dtype=torch.int64, values=values.indices("rows")), **INPUTS}
UNSLICEABLE: dict[str, tuple[Any, Callable[..., Any], dict[str, Any], str]] = {
    "indices along it": (INDEX, lambda i, x, w: reference(x, w)[i], {}, "values of input i point along it"),
    "a multiple of it": (
        {"x": tensor("2*rows hidden"), "w": tensor("hidden")},
        reference,
        {},
        "input x has the size 2 * rows",
    ),
    "several dims": ({"x": tensor("*rows hidden"), "w": tensor("hidden")}, reference, {}, "several dimensions"),
    "twice": ({"x": tensor("rows rows"), "w": tensor("rows")}, reference, {}, "has it twice"),
    "bound to another": (
        {"x": tensor("rows groups hidden"), "w": tensor("hidden")},
        reference,
        {"dims": {"rows": dim(multiple_of="groups")}},
        "rows is a multiple of groups",
    ),
    "one size": (INPUTS, reference, {"dims": {"rows": 3}}, "only one size of it is allowed"),
    "never two": (INPUTS, reference, {"dims": {"rows": dim(0, 1)}}, "never more than 1"),
    "no output": (INPUTS, lambda x, w: (x * w).sum(0), {}, "no output follows it"),
    "sorted away": (
        INPUTS,
        lambda x, w: torch.outer(x[:, :1].sum(1), x[:, :1].sum(1)),
        {},
        "cannot be cut into slices",
    ),
    "chance is declared": (INPUTS, reference, {"deterministic": False}, "may vary from run to run"),
    "not requested": (INPUTS, reference, {"invariant": ()}, "not requested: invariant= names no dim"),
}


@pytest.mark.parametrize("name", UNSLICEABLE)
def test_what_cannot_be_cut_is_unknown_with_the_reason(examine: Any, name: str) -> None:
    """No verdict is given where slices do not stand for themselves or nothing would show."""
    inputs, written, keywords, reason = UNSLICEABLE[name]
    finite = {
        n: tensor(t.shape.text, dtype=t.dtypes or None, values=t.values or values.normal()) for n, t in inputs.items()
    }
    record = examine(written, written, finite, cases=3, **{"invariant": "rows", **keywords})
    found = record.checks["invariance"]
    assert found["verdict"] == "unknown", record.message
    assert reason in found["reason"]
