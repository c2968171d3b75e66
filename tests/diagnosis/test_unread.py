"""Inputs that a kernel does not read, beside those that it reads wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from pytest_fusion import dim, tensor, values
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.rules.unread import unread
from pytest_fusion.spec.inputs import derived
from tests.sweeps import sweep

T = torch.Tensor

AFFINE = {"x": tensor("rows cols"), "w": tensor("cols"), "b": tensor("cols")}
MASKED = {"x": tensor("rows cols", values=values.finite()), "m": tensor("rows cols", dtype=torch.bool)}
GATHERED = {"x": tensor("rows cols"), "i": tensor("cols", dtype=torch.int64, values=values.indices("cols"))}
SCALED = {"x": tensor("rows cols", values=values.finite()), "s": st.floats(0.25, 4)}
FLAGGED = {"x": tensor("rows cols", values=values.finite()), "act": st.sampled_from(["relu", "tanh"])}
POOLS = {"s": (1.0, 2.0, 0.5), "act": ("relu", "tanh")}
SIZES = {"dim rows": 2, "dim cols": 3}


def affine(x: T, w: T, b: T) -> T:
    return x * w + b


def largest(x: T, m: T) -> T:
    return x.masked_fill(~m, -100.0)


def gathered(x: T, i: T) -> T:
    return x[:, i]


def scaled(x: T, s: float) -> T:
    return x * s


def active(x: T, act: str) -> T:
    found: T = getattr(torch, act)(x)
    return found


UNREAD: dict[str, tuple[Callable[..., T], Callable[..., T], dict[str, Any], dict[str, Any]]] = {
    "b": (lambda x, w, b: x * w, affine, AFFINE, {}),
    "w": (lambda x, w, b: x + b, affine, AFFINE, {}),
    "m": (lambda x, m: x.clone(), largest, MASKED, {}),
    "i": (lambda x, i: x.clone(), gathered, GATHERED, {}),
    "s": (lambda x, s: x.clone(), scaled, SCALED, {"drawn s": 1}),
    "act": (lambda x, act: torch.relu(x), active, FLAGGED, {"drawn act": 1}),
}


@pytest.mark.parametrize("name", UNREAD)
def test_an_input_that_is_not_read_is_named(lab_of: Any, name: str) -> None:
    """A tensor of numbers, flags or indices, a number or a flag, left out altogether."""
    fused, reference, inputs, choice = UNREAD[name]
    seeded = {"change": lambda case: case.with_(seed=1)}
    found = diagnose(lab_of(fused, reference, inputs, {**SIZES, **choice}, pools=POOLS, **seeded))
    assert found.cause == "ignores-input", found
    assert found.evidence[0].startswith(f"whatever {name} holds")


WRONG: dict[str, tuple[Callable[..., T], Callable[..., T], dict[str, Any]]] = {
    "with another sign": (lambda x, w, b: x * w - b, affine, AFFINE),
    "in one column alone": (lambda x, w, b: x * w + b[:1], affine, AFFINE),
    "the other way round": (lambda x, m: largest(x, ~m), largest, MASKED),
    "nothing is": (lambda x, w, b: torch.ones_like(x), affine, AFFINE),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_input_that_is_read_wrongly_is_another_matter(lab_of: Any, name: str) -> None:
    """Some bit of the result follows it; a kernel that no input reaches says nothing of any."""
    fused, reference, inputs = WRONG[name]
    lab = lab_of(fused, reference, inputs, SIZES)
    assert unread(lab) is None


def test_scores_that_are_all_too_low_are_read(lab_of: Any) -> None:
    """Others of some -12000 change no bit where -10000 stands for minus infinity; what they are near 0 does."""
    inputs = {"x": tensor("rows cols", values=values.normal(-12000.0, 3.0))}
    lab = lab_of(lambda x: x.amax(-1).clamp(min=-10000.0), lambda x: x.amax(-1), inputs, SIZES, dtypes="float32")
    assert unread(lab) is None


def padded(x: T, labels: T, padding: int) -> T:
    return x.masked_fill((labels == padding)[:, None], 0.0)


@pytest.mark.parametrize(
    ("fused", "named"),
    [
        (lambda x, labels, padding: x.masked_fill((labels < 0)[:, None], 0.0), "padding"),
        (lambda x, labels, padding: x.clone(), "labels"),
    ],
)
def test_labels_are_read_if_those_of_another_profile_are(lab_of: Any, fused: Any, named: str) -> None:
    """Where all labels lie from 0 on, who takes those below 0 for padding keeps them all; 0 may be what pads."""
    drawn = values.one_of(values.integers(0, 5), values.integers(-100, -99), values.integers(-1, 1))
    inputs = {
        "x": tensor("tokens n", values=values.normal()),
        "labels": tensor("tokens", dtype=torch.int64, values=drawn),
        "padding": st.sampled_from([-100, 0]),
    }
    sizes = {"dim tokens": 3, "dim n": 2, "choice labels": 0, "value padding": 0}
    lab = lab_of(fused, padded, inputs, sizes, pools={"padding": (0, -100)}, dims={"tokens": dim(1)}, dtypes="float32")
    found = unread(lab)
    assert found is not None
    assert found.evidence[0].startswith(f"whatever {named} holds"), found


def up_to(x: T, lengths: T) -> T:
    return x.masked_fill(torch.arange(x.shape[1]) >= lengths[:, None], 0.0)


@pytest.mark.parametrize(
    ("fused", "cause"),
    [
        (lambda x, lengths: up_to(x, lengths[:1]), "wrong-index-map"),
        (lambda x, lengths: up_to(x, torch.full_like(lengths, x.shape[1])), "ignores-input"),
    ],
    ids=["the first", "none"],
)
@sweep("rows", [2, 3])
def test_the_first_of_a_few_lengths_is_read(lab_of: Any, fused: Any, cause: str, rows: int) -> None:
    """Of two lengths the first is the longest for nearly every seed; of equal ones any is right."""
    inputs = {
        "x": tensor("rows cols", values=values.normal()),
        "lengths": tensor("rows", dtype=torch.int32, values=values.integers(1, "cols")),
    }
    bounds = {"rows": dim(rows, rows), "cols": dim(1, 50)}
    for cols in (2, 5):
        lab = lab_of(fused, up_to, inputs, {"dim rows": rows, "dim cols": cols}, dims=bounds, dtypes="float32",
                     change=lambda case: case.with_(seed=3))  # fmt: skip
        found = diagnose(lab)
        assert found.cause == cause, found


@pytest.mark.slow
def test_a_gradient_that_ignores_an_input(lab_of: Any) -> None:
    """The forward reads the weight, backward does not."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T, w: T) -> T:
            ctx.save_for_backward(x)
            return x * x * w

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *given: T) -> Any:
            (x,) = ctx.saved_tensors
            return 2 * x * given[0], (given[0] * x * x).sum(0)

    inputs = {name: AFFINE[name] for name in "xw"}
    lab = lab_of(Kernel.apply, lambda x, w: x * x * w, inputs, SIZES, grad=True)
    found = unread(lab)
    assert found is not None
    assert found.evidence[0].startswith("whatever w holds, the kernel's gradient of x keeps its bits")


