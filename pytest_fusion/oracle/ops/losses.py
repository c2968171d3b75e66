"""Negative log likelihood and dropout: operations with several results and an inner mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.ops.reduction import total
from pytest_fusion.oracle.ops.rule_registry import Op, as_float, computed, rank

MEAN, SUM = 1, 2


def _chosen(x: Tensor, target: Tensor, weight: Tensor | None, ignore: int) -> tuple[Tensor, Tensor]:
    """Per position ``(-x[target] * w, w)`` with w = 0 where the target is ignored; classes are dim 1 (0 if 1-d)."""
    dim = 1 if rank(x) == 1 else 2
    counted = target != ignore
    safe = torch.where(counted, target, 0)
    share = counted.to(x.dtype)
    if weight is not None:
        # One table of class weights for all positions: lanes of a weight computed with noise share the first.
        share = share * as_float(weight)[0][safe]
    width = max(x.shape[0], safe.shape[0])
    index = safe.unsqueeze(dim)
    index = index.expand(width, *index.shape[1:])
    picked = torch.gather(x.expand(width, *x.shape[1:]), dim, index).squeeze(dim)
    return torch.where(counted, -picked * share, 0.0), share


@computed("nll_loss_forward nll_loss2d_forward")
def _nll(
    op: Op, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> tuple[Tensor, Tensor]:
    loss, share = _chosen(as_float(x), target, weight, ignore)
    every = list(range(-rank(loss), 0))
    if reduction not in (MEAN, SUM):
        return loss, share.new_zeros((1,))
    weights = share.sum(every) if every else share
    value = total(op, loss, every, False)
    # Even one position is scaled and divided in float32.
    return (op.relative(value / weights, 2) if reduction == MEAN else value), weights


@computed("nll_loss_backward nll_loss2d_backward")
def _nll_backward(
    op: Op,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore: int,
    weights: Tensor,
) -> Tensor:
    dim = 1 if rank(x) == 1 else 2
    counted = target != ignore
    safe = torch.where(counted, target, 0).unsqueeze(dim)
    grad = as_float(grad)
    grad = grad.reshape(grad.shape[0], *(1,) * (rank(target) - rank(grad)), *grad.shape[1:])
    if reduction == MEAN:
        weights = as_float(weights)
        grad = op.relative(grad / weights.reshape(weights.shape[0], *(1,) * rank(target)), 2)
    value = torch.where(counted, -grad, 0.0)
    if weight is not None:
        value = value * as_float(weight)[0][safe.squeeze(dim)]
    value = value.unsqueeze(dim)
    out = torch.zeros((value.shape[0], *x.shape[1:]), dtype=value.dtype, device=value.device)
    shape = tuple(safe.shape[1:])
    return out.scatter(dim, safe.expand(value.shape[0], *shape), value.expand(value.shape[0], *shape))


@computed("mse_loss smooth_l1_loss huber_loss l1_loss")
def _elementwise_loss(op: Op, x: Tensor, target: Tensor, reduction: int = MEAN, *rest: Any, **kwargs: Any) -> Tensor:
    x, target = as_float(x), as_float(target)
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
    """The lanes share the native mask: what is judged is the arithmetic, not the draw."""
    mask = op.outs[1].unsqueeze(0)
    x = as_float(x)
    if not train or p == 0:
        return x, mask
    return op.relative(x * mask / (1 - p), 1) if p < 1 else x * 0, mask


@computed("native_dropout_backward")
def _dropout_backward(op: Op, grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return op.relative(as_float(grad) * mask * scale, 1)
