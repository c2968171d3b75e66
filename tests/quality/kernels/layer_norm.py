# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Layer norm: float32 inside, one rounding to ``x.dtype`` at the end; the statistics are returned as float32.

``x`` is ``(rows, hidden)``, ``weight`` and ``bias`` are ``(hidden,)``; the result is ``(out, mean, rstd)`` with
``mean`` and ``rstd`` of shape ``(rows,)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

Result = tuple[Tensor, Tensor, Tensor]


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Result:
    xf = x.float()
    mean = xf.mean(-1, keepdim=True)
    centred = xf - mean
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    out = centred * rstd * weight.float() + bias.float()
    return out.to(x.dtype), mean.squeeze(-1), rstd.squeeze(-1)


@triton.jit
def tile_kernel(
    x, weight, bias, out, mean_out, rstd_out, rows, hidden, row_pitch, col_pitch, weight_pitch, bias_pitch, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (c < hidden)[None, :]
    at = x + r[:, None] * row_pitch + c[None, :] * col_pitch
    if BUG == "load-without-other":
        value = tl.load(at, mask=inside).to(tl.float32)
    else:
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if BUG == "sums-all-rows":
        mean = tl.sum(tl.sum(value, axis=1), axis=0) / hidden + tl.zeros([ROWS], tl.float32)
    else:
        mean = tl.sum(value, axis=1) / hidden
    centred = value - mean[:, None]
    if BUG != "padded-variance":
        centred = tl.where(inside, centred, 0.0)
    if BUG == "naive-variance":
        variance = tl.sum(value * value, axis=1) / hidden - mean * mean
    else:
        variance = tl.sum(centred * centred, axis=1) / hidden
    rstd = tl.rsqrt(variance + eps)
    w = tl.load(weight + c * weight_pitch, mask=c < hidden, other=0.0).to(tl.float32)
    b = tl.load(bias + c * bias_pitch, mask=c < hidden, other=0.0).to(tl.float32)
    if BUG == "bias-twice-rounded":
        scaled = (centred * rstd[:, None] * w[None, :]).to(out.dtype.element_ty).to(tl.float32)
        result = scaled + b[None, :]
    else:
        result = centred * rstd[:, None] * w[None, :] + b[None, :]
    tl.store(out + r[:, None] * hidden + c[None, :], result.to(out.dtype.element_ty), mask=inside)
    tl.store(mean_out + r, mean, mask=r < rows)
    slot = r
    if BUG == "rstd-slot":
        slot = r * 0
    tl.store(rstd_out + slot, rstd, mask=r < rows)


@triton.jit
def welford_kernel(
    x, weight, bias, out, mean_out, rstd_out, hidden, row_pitch, col_pitch, weight_pitch, bias_pitch, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    count = 0.0
    mean = tl.zeros([], tl.float32)
    m2 = tl.zeros([], tl.float32)
    for start in range(0, hidden, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < hidden, other=0.0).to(tl.float32)
        n = tl.minimum(BLOCK, hidden - start).to(tl.float32)
        block_mean = tl.sum(value, axis=0) / n
        centred = tl.where(c < hidden, value - block_mean, 0.0)
        # Chan, Golub and LeVeque 1979: merging the moments of two parts.
        delta = block_mean - mean
        total = count + n
        mean = mean + delta * (n / total)
        m2 = m2 + tl.sum(centred * centred, axis=0) + delta * delta * (count * n / total)
        count = total
    rstd = tl.rsqrt(m2 / hidden + eps)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)
    for start in range(0, hidden, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < hidden, other=0.0).to(tl.float32)
        w = tl.load(weight + c * weight_pitch, mask=c < hidden, other=0.0).to(tl.float32)
        b = tl.load(bias + c * bias_pitch, mask=c < hidden, other=0.0).to(tl.float32)
        result = (value - mean) * rstd * w + b
        tl.store(out + row * hidden + c, result.to(out.dtype.element_ty), mask=c < hidden)


@triton.jit
def statistics_kernel(x, mean_out, rstd_out, hidden, row_pitch, col_pitch, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < hidden, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / hidden
    centred = tl.where(c < hidden, value - mean, 0.0)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, tl.rsqrt(tl.sum(centred * centred, axis=0) / hidden + eps))


@triton.jit
def normalise_kernel(
    x, weight, bias, out, mean_in, rstd_in, rows, hidden, row_pitch, col_pitch, weight_pitch, bias_pitch,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (c < hidden)[None, :]
    value = tl.load(x + r[:, None] * row_pitch + c[None, :] * col_pitch, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_in + r, mask=r < rows, other=0.0)
    rstd = tl.load(rstd_in + r, mask=r < rows, other=0.0)
    w = tl.load(weight + c * weight_pitch, mask=c < hidden, other=0.0).to(tl.float32)
    b = tl.load(bias + c * bias_pitch, mask=c < hidden, other=0.0).to(tl.float32)
    result = (value - mean[:, None]) * rstd[:, None] * w[None, :] + b[None, :]
    tl.store(out + r[:, None] * hidden + c[None, :], result.to(out.dtype.element_ty), mask=inside)


def _allocate(x: Tensor) -> Result:
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    return out, mean, torch.empty_like(mean)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, bug: str = "") -> Result:
    rows, hidden = x.shape
    out, mean, rstd = _allocate(x)
    if rows:
        tile_kernel[(triton.cdiv(rows, 4),)](
            x, weight, bias, out, mean, rstd, rows, hidden, *x.stride(), weight.stride(0), bias.stride(0), eps,
            ROWS=4, BLOCK=triton.next_power_of_2(hidden), BUG=bug,
        )  # fmt: skip
    return out, mean, rstd


def layer_norm_welford(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Result:
    rows, hidden = x.shape
    out, mean, rstd = _allocate(x)
    if rows:
        welford_kernel[(rows,)](
            x, weight, bias, out, mean, rstd, hidden, *x.stride(), weight.stride(0), bias.stride(0), eps, BLOCK=64
        )
    return out, mean, rstd


def layer_norm_two_kernels(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Result:
    rows, hidden = x.shape
    out, mean, rstd = _allocate(x)
    if rows:
        statistics_kernel[(rows,)](
            x, mean, rstd, hidden, *x.stride(), eps, BLOCK=triton.next_power_of_2(hidden)
        )  # fmt: skip
        normalise_kernel[(triton.cdiv(rows, 8), triton.cdiv(hidden, 128))](
            x, weight, bias, out, mean, rstd, rows, hidden, *x.stride(), weight.stride(0), bias.stride(0),
            ROWS=8, BLOCK=128,
        )  # fmt: skip
    return out, mean, rstd


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Result:
        return layer_norm(x, weight, bias, eps, bug=bug)

    return make_variant(fused, name=f"layer_norm {bug}".strip())


def make_variant(fused: Callable[..., Any], *, name: str = "") -> FusionSpec:
    """The same maths by another honest kernel; ``fused`` has the signature of ``reference``."""
    return FusionSpec(
        name=name or getattr(fused, "__name__", "variant"),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows hidden"), "weight": tensor("hidden"), "bias": tensor("hidden"), "eps": 1e-5},
        # A mean over nothing is no statistic: one column at least.
        dims={"rows": dim(0, 16), "hidden": dim(1)},
    )
