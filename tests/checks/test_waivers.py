"""``without=`` switches off one check: no other one reports the same difference, and nothing else is hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion.diagnosis.causes import likely_cause

T = torch.Tensor

VALUES = {"values": "a kernel of its own scale"}


def triple(x: T) -> T:
    return x * 3


def more(x: T) -> T:
    return x * 3 + 1


class Kept:
    """Computes once and returns that for all values of a shape."""

    def __init__(self) -> None:
        self.results: dict[Any, T] = {}

    def __call__(self, x: T) -> T:
        return self.results.setdefault(x.shape, x * 3).clone()


def numbered(x: T) -> T:
    return torch.linspace(0, 1, x.numel()).reshape(x.shape)


@pytest.mark.parametrize("fused", [more, torch.ones_like, numbered])
def test_wrong_values_that_are_waived_are_no_cached_answer(judge_one: Any, fused: Any) -> None:
    """The same numbers for other values, and no right answer: that is `values`, which is off."""
    assert judge_one(fused, triple, again=True, without=VALUES).failure is None
    assert judge_one(fused, triple, again=True).failure.check == "values"


@pytest.mark.parametrize(
    "keywords",
    [
        {"deterministic": False},
        {"grad": True, "deterministic": False},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
)
def test_no_check_judges_values_again_that_are_waived(judge_one: Any, keywords: Any) -> None:
    """Forward while it records a graph, further calls of what may vary, another compiler: all compare values."""
    result = judge_one(more, triple, again=True, without=VALUES, **keywords)
    assert result.failure is None, result.failure


def test_a_cached_answer_is_found_where_values_are_waived(judge_one: Any) -> None:
    """Its first answer is right, so that the waiver excuses nothing of it."""
    failure = judge_one(Kept(), triple, again=True, without=VALUES).failure
    assert likely_cause(failure) == "cached-answer"


def test_a_waived_write_hides_no_wrong_gradient(judge_one: Any) -> None:
    """``without={"inputs": ...}`` of what backward overwrites; its gradient is still compared."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x * 3

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            ctx.saved_tensors[0].zero_()
            return g * 2

    failure = judge_one(Fused.apply, triple, grad=True, without={"inputs": "given up"}).failure
    assert failure.identity == "gradients:x:finite"
