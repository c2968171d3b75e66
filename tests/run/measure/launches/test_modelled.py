"""What a call would launch on a GPU: a lower bound from torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pytest_fusion.run.measure.launches import Counts, modelled

T = torch.Tensor
X = torch.randn(8, 6)
WIDE = torch.randn(8, 12)


def counts(call: Callable[[T], Any], x: T = X) -> Counts:
    return modelled(lambda: call(x), {"x": x}).counts


def names(call: Callable[[T], Any], x: T = X) -> list[str]:
    """The kernels of one call, sorted, and a word for each copy by an engine."""
    found = counts(call, x)
    return [name for name, count in found.names for _ in range(count)] + ["copied"] * found.memcpy


FREE: dict[str, Callable[[T], Any]] = {
    "a view": lambda x: x.t()[1:].unsqueeze(0).expand(3, -1, -1).view(torch.int32),
    "fresh memory": lambda x: (torch.empty_like(x), x.new_empty(3), torch.empty(2, device=x.device)),
    "metadata": lambda x: (x.shape, x.stride(), x.is_contiguous()),
    "no elements": lambda x: (x[:0] * 2, torch.zeros(0, device=x.device), x[:, :0].sum(1)),
    "the argument itself": lambda x: F.dropout(x.contiguous().to(x.dtype).reshape(8, 6), training=False),
    "a host tensor": lambda x: torch.cumsum(torch.tensor([1, 2, 3]), 0).add(1).tolist(),
    "a host range, brought to the device": lambda x: (torch.arange(8) * 2).to(x.device),
    "host arithmetic with literals": lambda x: torch.zeros(3, device="cpu").add_(1).tolist(),
    "numbers on the host": lambda x: (torch.tensor(2.0) * 3 + 1).item(),
    "an array of numpy, brought to the device": lambda x: torch.from_numpy(np.ones(8)).cumsum(0).to(x.device),
}


@pytest.mark.parametrize("name", FREE)
def test_nothing_is_launched(name: str) -> None:
    """None of this is work on a device."""
    found = counts(FREE[name])
    assert found.kernels == 0, found.names


COPIED: dict[str, tuple[Callable[[T], Any], T]] = {
    "a clone of dense memory": (lambda x: x.clone(), X),
    "a clone in the same order": (lambda x: x.clone(), X.t()),
    "one row of a wider buffer": (lambda x: x[:1, :6].contiguous().clone(), WIDE),
    "one element": (lambda x: x[::8, ::6].clone(), X),
    "into a part": (lambda x: torch.empty(16, 6, device=x.device)[8:].copy_(x), X),
    "one tensor concatenated": (lambda x: torch.cat([x]), X),
    "whole numbers rounded": (lambda x: x.round(), torch.arange(6)),
    "to the host": (lambda x: x.cpu(), X),
    "a number to the host": (lambda x: x[0, 0].item(), X),
}


@pytest.mark.parametrize("name", COPIED)
def test_bytes_are_copied_without_a_kernel(name: str) -> None:
    """Equal dtypes and one order of elements are the copy engine's."""
    call, x = COPIED[name]
    assert names(call, x) == ["copied"]


