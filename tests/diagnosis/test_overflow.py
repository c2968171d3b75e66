"""Numbers that leave a range, beside what is cut at a size or lies in another block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion import dim, tensor
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.spec.inputs import derived

T = torch.Tensor


def test_a_copy_that_is_cut_has_no_exponential(lab_of: Any) -> None:
    """It gives as much more as its input has, as a logarithm of a sum of exponentials does in fewer elements."""
    sizes = {"dim rows": 3, "dim hidden": 5, "dtype": "float32", "values": "hundred"}
    found = diagnose(
        lab_of(lambda x: torch.where(x.abs() > 100, 0.0, x), lambda x: x * 1.0, {"x": tensor("rows hidden")}, sizes)
    )
    assert found.cause != "missing-max-subtraction", found
    found = diagnose(
        lab_of(lambda x: x.exp().sum(-1).log(), lambda x: x.logsumexp(-1), {"x": tensor("rows hidden")}, sizes)
    )
    assert found.cause == "missing-max-subtraction", found


def latent(q: T, c: T) -> T:
    """Attention of one query over keys whose first element is the value too."""
    return torch.softmax(c @ q, 0) @ c[:, :1]


def latent_without_maximum(q: T, c: T) -> T:
    power = (c @ q).exp()
    return (power / power.sum(0)) @ c[:, :1]


def first_kept(x: T, keep: T) -> T:
    return torch.softmax(x.masked_fill(~keep, -torch.inf), -1)


def first_kept_below_all(x: T, keep: T) -> T:
    weight = (x - x.amax(-1, keepdim=True)).exp() * keep
    return weight / weight.sum(-1, keepdim=True)


def every_other(rows: int, hidden: int) -> T:
    return (torch.arange(hidden) % 2 == 0).expand(rows, hidden).contiguous()


@pytest.mark.slow
def test_of_one_key_no_score_is_masked(lab_of: Any) -> None:
    """A softmax over one key uses no score; one whose maximum counts masked scores is cured of one row and of two."""
    inputs: dict[str, Any] = {"q": tensor("e"), "c": tensor("keys e")}
    change = lambda case: case.with_tensor("c", regime="hundred").with_tensor("q", regime="hundred")  # noqa: E731
    bounds = {"e": dim(1), "keys": dim(1)}
    lab = lab_of(latent_without_maximum, latent, inputs, {"dim e": 5, "dim keys": 1}, change=change, dims=bounds,
                 dtypes="float32")  # fmt: skip
    found = diagnose(lab)
    assert found.cause == "missing-max-subtraction", found

    inputs = {"x": tensor("rows hidden"), "keep": derived(every_other)}
    change = lambda case: case.with_tensor("x", regime="huge").with_(seed=2)  # noqa: E731
    lab = lab_of(first_kept_below_all, first_kept, inputs, {"dim rows": 1, "dim hidden": 3}, change=change,
                 dims={"rows": dim(1), "hidden": dim(2)}, dtypes="float32")  # fmt: skip
    found = diagnose(lab)
    assert found.cause == "wrong-neutral-element", found
