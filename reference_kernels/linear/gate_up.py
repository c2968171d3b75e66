"""Fused SwiGLU up-projection: both halves of a feed-forward layer from one reading of its input, multiplied before the
one store; and its gradients, for which no result is saved."""

from __future__ import annotations

from typing import Any

import torch

from reference_kernels.linear.backward import as_matrix, input_gradient, weight_gradient
from reference_kernels.linear.gated import check_gated, gated
from reference_kernels.linear.products import check_operands


@torch.library.custom_op("reference_kernels::gate_up_linear", mutates_args=())
def _gate_up_linear(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor) -> torch.Tensor:
    y = x.new_empty((*x.shape[:-1], gate_weight.shape[0]))
    gated(y, (y, y), x, gate_weight, up_weight, "silu")
    return y


@_gate_up_linear.register_fake
def _(x: torch.Tensor, gate_weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], gate_weight.shape[0]))


@torch.library.custom_op("reference_kernels::gate_up_linear_backward", mutates_args=())
def _gate_up_linear_backward(
    dy: torch.Tensor, x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients by both products, contiguous, of the dtype of ``x``."""
    dgate, dup = (dy.new_empty(dy.shape) for _ in range(2))
    gated(dy.contiguous(), (dgate, dup), x, gate_weight, up_weight, "silu", backward=True)
    return dgate, dup


@_gate_up_linear_backward.register_fake
def _(dy: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dup = (dy.new_empty(dy.shape) for _ in range(2))
    return dgate, dup


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- passed by name
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, gate_weight, up_weight = ctx.saved_tensors
    of_x, of_gate, of_up = ctx.needs_input_grad
    dgate, dup = (as_matrix(d) for d in _gate_up_linear_backward(dy, x, gate_weight, up_weight))
    rows = as_matrix(x)
    return (
        input_gradient(x, [dgate, dup], [gate_weight, up_weight]) if of_x else None,
        weight_gradient(dgate, rows) if of_gate else None,
        weight_gradient(dup, rows) if of_up else None,
    )


_gate_up_linear.register_autograd(_differentiate, setup_context=_save)


def gate_up_linear(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor) -> torch.Tensor:
    """``silu(x @ gate_weight.T) * (x @ up_weight.T)``: ``(*batch, k)`` by two ``(n, k)`` to contiguous ``(*batch, n)``.

    All operands share one dtype (float32, float16 or bfloat16) and may have any strides. Sums in float32 without TF32
    and rounds once, the halves not at all: see `gate_up_linear_reference`. Differentiable once by all three: the halves
    are computed again, and only their gradients rounded on the way to those of the operands. Raises `TypeError` for
    other or mixed dtypes; `ValueError` for shapes that do not fit, or mixed devices.
    """
    check_operands("gate_up_linear", x, {"gate_weight": gate_weight, "up_weight": up_weight})
    check_gated("gate_up_linear", gate_weight, up_weight)
    y: torch.Tensor = _gate_up_linear(x, gate_weight, up_weight)
    return y
