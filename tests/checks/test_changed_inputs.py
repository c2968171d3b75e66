"""Inputs that forward leaves alone where nothing requires grad, and backward, or another forward, changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion.spec.inputs import tensor

T = torch.Tensor


def changed_in(where: str) -> Callable[[T], T]:
    """``2 * x`` that adds 1 to an element of its input, and nowhere else: in backward, or in some forwards."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            ctx.x, made = x.detach(), x * 2
            if where == "forward" and x.requires_grad and x.numel():
                x.detach().view(-1)[:1].add_(1)
            return made

        @staticmethod
        def backward(ctx: Any, *gradients: T) -> T:
            if where == "backward" and ctx.x.numel():
                ctx.x.view(-1)[:1].add_(1)
            return gradients[0] * 2

    def fused(x: T) -> T:
        if where == "no_grad" and x.requires_grad and not torch.is_grad_enabled() and x.numel():
            made = x * 2
            x.detach().view(-1)[:1].add_(1)
            return made
        result: T = Fused.apply(x)
        return result

    return fused


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("backward", "backward changed 1 element(s) of its input x, the first at [0, 0]; forward had changed none"),
        ("forward", "forward, while it records a graph, changed 1 element(s)"),
        ("no_grad", "under torch.no_grad(), with inputs that require grad, the kernel changed 1 element(s)"),
    ],
)
def test_an_input_changed_for_a_gradient_is_told_of_the_call_that_did(examine: Any, where: str, said: str) -> None:
    """Forward without a graph was judged before and changes nothing, so that mutates= would be no help."""
    given = {"x": tensor("rows hidden", layouts=("contiguous",))}
    record = examine(changed_in(where), lambda x: x * 2, given, grad=True)
    assert (record.failed_check, record.cause) == ("inputs", "mutates-input")
    assert said in record.message
    assert "mutates=" not in record.message
    assert "clobbers='x'" in record.message
    allowed = examine(changed_in(where), lambda x: x * 2, given, grad=True, clobbers="x")
    assert allowed.verdict == "pass", allowed.message
