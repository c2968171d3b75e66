# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""A residual sum and its norm, with backward: the sum is stored in 16 bits, the statistics are those before.

``x`` and ``residual`` are ``(rows, hidden)``, ``weight`` is ``(hidden,)``; the results are the norm and the sum, like
``x``. Backward reads the stored sum beside the statistics, as flash-attention's layer norm and its descendants do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pytest_fusion import FusionSpec, dim, optional, tensor


def reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, centred: bool) -> Any:
    total = x if residual is None else x + residual
    wide = total.float()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype), total.clone()


class ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, centred):
        wide = x.float() if residual is None else x.float() + residual.float()
        mean = wide.mean(-1, keepdim=True) if centred else torch.zeros_like(wide[:, :1])
        scale = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
        total = wide.to(x.dtype, copy=True)
        ctx.save_for_backward(total, weight, mean, scale)
        ctx.centred, ctx.added = centred, residual is not None
        return ((wide - mean) * scale * weight.float()).to(x.dtype), total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal):
        total, weight, mean, scale = ctx.saved_tensors
        normed = (total.float() - mean) * scale
        weighted = dy.float() * weight.float()
        inner = normed * (weighted * normed).mean(-1, keepdim=True)
        if ctx.centred:
            inner = inner + weighted.mean(-1, keepdim=True)
        dx = ((weighted - inner) * scale + dtotal.float()).to(dy.dtype)
        dw = (dy.float() * normed).sum(0).to(weight.dtype)
        return dx, dx.clone() if ctx.added else None, dw, None, None


def fused(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, centred: bool) -> Any:
    return ResidualNorm.apply(x, residual, weight, eps, centred)


def make_spec(centred: bool) -> FusionSpec:
    """A LayerNorm without bias where ``centred``, else an RMSNorm."""
    return FusionSpec(
        fused=fused,
        reference=reference,
        inputs={
            "x": tensor("rows hidden"),
            "residual": optional(tensor("rows hidden")),
            "weight": tensor("hidden"),
            "eps": 1e-5,
            "centred": centred,
        },
        # A row of two nearly equal numbers has no variance but that of their rounding, which a mean of other numbers
        # turns into 4 % of the gradient.
        dims={"rows": dim(1), "hidden": dim(8 if centred else 1)},
        grad=True,
        name=f"residual {'layer' if centred else 'rms'} norm with backward",
    )
