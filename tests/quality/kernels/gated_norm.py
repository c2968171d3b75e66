# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""RMS norm with a weight and an optional SiLU gate, with its backward: float32 inside, one rounding at the end.

``x`` is ``(rows, hidden)``, ``weight`` ``(hidden,)``, ``gate`` like ``x`` or None; the result is
``x / rms(x) * weight * silu(gate)``. The normed rows are computed again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pytest_fusion import FusionSpec, dim, optional, tensor


def reference(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    xf = x.float()
    normed = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (normed if gate is None else normed * functional.silu(gate.float())).to(x.dtype)


@triton.jit
def forward_kernel(
    x, weight, gate, out, hidden, x_row, x_col, weight_pitch, gate_row, gate_col, eps,
    GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < hidden
    value = tl.load(x + row * x_row + c * x_col, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + c * weight_pitch, mask=inside, other=0.0).to(tl.float32)
    result = value * tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps) * w
    if GATED:
        z = tl.load(gate + row * gate_row + c * gate_col, mask=inside, other=0.0).to(tl.float32)
        result *= z * tl.sigmoid(z)
    tl.store(out + row * hidden + c, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dy, x, weight, gate, dx, dw, dgate, hidden, dy_row, dy_col, x_row, x_col, weight_pitch, gate_row, gate_col, eps,
    GATED: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < hidden
    g = tl.load(dy + row * dy_row + c * dy_col, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_row + c * x_col, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + c * weight_pitch, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps)
    normed = value * scale
    upstream = g
    if GATED:
        if BUG == "gate-of-first-row":
            gate_row = 0
        z = tl.load(gate + row * gate_row + c * gate_col, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(z)
        upstream = g * z * s
        slope = s + z * s * (1.0 - s)
        if BUG == "sigmoid-slope":
            slope = s * (1.0 - s)
        tl.store(dgate + row * hidden + c, (g * normed * w * slope).to(dgate.dtype.element_ty), mask=inside)
    weighted = upstream * w
    if BUG == "no-else":
        # The weight enters on the branch with a gate alone, as in flash-linear-attention f636f5a1.
        if not GATED:
            weighted = upstream
    shared = tl.sum(weighted * normed, axis=0) / hidden
    tl.store(dx + row * hidden + c, (scale * (weighted - normed * shared)).to(dx.dtype.element_ty), mask=inside)
    if BUG == "weight-before-gate":
        tl.store(dw + row * hidden + c, g * normed, mask=inside)
    else:
        tl.store(dw + row * hidden + c, upstream * normed, mask=inside)


class GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, bug: str) -> Tensor:
        rows, hidden = x.shape
        out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
        if out.numel():
            forward_kernel[(rows,)](
                x, weight, gate, out, hidden, *x.stride(), weight.stride(0),
                *((0, 0) if gate is None else gate.stride()), eps,
                GATED=gate is not None, BLOCK=triton.next_power_of_2(hidden),
            )  # fmt: skip
        ctx.save_for_backward(x, weight, gate)
        ctx.eps, ctx.bug = eps, bug
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, gate), bug = ctx.saved_tensors, ctx.bug
        rows, hidden = x.shape
        dx = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
        dgate = None if gate is None else torch.empty_like(dx)
        dw = torch.empty((rows, hidden), dtype=torch.float32, device=x.device)
        if x.numel():
            backward_kernel[(rows,)](
                dy, x, weight, gate, dx, dw, dgate, hidden, *dy.stride(), *x.stride(), weight.stride(0),
                *((0, 0) if gate is None and bug != "gate-required" else gate.stride()), ctx.eps,
                GATED=gate is not None, BLOCK=triton.next_power_of_2(hidden), BUG=bug,
            )  # fmt: skip
        return dx, dw.sum(0).to(weight.dtype), dgate, None, None


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
        return GatedNorm.apply(x, weight, gate, eps, bug)

    return FusionSpec(
        name=f"gated_norm {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "x": tensor("rows hidden"),
            "weight": tensor("hidden"),
            "gate": optional(tensor("rows hidden")),
            "eps": 1e-6,
        },
        dims={"rows": dim(0, 16)},
        grad=True,
    )
