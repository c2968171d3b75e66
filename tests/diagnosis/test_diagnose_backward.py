"""Planted backwards and the causes that experiments name, with the gradient in the place of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.spec.inputs import tensor
from tests.diagnosis.wrong import (
    PLAIN,
    ROWS,
    T,
    laid,
)
from tests.sweeps import sweep


def differentiable(backward: Callable[[T, T], T]) -> Callable[[T], T]:
    """``x * x`` with the backward of ``x`` and the upstream gradient."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, g: T) -> T:
            return backward(*ctx.saved_tensors, g)

    def fused(x: T) -> T:
        return Square.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    return fused


def all_gradients(seed: int) -> bool:
    """Itself and where a statistical failure is confirmed."""
    fresh = [counter_random.mix(seed, "confirm", attempt) >> 1 for attempt in (1, 2)]
    return all(map(gradients.all_gradients, (seed, *fresh)))


def gradient_of_square(x: T, g: T) -> T:
    return 2 * x * g


def rounded_on_the_way(x: T, g: T) -> T:
    if x.dtype is torch.float32:
        return gradient_of_square(x, g)
    part = 2.6 * x.float()
    for factor in (1.7, 0.3):
        part = part.to(x.dtype).float() * factor
    return (part.to(x.dtype).float() / 0.663 * g.float()).to(x.dtype)


GRADIENTS: dict[str, tuple[str, Callable[[T, T], T], dict[str, Any], Callable[[Case], Case]]] = {
    "strides": (
        "ignores-strides", lambda x, g: gradient_of_square(x, g) if x.is_contiguous() else x.mT.reshape(x.shape) * g,
        PLAIN, laid("transposed"),
    ),
    "tail": (
        "tail-mask", lambda x, g: torch.cat([gradient_of_square(x, g)[:, : (n := x.shape[1] // 16 * 16)],
                                             0 * x[:, n:]], 1), PLAIN, lambda case: case,
    ),
    "rows mixed up": (
        "wrong-index-map", lambda x, g: torch.cat([(d := gradient_of_square(x, g))[:1], d[1:] + d[:1]]), PLAIN,
        lambda case: case,
    ),
    "another formula": (
        "unexplained", lambda x, g: x * x * g, PLAIN,
        lambda case: case,
    ),
    "a tail that is strided by chance": (
        "tail-mask", lambda x, g: torch.cat([gradient_of_square(x, g)[:, : (n := x.shape[1] // 16 * 16)],
                                             0 * x[:, n:]], 1), PLAIN, laid("padded"),
    ),
}  # fmt: skip


def by_equal_strides(x: T, g: T) -> T:
    return gradient_of_square(x, g) + 0.1 * x * (x.stride(0) != g.stride(0))


@pytest.mark.parametrize(
    ("backward", "cause"), [(by_equal_strides, "gradient-layout"), (lambda x, g: x * x * g, "unexplained")]
)
def test_a_cause_that_the_check_names_in_other_cases_counts(lab_of: Any, backward: Any, cause: str) -> None:
    """Rows of another pitch than the upstream gradient's, here those of the input; no case names another formula."""
    seed = 103  # random and contiguous; the first three have rows of the input's pitch
    choice = {"dim rows": 2, "dim hidden": 3, "dtype": "float32", "layout x": ("padded", 0)}
    more: dict[str, Any] = {"dtypes": "float32", "grad": True, "change": lambda case: case.with_(seed=seed)}
    lab = lab_of(differentiable(backward), lambda x: x * x, ROWS, choice, **more)
    assert lab.verdict.cause is None
    found = diagnose(lab)
    assert found.cause == cause, found


@sweep("name", GRADIENTS, fast=("tail", "strides"))
def test_experiments_name_what_a_backward_does_wrong(lab_of: Any, name: str) -> None:
    """The same rules, with the gradient in the place of the result."""
    cause, backward, choice, change = GRADIENTS[name]

    def plainly(case: Case) -> Case:
        return change(case.with_(seed=next(filter(all_gradients, range(1000)))))

    def square(x: T) -> T:
        return x.float().square().to(x.dtype)

    lab = lab_of(differentiable(backward), square, ROWS, choice, change=plainly, blocks=(16,), grad=True)
    assert lab.verdict.check == "gradients"
    found = diagnose(lab)
    assert found.cause == cause, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backward", "cause"),
    [
        (lambda x, g: 2 * x * g - 3 * (x > 1.2) * g, "unexplained"),
        (lambda x, g: 2 * x * g.flip(0), "wrong-index-map"),
    ],
    ids=["some values", "other rows"],
)
def test_an_element_that_is_wrong_by_itself_is_not_mixed_up(
    lab_of: Any, backward: Callable[[T, T], T], cause: str
) -> None:
    """The first and the last slice are right alone where a value that few hold is wrong; so is the worst one then."""

    def plainly(case: Case) -> Case:
        return next(each for seed in range(100) if all_gradients(seed) for each in [case.with_(seed=seed)])

    inputs = {"x": tensor("n")}
    lab = lab_of(
        differentiable(backward), lambda x: x * x, inputs, {"dim n": 14}, grad=True, dtypes="float32", change=plainly
    )
    found = diagnose(lab)
    assert found.cause == cause, found


def weighted(total_of: Callable[[T], T]) -> Callable[[T, T], T]:
    """``x * w`` whose backward adds up the terms of a 16-bit weight's gradient by ``total_of``."""

    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T, w: T) -> T:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, g: T) -> tuple[T, T]:
            x, w = ctx.saved_tensors
            terms = g.float() * x.float()
            return g * w, (terms.sum(0) if w.dtype is torch.float32 else total_of(terms)).to(w.dtype)

    def fused(x: T, w: T) -> T:
        return Weighted.apply(x, w)  # type: ignore[no-any-return,no-untyped-call]

    return fused
