# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""RMS norm with its backward: float32 inside, one rounding to the dtype of each result at the end.

``x`` is ``(rows, hidden)``, ``weight`` ``(hidden,)``, of one floating dtype; so is the result. Backward keeps the
input and ``1 / rms`` of each row; a few programs stride over the rows and keep a float32 sum for ``weight`` each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

PROGRAMS = 4


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    xf = x.float()
    return (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


@triton.jit
def forward_kernel(
    x, weight, out, scales, hidden, row_pitch, col_pitch, weight_pitch, eps, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < hidden, other=0.0).to(tl.float32)
    w = tl.load(weight + c * weight_pitch, mask=c < hidden, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps)
    tl.store(scales + row, scale)
    tl.store(out + row * hidden + c, (value * scale * w).to(out.dtype.element_ty), mask=c < hidden)


@triton.jit
def backward_kernel(
    dy, x, weight, scales, dx, partial, rows, hidden, dy_row, dy_col, x_row, x_col, weight_pitch, dx_row, dx_col,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < hidden
    w = tl.load(weight + c * weight_pitch, mask=inside, other=0.0).to(tl.float32)
    if BUG == "sum-in-input-dtype":
        total = tl.zeros([BLOCK], x.dtype.element_ty)
    else:
        total = tl.zeros([BLOCK], tl.float32)
    end = rows
    if BUG == "whole-strides-only":
        end = rows // PROGRAMS * PROGRAMS
    for row in range(program, end, PROGRAMS):
        at = tl.cast(row, tl.int64)
        g = tl.load(dy + at * dy_row + c * dy_col, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at * x_row + c * x_col, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + at)
        normed = value * scale
        weighted = g * w
        if BUG == "mean-over-block":
            shared = tl.sum(weighted * normed, axis=0) / BLOCK
        else:
            shared = tl.sum(weighted * normed, axis=0) / hidden
        result = scale * (weighted - normed * shared)
        if BUG == "no-shared-term":
            result = scale * weighted
        tl.store(dx + at * dx_row + c * dx_col, result.to(dx.dtype.element_ty), mask=inside)
        if BUG == "overwrites-scale":
            tl.store(scales + at, scale * 0.5)
        total += (g * normed).to(total.dtype)
    tl.store(partial + program * hidden + c, total.to(tl.float32), mask=inside)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, bug: str) -> Tensor:
        rows, hidden = x.shape
        out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        if out.numel():
            forward_kernel[(rows,)](
                x, weight, out, scales, hidden, *x.stride(), weight.stride(0), eps,
                BLOCK=triton.next_power_of_2(hidden),
            )  # fmt: skip
        ctx.save_for_backward(x, weight, scales)
        ctx.bug = bug
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, scales), bug = ctx.saved_tensors, ctx.bug
        rows, hidden = x.shape
        dx = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
        if bug == "writes-upstream":
            dx = dy
        pitches = dy.stride()
        if bug == "upstream-contiguous":
            pitches = (hidden, 1)
        if bug == "upstream-like-input":
            pitches = x.stride()
        written = dx.stride()
        if bug == "upstream-pitch":
            # As in unsloth #10617: one row pitch for the gradient that comes and for the fresh one that goes.
            written = (dy.stride(0), 1)
        partial = torch.zeros((PROGRAMS, hidden), dtype=torch.float32, device=x.device)
        if x.numel():
            backward_kernel[(PROGRAMS,)](
                dy, x, weight, scales, dx, partial, rows, hidden, *pitches, *x.stride(), weight.stride(0), *written,
                PROGRAMS=PROGRAMS, BLOCK=triton.next_power_of_2(hidden), BUG=bug,
            )  # fmt: skip
        if bug == "frozen-weight":
            # Made only where it is wanted and returned in any case, as in Liger-Kernel #930.
            if ctx.needs_input_grad[1]:
                dw = partial.sum(0).to(weight.dtype)
            return dx, dw, None, None
        dw = partial.sum(0).to(weight.dtype)
        if bug == "no-weight-gradient":
            return dx, None, None, None
        return (dx, dw, None) if bug == "one-short" else (dx, dw, None, None)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, bug: str = "") -> Tensor:
    if bug == "bypassed":
        with torch.no_grad():
            return RMSNorm.apply(x, weight, eps, bug)
    if bug == "detached-weight":
        weight = weight.detach()
    return RMSNorm.apply(x, weight, eps, bug)


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, bug=bug)

    return FusionSpec(
        name=f"rms_norm_grad {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows hidden"), "weight": tensor("hidden"), "eps": 1e-6},
        dims={"rows": dim(0, 24)},
        grad=True,
    )
