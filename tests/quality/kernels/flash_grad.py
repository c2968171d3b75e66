# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Attention and its backward as flash kernels have it: 16-bit weights for each product, ``delta`` of the stored result.

``q`` is ``(batch, m, d)``, ``k`` and ``v`` are ``(batch, n, d)``; the result is like ``q``. What is rounded is rounded
where FlashAttention-2 does so (arXiv 2307.08691): the weights before they are divided by their sum, and the gradient by
scores before it meets keys and queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pytest_fusion import FusionSpec, dim, tensor


def upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in the eager attention of transformers."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.float().softmax(-1).to(q.dtype) @ v


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        out = ((weights.to(q.dtype).float() @ v.float()) / total).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, top + total.log())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        delta = (out.float() * dout.float()).sum(-1, keepdim=True)
        weights = ((q.float() @ k.float().mT) * scale - lse).exp()
        dv = weights.to(q.dtype).float().mT @ dout.float()
        slope = (weights * (dout.float() @ v.float().mT - delta) * scale).to(q.dtype).float()
        return (slope @ k.float()).to(q.dtype), (slope.mT @ q.float()).to(q.dtype), dv.to(q.dtype)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Flash.apply(q, k, v)  # type: ignore[no-any-return]


def make_spec(written: str) -> FusionSpec:
    """Beside the reference ``"upcast"`` or ``"eager"``."""
    return FusionSpec(
        fused=fused,
        reference={"upcast": upcast, "eager": eager}[written],
        inputs={"q": tensor("batch m d"), "k": tensor("batch n d"), "v": tensor("batch n d")},
        dims={"batch": dim(1), "m": dim(1), "n": dim(2), "d": dim(1, 128)},
        grad=True,
        name=f"flash attention with backward, {written} reference",
    )
