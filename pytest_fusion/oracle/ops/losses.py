"""Negative log likelihood and dropout: operations with several results and an inner mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.ops.reduction import total
from pytest_fusion.oracle.ops.rule_registry import Op, as_float, computed, each, pointwise, rank

NONE, MEAN, SUM = 0, 1, 2


def _shared(weight: Tensor | None) -> Tensor | None:
    """Class weights, the same for all positions: noisy lanes share the first."""
    return None if weight is None else as_float(weight)[:1]


@computed("nll_loss_forward nll_loss2d_forward")
def _nll(
    op: Op, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> tuple[Tensor, Tensor]:
    def of(scores: Tensor) -> Tensor:
        return each(op.function, scores, target, _shared(weight), NONE, ignore)[0]  # type: ignore[no-any-return]

    x = as_float(x)
    loss, share = of(x), of(-torch.ones_like(x[:1]))
    every = list(range(-rank(loss), 0))
    if reduction == NONE:
        return loss, share.new_zeros((1,))
    weights = share.sum(every) if every else share
    value = total(op, loss, every, False)
    # Even a single position is scaled and divided in float32.
    return (op.relative(value / weights, 2) if reduction == MEAN else value), weights


@computed("nll_loss_backward nll_loss2d_backward")
def _nll_backward(
    op: Op, grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int, weights: Tensor
) -> Tensor:
    grad, weights = as_float(grad), as_float(weights)
    if reduction == MEAN:
        grad = op.relative(grad / weights, 2)
    if reduction != NONE:
        grad = grad.reshape(-1, *(1,) * rank(target)).expand(-1, *target.shape[1:])
    arguments = as_float(x), target, _shared(weight), NONE, ignore, weights
    return each(op.function, grad, *arguments)  # type: ignore[no-any-return]


@pointwise("mse_loss smooth_l1_loss huber_loss")
def _elementwise_loss(op: Op, x: Tensor, target: Tensor, reduction: int = MEAN, *rest: Any, **kwargs: Any) -> Tensor:
    function = getattr(torch.nn.functional, op.name)
    extra = ({"smooth_l1_loss": "beta", "huber_loss": "delta"}[op.name],) if rest else ()
    extras = dict(zip(extra, rest, strict=True)) | kwargs
    shape = (x + target).shape
    value = op.relative(function(x.expand(shape), target.expand(shape), reduction="none", **extras), 3)
    every = list(range(-rank(value), 0))
    if reduction not in (MEAN, SUM) or not every:
        return value
    summed = total(op, value, every, False)
    return op.relative(summed / max(value[0].numel(), 1), 1) if reduction == MEAN else summed


@computed("native_dropout")
def _dropout(op: Op, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Dropout with the native mask in all lanes: the arithmetic is judged, not the draw."""
    mask = op.outs[1].unsqueeze(0)
    x = as_float(x)
    if not train or p == 0:
        return x, mask
    return op.relative(x * mask / (1 - p), 1) if p < 1 else x * 0, mask


computed("native_dropout_backward")(lambda op, grad, mask, scale: op.relative(as_float(grad) * mask * scale, 1))
