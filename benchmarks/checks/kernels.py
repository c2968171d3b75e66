"""Row-wise kernels with a backward of their own, as a training library has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from pytest_fusion import FusionSpec, dim, tensor, values

_EPS = 1e-6


def _shape(n: int) -> dict[str, int]:
    """Launch constants for rows of ``n``: with 4 warps, one of 65,537 takes 85 s to compile."""
    block: int = triton.next_power_of_2(n)
    return {"BLOCK": block, "num_warps": min(32, max(4, block // 1024))}


@triton.jit
def rms_norm_forward(x, w, y, rstd, stride, stride_column, n, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + row * stride + at * stride_column, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / n + eps)
    tl.store(rstd + row, scale)
    weight = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * n + at, value * scale * weight, mask=inside)


@triton.jit
def rms_norm_backward(x, w, g, rstd, dx, dw, stride, stride_column, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + row * stride + at * stride_column, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(g + row * n + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(rstd + row)
    normed = value * scale
    scaled = upstream * weight
    tl.store(dx + row * n + at, scale * (scaled - normed * (tl.sum(scaled * normed, 0) / n)), mask=inside)
    tl.store(dw + row * n + at, upstream * normed, mask=inside)


class RmsNorm(torch.autograd.Function):
    """Rows of ``x`` (rows, n) divided by their root mean square, times ``w`` (n,); the weight's gradient in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows, n = x.shape
        w = w.contiguous()
        y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        if x.numel():
            with torch.cuda.device_of(x):
                rms_norm_forward[(rows,)](x, w, y, rstd, *x.stride(), n, _EPS, **_shape(n))
        ctx.save_for_backward(x, w, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, w, rstd = ctx.saved_tensors
        rows, n = x.shape
        g = gradients[0].contiguous()
        dx = torch.empty((rows, n), dtype=x.dtype, device=x.device)
        dw = torch.empty((rows, n), dtype=torch.float32, device=x.device)
        if x.numel():
            with torch.cuda.device_of(x):
                rms_norm_backward[(rows,)](x, w, g, rstd, dx, dw, *x.stride(), n, **_shape(n))
        return dx, dw.sum(0).to(w.dtype)


@triton.jit
def softmax_forward(x, y, stride, stride_column, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + row * stride + at * stride_column, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * n + at, value / tl.sum(value, 0), mask=inside)


@triton.jit
def softmax_backward(y, g, dx, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(y + row * n + at, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(g + row * n + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + row * n + at, value * (upstream - tl.sum(value * upstream, 0)), mask=inside)


class Softmax(torch.autograd.Function):
    """Softmax along the rows of ``x`` (rows, n)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        rows, n = x.shape
        y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
        if x.numel():
            with torch.cuda.device_of(x):
                softmax_forward[(rows,)](x, y, *x.stride(), n, **_shape(n))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        rows, n = y.shape
        g = gradients[0].contiguous()
        dx = torch.empty_like(y)
        if y.numel():
            with torch.cuda.device_of(y):
                softmax_backward[(rows,)](y, g, dx, n, **_shape(n))
        return dx


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Fused, forward and backward."""
    result: torch.Tensor = RmsNorm.apply(x, w)
    return result


def rms_norm_reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """In float32, rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS) * w.float()).to(x.dtype)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Fused, forward and backward."""
    result: torch.Tensor = Softmax.apply(x)
    return result


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """As torch has it."""
    return torch.softmax(x, -1)


def specs() -> Mapping[str, FusionSpec]:
    """Each with gradients and batch invariance, which every default check then has work with."""
    bounds = {"n": dim(min=1)}
    return {
        "rms_norm": FusionSpec(
            fused=rms_norm,
            reference=rms_norm_reference,
            inputs={"x": tensor("rows n"), "w": tensor("n")},
            dims=bounds,
            grad=True,
            invariant="rows",
        ),
        "softmax": FusionSpec(
            fused=softmax,
            reference=softmax_reference,
            # The maximum of a row drops its NaN.
            inputs={"x": tensor("rows n", values=values.finite())},
            dims=bounds,
            grad=True,
            invariant="rows",
        ),
    }
