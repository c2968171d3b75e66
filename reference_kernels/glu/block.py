"""Fused feed-forward block: two projections and the gated unit in one launch, the down-projection in another; and its
gradients."""

from __future__ import annotations

from typing import Any, get_args

import torch

from reference_kernels._common import check_tensor
from reference_kernels._elementwise import launch
from reference_kernels.glu.kernel import Activation, _glu_backward_kernel
from reference_kernels.linear.backward import as_matrix, input_gradient, weight_gradient
from reference_kernels.linear.gated import check_gated, gated
from reference_kernels.linear.kernel import _linear
from reference_kernels.linear.products import check_operands


def _outputs(
    x: torch.Tensor, gate_weight: torch.Tensor, down_weight: torch.Tensor, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, and both halves or, unless they are kept, two tensors of nothing."""
    half = (*x.shape[:-1], gate_weight.shape[0]) if keep else (0,)
    y = x.new_empty((*x.shape[:-1], down_weight.shape[0]))
    return y, x.new_empty(half), x.new_empty(half)


@torch.library.custom_op("reference_kernels::feed_forward", mutates_args=())
def _feed_forward(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    activation: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, *halves = _outputs(x, gate_weight, down_weight, keep)
    hidden = x.new_empty((*x.shape[:-1], gate_weight.shape[0]))
    gate, up = halves
    gated(hidden, (gate, up), x, gate_weight, up_weight, activation, rounded=True, keep=keep)
    return _linear(hidden, down_weight, None, None), gate, up


@_feed_forward.register_fake
def _(
    x: torch.Tensor, gate_weight: torch.Tensor, _: torch.Tensor, down_weight: torch.Tensor, __: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _outputs(x, gate_weight, down_weight, keep)


@torch.library.custom_op("reference_kernels::feed_forward_backward", mutates_args=())
def _feed_forward_backward(
    dhidden: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients by both halves from that by the unit's result, and this result again; ``(rows, n)`` each."""
    dgate, dup, hidden = (torch.empty_like(gate) for _ in range(3))
    if gate.numel():
        inputs, constants = (dhidden, gate, up), {"ACTIVATION": activation, "AGAIN": True}
        launch(_glu_backward_kernel, (dgate, dup, hidden), inputs, gate.shape[-1], **constants)
    return dgate, dup, hidden


@_feed_forward_backward.register_fake
def _(_: torch.Tensor, gate: torch.Tensor, *__: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dgate, dup, hidden = (torch.empty_like(gate) for _ in range(3))
    return dgate, dup, hidden


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.activation, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else torch fills zeros for both halves
    ctx.save_for_backward(*tensors, *output[1:])


def _differentiate(ctx: Any, dy: torch.Tensor | None, *_: object) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 6
    x, gate_weight, up_weight, down_weight, gate, up = ctx.saved_tensors
    of_x, of_gate, of_up, of_down, *_ = ctx.needs_input_grad
    upstream, rows = as_matrix(dy), as_matrix(x)
    dhidden = _linear(upstream, down_weight.t(), None, None)
    dgate, dup, hidden = _feed_forward_backward(dhidden, as_matrix(gate), as_matrix(up), ctx.activation)
    return (
        input_gradient(x, [dgate, dup], [gate_weight, up_weight]) if of_x else None,
        weight_gradient(dgate, rows) if of_gate else None,
        weight_gradient(dup, rows) if of_up else None,
        weight_gradient(upstream, hidden) if of_down else None,
        None,
        None,
    )


_feed_forward.register_autograd(_differentiate, setup_context=_save)


def feed_forward(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    activation: Activation = "silu",
) -> torch.Tensor:
    """``(activation(x @ gate_weight.T) * (x @ up_weight.T)) @ down_weight.T``: ``(*batch, k)`` by two ``(n, k)`` and
    ``(o, n)`` to contiguous ``(*batch, o)``.

    All operands share one dtype (float32, float16 or bfloat16) and may have any strides. Sums in float32 without TF32;
    what the layers and the unit give is rounded, and nothing else: see `feed_forward_reference`. Differentiable once by
    all four, for which both halves are kept. Raises `TypeError` for other or mixed dtypes; `ValueError` for shapes that
    do not fit, an unknown activation, or mixed devices.
    """
    if activation not in get_args(Activation):
        raise ValueError(f"feed_forward: activation is {activation!r}, known: {', '.join(get_args(Activation))}")
    check_operands("feed_forward", x, {"gate_weight": gate_weight, "up_weight": up_weight})
    check_gated("feed_forward", gate_weight, up_weight)
    check_tensor("feed_forward", "down_weight", down_weight, x, (x.dtype,))
    if down_weight.ndim != 2 or down_weight.shape[1] != gate_weight.shape[0]:
        raise ValueError(
            f"feed_forward: down_weight {tuple(down_weight.shape)} and gate_weight {tuple(gate_weight.shape)} do not "
            "fit; they are (o, n) and (n, k), as in torch.nn.Linear"
        )
    operands = x, gate_weight, up_weight, down_weight
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands)
    y: torch.Tensor
    y, _, _ = _feed_forward(*operands, activation, keep)
    return y
