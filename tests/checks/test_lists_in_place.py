"""``mutates=`` of lists of tensors, as optimisers over many parameters write them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.inputs import derived, tensor

T = torch.Tensor
Tensors = list[T]


def shaped(x: T, generator: torch.Generator) -> Tensors:
    return [torch.randn(3 + i, generator=generator) for i in range(x.shape[0])]


LISTS = {"x": tensor("rows hidden"), "params": derived(shaped), "grads": derived(shaped)}


def _rows(x: T) -> int:
    return len(x)


def sgd(x: T, params: Tensors, grads: Tensors) -> None:
    for p, g in zip(params, grads, strict=True):
        p.sub_(g * 0.5)


def at_once(x: T, params: Tensors, grads: Tensors) -> None:
    """The same over one flat copy, as one launch does it."""
    if params:
        flat = torch.cat(params).add_(torch.cat(grads), alpha=-0.5)
        for p, new in zip(params, flat.split([len(p) for p in params]), strict=True):
            p.copy_(new)


def without_the_last(x: T, params: Tensors, grads: Tensors) -> None:
    sgd(x, params[:-1], grads[:-1])


def puts_others(x: T, params: Tensors, grads: Tensors) -> None:
    params[:] = [p - g * 0.5 for p, g in zip(params, grads, strict=True)]


def writes_gradients(x: T, params: Tensors, grads: Tensors) -> None:
    for p, g in zip(params, grads, strict=True):
        p.sub_(g.mul_(0.5))


def writes_past_the_end(x: T, params: Tensors, grads: Tensors) -> None:
    sgd(x, params, grads)
    ctypes.memset(params[1].data_ptr() + 4 * len(params[1]), 1, 4)


@pytest.mark.slow
def test_an_optimiser_over_lists_passes(examine: Any) -> None:
    """A list that is empty in some case asks for nothing there."""
    record = examine(at_once, sgd, LISTS, mutates="params")
    assert record.verdict == "pass", record.message


@pytest.mark.parametrize(
    ("fused", "identity", "named"),
    [
        (without_the_last, "values:params", "params[4] (in place)"),
        (puts_others, "values:params", "(in place)"),
        (writes_gradients, "inputs:grads[0]", "declare mutates='grads'"),
        (writes_past_the_end, "bounds:write:after", "past the end of params[1]"),
    ],
)
def test_what_is_wrong_with_one_tensor_is_told_of_it(
    judge_one: Any, fused: Callable[..., None], identity: str, named: str
) -> None:
    """A tensor left as it was, one only exchanged in the list, an undeclared write, a write past the end."""
    failure = judge_one(fused, sgd, LISTS, mutates="params").failure
    assert failure.identity.startswith(identity)
    assert named in failure.reason


def test_chance_may_be_allowed_of_the_list_or_of_one(judge_one: Any) -> None:
    """``deterministic=`` knows them by the input's name and by their own."""
    count = iter(range(100))

    def varies(x: T, params: Tensors, grads: Tensors) -> None:
        sgd(x, params, grads)
        params[1].mul_(1 + next(count) % 2 * 2**-23)

    def judged(**declared: Any) -> Any:
        return judge_one(varies, sgd, LISTS, mutates="params", **declared).failure

    assert judged().identity == "repeat:params[1] (in place)"
    assert judged(deterministic={"params[0]": False}).identity == "repeat:params[1] (in place)"
    assert judged(deterministic={"params": False}) is None
    assert judged(deterministic={"params[1]": False}) is None


@pytest.mark.parametrize(
    ("reference", "mutates", "said"),
    [
        (puts_others, "params", "puts other tensors into its input 'params'"),
        (sgd, "grads", "writes into its input 'params[0]'"),
        (sgd, ["params", "x", "count"], "mutates='count' names an input that holds no tensor (int)"),
    ],
)
def test_a_spec_that_says_otherwise_is_refused(
    judge_one: Any, reference: Callable[..., None], mutates: Any, said: str
) -> None:
    """A reference that exchanges tensors or writes undeclared ones, and an input that holds none."""

    def counted(x: T, params: Tensors, grads: Tensors, count: int) -> None:
        reference(x, params, grads)

    with pytest.raises(SpecError) as refused:
        judge_one(counted, counted, {**LISTS, "count": derived(_rows)}, mutates=mutates)
    assert said in str(refused.value)
