"""A finite number where minus infinity belongs, beside what is wrong for low scores by another reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion import tensor, values
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.rules.sentinels import lowest, zero

T = torch.Tensor

LOW = {"x": tensor("rows cols", values=values.normal(-12000.0, 3.0))}
MASKED = {**LOW, "m": tensor("rows cols", dtype=torch.bool)}
SIZES = {"dim rows": 2, "dim cols": 3}


def kept(m: T) -> T:
    """The mask, with the first of each row kept."""
    return torch.cat([torch.ones_like(m[:, :1]), m[:, 1:]], 1)


def masked(x: T, m: T, fill: float = float("-inf")) -> T:
    return torch.softmax(x.masked_fill(~kept(m), fill), -1)


def from_zero(x: T) -> T:
    """A log-sum-exp whose running maximum starts at 0."""
    top = x.amax(-1).clamp(min=0.0)
    return torch.log(torch.exp(x - top[:, None]).sum(-1)) + top


def largest_from(x: T) -> T:
    return x.amax(-1).clamp(min=-10000.0)


STANDS: dict[str, tuple[Callable[..., T], Callable[..., T], dict[str, Any]]] = {
    "masked scores": (lambda x, m: masked(x, m, -10000.0), masked, MASKED),
    "a maximum that starts at 0": (from_zero, lambda x: torch.logsumexp(x, -1), LOW),
    "a maximum of some -10000": (largest_from, lambda x: x.amax(-1), LOW),
}


@pytest.mark.parametrize("name", STANDS)
def test_what_stands_for_minus_infinity_is_named(lab_of: Any, name: str) -> None:
    """Only scores far below it tell, and they are right once they are moved up."""
    fused, reference, inputs = STANDS[name]
    found = diagnose(lab_of(fused, reference, inputs, {"dim rows": 4, "dim cols": 5}, dtypes="float32"))
    assert found.cause == "wrong-neutral-element", found
    assert "whose largest is -1.2" in found.evidence[0]
    assert found.evidence[0].endswith("is moved up until that is 0")


OTHER: dict[str, tuple[Callable[..., T], Callable[..., T], dict[str, Any]]] = {
    "an activation that is 0 there": (lambda x: torch.where(x < -9000, 0.1, torch.relu(x)), torch.relu, LOW),
    "an activation that follows it": (lambda x: x.clamp(min=-9000.0), lambda x: x * 1, LOW),
    "wrong anywhere": (lambda x: 0.5 * torch.softmax(x, -1), lambda x: torch.softmax(x, -1), LOW),
    "a sum": (lambda x: x.sum(-1).clamp(min=-9000.0), lambda x: x.sum(-1), LOW),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_is_wrong_for_low_scores_otherwise_is_not(lab_of: Any, name: str) -> None:
    """An element by itself, a constant factor, and a sum, which asks for more than differences."""
    fused, reference, inputs = OTHER[name]
    assert lowest(lab_of(fused, reference, inputs, SIZES, dtypes="float32")) is None


def test_scores_near_0_are_not_asked(lab_of: Any) -> None:
    """Nothing is moved where the largest is not far below: which number stands there does not matter."""
    inputs = {"x": tensor("rows cols", values=values.normal(0.0, 1.0))}
    lab = lab_of(lambda x: torch.softmax(2 * x, -1), lambda x: torch.softmax(x, -1), inputs, SIZES, dtypes="float32")
    assert lowest(lab) is None
    assert not any("minus infinity" in what for what in lab.ruled_out)


def window(x: T, pad: float, *, smallest: bool = False) -> T:
    """The largest of three neighbours in a row."""
    padded = torch.nn.functional.pad(x, (1, 1), value=pad)
    found = torch.stack([padded[:, i : i + x.shape[1]] for i in range(3)])
    return found.amin(0) if smallest else found.amax(0)


def ordinary(x: T) -> T:
    return x.float() * 1


NEAR_0 = {"x": tensor("rows cols", values=values.normal())}
TALL = {"dim rows": 40, "dim cols": 2}
BESIDE: dict[str, tuple[Callable[..., T], Callable[..., T], str]] = {
    "a window": (lambda x: window(x, 0.0), lambda x: window(x, -torch.inf), "below it, and right once x is positive"),
    "a running maximum": (lambda x: x.cummax(-1)[0].clamp(min=0), lambda x: x.cummax(-1)[0], "the largest is sought"),
    "the smallest": (
        lambda x: window(x, 0.0, smallest=True),
        lambda x: window(x, torch.inf, smallest=True),
        "above it, and right once x is negative",
    ),
    "an activation": (torch.relu, ordinary, ""),
    "twice the largest": (lambda x: 2 * window(x, 0.0), lambda x: 2 * window(x, -torch.inf), ""),
    "a 0 in the first column": (lambda x: x.index_fill(1, torch.tensor([0]), 0.0), ordinary, ""),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_largest_value_from_0_on_is_named(lab_of: Any, name: str) -> None:
    """Right of positive numbers; an element by itself that is cut at 0, or is lost, is no such thing."""
    fused, reference, said = BESIDE[name]
    found = zero(lab_of(fused, reference, NEAR_0, TALL, dtypes="float32"))
    assert (found is not None) == bool(said), found
    if found is not None:
        assert found.cause == "wrong-neutral-element"
        assert said in " ".join(found.evidence)
        whole = diagnose(lab_of(fused, reference, NEAR_0, TALL, dtypes="float32"))
        assert (whole.cause, whole.evidence) == (found.cause, found.evidence)