def test_what_others_are_derived_from_is_not_asked(lab_of: Any) -> None:
    """Changed alone it would no longer fit them, so that nothing is known of it."""
    inputs = {**SCALED, "top": derived(lambda s: s)}

    def reference(x: T, s: float, top: float) -> T:
        return x * s + top

    lab = lab_of(lambda x, s, top: x + top, reference, inputs, {**SIZES, "drawn s": 1}, pools=POOLS)
    assert unread(lab) is None


def decayed(x: T, s: float) -> T:
    return x * (1 - 1e-3 * s)


def test_a_number_of_little_effect_is_named(lab_of: Any) -> None:
    """A decay that is left out changes a weight by a thousandth, which no bits of float32 miss."""
    found = diagnose(
        lab_of(lambda x, s: x * 1, decayed, SCALED, {**SIZES, "drawn s": 1}, pools=POOLS, dtypes="float32")
    )
    assert (found.cause, found.evidence[0].startswith("whatever s holds")) == ("ignores-input", True), found


def test_a_number_that_rounding_hides_is_not(lab_of: Any) -> None:
    """Nobody's bits follow what is far below an epsilon, so that it is no matter whether it is read."""

    def reference(x: T, s: float) -> T:
        return x * (1 - 1e-9 * s)

    lab = lab_of(lambda x, s: x.abs(), reference, SCALED, {**SIZES, "drawn s": 1}, pools=POOLS, dtypes="float32")
    assert unread(lab) is None
