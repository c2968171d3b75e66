"""Values of 0: divisions, logarithms and roots of them, beside what fails for small numbers too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_fusion import FusionSpec, dim, tensor, values
from pytest_fusion.case.case_model import Case
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import Context
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.rules.numerics import zeros
from tests.sweeps import sweep

T = torch.Tensor

ROWS = {"x": tensor("rows n")}
SHARES = {"x": tensor("rows n", values=lambda s, d, g: (torch.rand(s, generator=g) - 0.4).clamp(min=0).to(d))}

FEW = {"x": tensor("rows n", values=lambda s, d, g: torch.randint(0, 3, s, generator=g).to(d))}


class Length(torch.autograd.Function):
    """Its gradient divides by the length."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        length = x.square().sum(-1).sqrt()
        ctx.save_for_backward(x, length)
        return length

    @staticmethod
    def backward(ctx: Any, up: T) -> T:
        x, length = ctx.saved_tensors
        return x / length[:, None] * up[:, None]


def scaled(x: T) -> tuple[T, T]:
    largest = x.abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / 127)
    return (x / scale).round(), scale


def scaled_by_0(x: T) -> tuple[T, T]:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).nan_to_num(0).round(), scale


WRONG: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any], str, dict[str, Any]]] = {
    "0 times its logarithm": (
        lambda x: (x * x.log()).sum(-1),
        lambda x: torch.special.xlogy(x, x).sum(-1),
        SHARES,
        "unit",
        {},
    ),
    "divided by its root": (lambda x: x / x.abs().sqrt(), lambda x: x.sign() * x.abs().sqrt(), ROWS, "ties", {}),
    "the scale of a row of zeros": (scaled_by_0, scaled, ROWS, "zero-rows", {}),
    "the slope at 0": (
        Length.apply,
        lambda x: torch.linalg.vector_norm(x, dim=-1),
        ROWS,
        "zero-rows",
        {"grad": True},
    ),
    "the sign of 0": (lambda x: torch.where(x < 0, -1.0, 1.0), torch.sign, ROWS, "ties", {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_zeros_make_is_named(lab_of: Any, name: str) -> None:
    """Right once zeros are small numbers, for values that a spec narrows too, and in a gradient."""
    fused, reference, inputs, regime, more = WRONG[name]
    sizes = {"dim rows": 3, "dim n": 5}
    found = diagnose(
        lab_of(
            fused,
            reference,
            inputs,
            sizes,
            change=lambda case: case.with_tensor("x", regime=regime),
            dims={"n": dim(1)},
            dtypes="float32",
            **more,
        )
    )
    assert found.cause == "zero-value", found
    assert "in place of the zeros of x" in found.evidence[0]


RIGHT: dict[str, tuple[Callable[[T], T], Callable[[T], T]]] = {
    "another formula": (lambda x: torch.tanh(x) + 0.3, torch.tanh),
    "ties": (
        lambda x: (x >= x.amax(-1, keepdim=True)).float(),
        lambda x: F.one_hot(x.argmax(-1), x.shape[-1]).float(),
    ),
    "a missing floor": (
        lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-30).rsqrt(),
        lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
    ),
}


@sweep("name", RIGHT, fast=("a missing floor", "ties"))
def test_what_is_wrong_without_zeros_is_no_matter_of_them(lab_of: Any, name: str) -> None:
    """A formula, equal values of any size and a floor fail for small numbers as for zeros."""
    fused, reference = RIGHT[name]
    inputs = FEW if name == "ties" else ROWS
    lab = lab_of(
        fused,
        reference,
        inputs,
        {"dim rows": 3, "dim n": 5},
        change=lambda case: case if name == "ties" else case.with_tensor("x", regime="zero-rows"),
        dims={"n": dim(1)},
        dtypes="float32",
    )
    assert diagnose(lab).cause != "zero-value"


@pytest.mark.slow
def test_a_0_that_one_seed_alone_draws_is_too_little(lab_of: Any) -> None:
    """Where no other seed draws a 0 nothing is said of zeros."""

    def rarely_0(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> T:
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
        return torch.where(drawn.sum() < 0.4, 0.0, drawn + 1).to(dtype)

    def seeds(case: Case) -> Iterator[Case]:
        return (case.with_(seed=seed) for seed in range(1000))

    def change(case: Case) -> Case:
        context = Context(FusionSpec(fused=fused, reference=torch.ones_like, inputs=inputs), torch.device("cpu"))
        return next(each for each in seeds(case) if judge_case(context, each).failure is not None)

    def fused(x: T) -> T:
        return x / x

    inputs = {"x": tensor("n", values=rarely_0)}
    found = diagnose(lab_of(fused, torch.ones_like, inputs, {"dim n": 3}, change=change, dtypes="float32"))
    assert found.cause == "unexplained", found
    assert not any("zeros" in each for each in found.ruled_out)


def test_what_fails_without_a_0_is_no_matter_of_those_in_larger_cases(lab_of: Any) -> None:
    """Where two inputs are equal the slope of their distance is 0: two of a single share, each of them 1, are."""

    class Distance(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, p: T, q: T) -> T:
            ctx.save_for_backward(p, q)
            return (p - q).abs().sum()

        @staticmethod
        def backward(ctx: Any, up: T) -> tuple[T, None]:
            p, q = ctx.saved_tensors
            return torch.where(p > q, up, -up), None

    inputs = {name: tensor("rows n", values=values.probabilities()) for name in ("p", "q")}
    lab = lab_of(
        Distance.apply,
        lambda p, q: (p - q).abs().sum(),
        inputs,
        {"dim rows": 1, "dim n": 1},
        dims={"rows": dim(1), "n": dim(1)},
        dtypes="float32",
        grad=("p",),
    )
    assert lab.check == "gradients"
    assert zeros(lab) is None
