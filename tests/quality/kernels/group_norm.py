# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Group norm with its backward: float32 inside, one rounding to the dtype of each result at the end.

``x`` is ``(batch, 2 * per, height, width)``, two groups of ``per`` channels; ``weight`` and ``bias`` are
``(2 * per,)``. Each program has one group of one sample, flat. Backward adds up the float32 sums of the samples.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

GROUPS = 2


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    xf = x.float().reshape(x.shape[0], GROUPS, math.prod(x.shape[1:]) // GROUPS)
    centred = xf - xf.mean(-1, keepdim=True)
    normed = (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)).reshape(x.shape)
    return (normed * weight.float()[:, None, None] + bias.float()[:, None, None]).to(x.dtype)


@triton.jit
def forward_kernel(
    x, weight, bias, out, means, scales, per, spatial, weight_pitch, bias_pitch, eps,
    BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    sample = (tl.program_id(0) // 2).to(tl.int64)
    group = tl.program_id(0) % 2
    size = per * spatial
    i = tl.arange(0, BLOCK)
    inside = i < size
    value = tl.load(x + (sample * 2 + group) * size + i, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / size
    centred = value - mean
    if BUG != "padded-variance":
        centred = tl.where(inside, centred, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / size + eps)
    channel = group * per + i // spatial
    if BUG == "channel-of-first-group":
        channel = i // spatial
    w = tl.load(weight + channel * weight_pitch, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + channel * bias_pitch, mask=inside, other=0.0).to(tl.float32)
    result = centred * scale * w + b
    tl.store(out + (sample * 2 + group) * size + i, result.to(out.dtype.element_ty), mask=inside)
    tl.store(means + sample * 2 + group, mean)
    tl.store(scales + sample * 2 + group, scale)


@triton.jit
def backward_kernel(
    dy, x, weight, means, scales, dx, dw, db, per, spatial, weight_pitch, BLOCK: tl.constexpr, BUG: tl.constexpr
):  # fmt: skip
    sample = (tl.program_id(0) // 2).to(tl.int64)
    group = tl.program_id(0) % 2
    size = per * spatial
    i = tl.arange(0, BLOCK)
    inside = i < size
    start = (sample * 2 + group) * size
    g = tl.load(dy + start + i, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + start + i, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(means + sample * 2 + group)
    scale = tl.load(scales + sample * 2 + group)
    normed = tl.where(inside, (value - mean) * scale, 0.0)
    channel = group * per + i // spatial
    w = tl.load(weight + channel * weight_pitch, mask=inside, other=0.0).to(tl.float32)
    first = tl.sum(g * w, axis=0) / size
    second = tl.sum(g * w * normed, axis=0) / size
    if BUG == "mean-over-channels":
        first = tl.sum(g * w, axis=0) / spatial
    result = scale * (g * w - first - normed * second)
    tl.store(dx + start + i, result.to(dx.dtype.element_ty), mask=inside)
    for p in range(per):
        mine = inside & (i // spatial == p)
        at = sample * 2 * per + group * per + p
        tl.store(dw + at, tl.sum(tl.where(mine, g * normed, 0.0), axis=0))
        tl.store(db + at, tl.sum(tl.where(mine, g, 0.0), axis=0))


class GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, bug: str) -> Tensor:
        batch, channels = x.shape[:2]
        x = x.contiguous()
        spatial = x.shape[2] * x.shape[3]
        per = channels // GROUPS
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        means, scales = (torch.empty((batch, GROUPS), dtype=torch.float32, device=x.device) for _ in range(2))
        if out.numel():
            # Liger-Kernel #1375: a size is taken before the image is flattened.
            seen = x.shape[3] if bug == "size-before-flattening" else spatial
            forward_kernel[(batch * GROUPS,)](
                x, weight, bias, out, means, scales, per, seen, weight.stride(0), bias.stride(0), eps,
                BLOCK=triton.next_power_of_2(per * spatial), BUG=bug,
            )  # fmt: skip
        ctx.save_for_backward(x, weight, means, scales)
        ctx.dtype, ctx.bug = bias.dtype, bug
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, means, scales), bug = ctx.saved_tensors, ctx.bug
        batch, channels, height, width = x.shape
        if bug != "upstream-contiguous":
            dy = dy.contiguous()
        # Small buffers for the whole image, as in Liger-Kernel #1375.
        shape = (batch, channels, width) if bug == "small-buffer" else x.shape
        dx = torch.empty(shape, dtype=x.dtype, device=x.device)
        dw, db = (torch.zeros((batch, channels), dtype=torch.float32, device=x.device) for _ in range(2))
        if x.numel():
            backward_kernel[(batch * GROUPS,)](
                dy, x, weight, means, scales, dx, dw, db, channels // GROUPS, height * width, weight.stride(0),
                BLOCK=triton.next_power_of_2(channels // GROUPS * height * width), BUG=bug,
            )  # fmt: skip
        if bug == "sums-rounded":
            return dx.reshape(x.shape), dw.to(weight.dtype).sum(0), db.to(ctx.dtype).sum(0), None, None
        return dx.reshape(x.shape), dw.sum(0).to(weight.dtype), db.sum(0).to(ctx.dtype), None, None


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return GroupNorm.apply(x, weight, bias, eps, bug)

    return FusionSpec(
        name=f"group_norm {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "x": tensor("batch 2*per height width"),
            "weight": tensor("2*per"),
            "bias": tensor("2*per"),
            "eps": 1e-5,
        },
        dims={"batch": dim(0, 4), "per": dim(1, 4), "height": dim(0, 8), "width": dim(0, 16)},
        grad=True,
    )