KERNELS: dict[str, tuple[Callable[[T], Any], T, list[str]]] = {
    "arithmetic": (lambda x: x * 2 + 1, X, ["aten::add", "aten::mul"]),
    "in place": (lambda x: x.clone().mul_(1), X, ["aten::mul_", "copied"]),
    "a cast": (lambda x: x.half(), X, ["aten::_to_copy"]),
    "a cast of one element": (lambda x: x[:1, :1].half(), X, ["aten::_to_copy"]),
    "a strided copy": (lambda x: x[:, :6].contiguous(), WIDE, ["aten::clone"]),
    "a transposed copy": (lambda x: x.t().contiguous(), X, ["aten::clone"]),
    "a reshape that copies": (lambda x: x.t().reshape(-1), X, ["aten::clone"]),
    "an expanded copy": (lambda x: x[:1].expand(4, 6).clone(), X, ["aten::clone"]),
    "zeros": (lambda x: torch.zeros(3, device=x.device), X, ["aten::zeros"]),
    "zeros like": (torch.zeros_like, X, ["aten::zeros_like"]),
    "a fill": (lambda x: x.clone().fill_(1), X, ["aten::fill_", "copied"]),
    "a range that indexes": (lambda x: x[torch.arange(3, device=x.device) + x.new_ones(3, dtype=torch.int64)], X,
                             ["aten::add", "aten::arange", "aten::index", "aten::new_ones"]),
    "two tensors concatenated": (lambda x: torch.cat([x, x]), X, ["aten::cat"]),
    "two tensors stacked": (lambda x: torch.stack([x, x]), X, ["aten::stack"]),
    "a product of matrices": (lambda x: x @ x.t(), X, ["aten::mm"]),
    "an index from the host": (lambda x: x[torch.tensor([0, 2])], X, ["aten::index"]),
    "host numbers in a product": (lambda x: x * torch.tensor(3.0).add(1), X, ["aten::mul"]),
    "a maximum, looked at": (lambda x: x.max().item(), X, ["aten::max", "copied"]),
    "what goes to the host and on": (lambda x: x.sum(-1).cpu().mul(2).tolist(), X, ["aten::sum", "copied"]),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_counted(name: str) -> None:
    """What computes, converts, fills or gathers on the device is a kernel each."""
    call, x, expected = KERNELS[name]
    assert names(call, x) == expected


ONE_KERNEL: dict[str, Callable[[T], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rms_norm": lambda x: F.rms_norm(x, (6,)),
    "softmax": lambda x: torch.softmax(x, -1, dtype=torch.float64),
    "log_softmax": lambda x: x.log_softmax(-1, dtype=torch.float64),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel_there_and_a_formula_here_is_one(name: str) -> None:
    """What CUDA has a kernel for counts once, however many operators the CPU takes."""
    assert names(ONE_KERNEL[name]) == [f"torch.{name}"]


def test_backward_is_not_in_forward() -> None:
    """Recording a graph launches nothing; a backward alone is a call like any other."""
    x = X.clone().requires_grad_()
    assert names(lambda x: x.sin().mul(2), x) == ["aten::mul", "aten::sin"]
    out = x.sin().sum()
    found = modelled(out.backward, x).counts
    assert dict(found.names) == {"aten::ones_like": 1, "aten::cos": 1, "aten::mul": 1}


@torch.library.custom_op("fusion_counting::doubled", mutates_args=())
def doubled(x: T) -> T:
    return x.mul(2).add(0)


@torch.library.custom_op("fusion_counting::hidden", mutates_args=())
def hidden(x: T) -> T:
    return torch.from_numpy(x.numpy() * 2)


def test_an_operator_of_the_users_is_what_it_runs() -> None:
    """It is not counted itself, and what runs inside is, with its line."""
    found = modelled(lambda: doubled(X), X)
    assert dict(found.counts.names) == {"aten::mul": 1, "aten::add": 1}
    assert found.counts.doubts == ()
    assert all(work.where.startswith("test_modelled.py:") for work in found.work)


def test_what_nobody_sees_is_a_doubt() -> None:
    """An operator, or a call, whose result comes from nowhere is no evidence of zero kernels."""
    assert counts(hidden).doubts == (
        "operator fusion_counting::hidden ran code that launches nothing here",
    )  # fmt: skip
    (doubt,) = counts(
        lambda x: np.multiply(x.numpy(), 2, out=(out := torch.empty_like(x)).numpy()) is None or out
    ).doubts
    assert doubt.startswith("no launch and no operator of torch was seen")


def test_two_calls_do_not_mix() -> None:
    """Memory that was freed and given out again is not taken for what lay there before."""

    def call(x: T) -> T:
        for _ in range(50):
            torch.arange(6).mul(2).tolist()
            x = x + 1
        return x

    assert names(call) == ["aten::add"] * 50
