"""Check ``gradients`` of kernels with several outputs: one used alone, and one whose upstream gradient gets lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.checks.judged import of_x, plain_cases

T = torch.Tensor


def two(x: T) -> tuple[T, T]:
    return torch.tanh(x), x * 3


class Two(torch.autograd.Function):
    """``two`` with a backward in which ``lost`` is nothing, the second upstream gradient, or a third of it."""

    lost = ""

    @staticmethod
    def forward(ctx: Any, x: T) -> tuple[T, T]:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> T:
        (y,), (a, b) = ctx.saved_tensors, gradients
        return (1 - y * y) * a + {"": 3, "all": 0, "some": 2}[Two.lost] * b


@pytest.mark.parametrize("lost", ["", "all", "some"])
def test_what_one_output_sends_back_is_told_apart(judge_one: Any, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """Wrong only where out[1] has an upstream gradient; a cause where nothing of it arrives."""
    monkeypatch.setattr(Two, "lost", lost)
    failures = [judge_one(of_x(Two), two, grad=True, case=case).failure for case in plain_cases(6)]
    found = [failure for failure in failures if failure is not None]
    assert bool(found) is bool(lost)
    assert all("it is wrong only where out[1] has an upstream gradient" in failure.reason for failure in found)
    assert all((failure.cause == "lost-output-gradient") is (lost == "all") for failure in found)


def test_a_gradient_wrong_for_each_output_is_no_matter_of_one(judge_one: Any) -> None:
    """Nothing is said of outputs where each one alone gives a wrong gradient."""

    class Wrong(Two):
        @staticmethod
        def backward(ctx: Any, *gradients: T) -> T:
            return Two.backward(ctx, *gradients) * 0.5

    failures = [judge_one(of_x(Wrong), two, grad=True, case=case).failure for case in plain_cases(4)]
    assert all("only where" not in failure.reason for failure in failures)


def test_a_failure_says_what_the_upstream_gradient_is(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kind, the outputs that get it and how it is laid out."""
    monkeypatch.setattr(Two, "lost", "all")
    told = [judge_one(of_x(Two), two, grad=True, case=case).failure for case in plain_cases(8)]
    words = [failure.reason.partition("the upstream gradient is ")[2].partition(";")[0] for failure in told if failure]
    assert "random, of out[0] (contiguous), out[1] (contiguous)" in words
    assert "of strides 0, one repeated number 1.233, of out[1] (expanded) alone" in words
    assert "negative, of out[0] (step, offset 3), out[1] (padded)" in words


@pytest.mark.slow
def test_one_of_several_outputs_may_be_used_alone(judge_one: Any) -> None:
    """A backward that needs the gradient of every output fails where the others have none."""

    class Pair(torch.autograd.Function):
        whole = True

        @staticmethod
        def forward(ctx: Any, x: T) -> Any:
            ctx.set_materialize_grads(False)
            return x * 2, x * 3

        @staticmethod
        def backward(_: Any, *gradients: T) -> Any:
            a, b = gradients
            if Pair.whole or (a is not None and b is not None):
                return a * 2 + b * 3
            return a * 2 if a is not None else b * 3

    two = lambda x: (x * 2, x * 3)  # noqa: E731
    failures = [judge_one(of_x(Pair), two, grad=True, case=case).failure for case in plain_cases(12)]
    assert {f.check for f in failures if f is not None} == {"error"}
    Pair.whole = False
    for case in plain_cases(12):
        assert judge_one(of_x(Pair), two, grad=True, case=case).failure is None
