# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Step sizes of a state-space model, ``softplus(dt + bias)``, with their backward: float32 inside, one rounding.

``dt`` is ``(rows, heads)``, ``bias`` ``(heads,)``. Above 20 softplus is its argument.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pytest_fusion import FusionSpec, dim, tensor


def reference(dt: Tensor, bias: Tensor) -> Tensor:
    return functional.softplus(dt.float() + bias.float()).to(dt.dtype)


@triton.jit
def step_kernel(
    dt, bias, dy, out, rows, heads, dt_row, dt_col, bias_pitch, dy_row, dy_col,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    h = tl.arange(0, BLOCK)[None, :]
    inside = (r < rows) & (h < heads)
    value = tl.load(dt + r * dt_row + h * dt_col, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + h * bias_pitch, mask=h < heads, other=0.0).to(tl.float32)
    if BACKWARD:
        g = tl.load(dy + r * dy_row + h * dy_col, mask=inside, other=0.0).to(tl.float32)
        slope = tl.sigmoid(value)
        if BUG == "wrong-else":
            # mamba #574: where() falls back to the wrong variable above the threshold.
            result = tl.where(value <= 20.0, g * slope, value)
        elif BUG == "threshold-cuts":
            result = tl.where(value <= 20.0, g * slope, 0.0)
        else:
            result = g * slope
    else:
        result = tl.where(value <= 20.0, tl.log(1.0 + tl.exp(tl.minimum(value, 20.0))), value)
        small = tl.exp(tl.minimum(value, 0.0))
        # log(1 + y) loses y where it is small: its series has float32's digits below 2^-6.
        result = tl.where(value < -4.2, small * (1.0 - small * (0.5 - small * (0.33333334 - small * 0.25))), result)
    tl.store(out + r * heads + h, result.to(out.dtype.element_ty), mask=inside)


class Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dt: Tensor, bias: Tensor, bug: str) -> Tensor:
        ctx.save_for_backward(dt, bias)
        ctx.bug = bug
        return _launch(dt, bias, dt, torch.empty(dt.shape, dtype=dt.dtype, device=dt.device), backward=False, bug=bug)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dt, bias = ctx.saved_tensors
        fresh = torch.empty(dt.shape, dtype=torch.float32, device=dt.device)
        gradient = _launch(dt, bias, dy, fresh, backward=True, bug=ctx.bug)
        return gradient.to(dt.dtype), gradient.sum(0).to(bias.dtype), None


def _launch(dt: Tensor, bias: Tensor, dy: Tensor, out: Tensor, *, backward: bool, bug: str) -> Tensor:
    rows, heads = dt.shape
    if out.numel():
        step_kernel[(triton.cdiv(rows, 8),)](
            dt, bias, dy, out, rows, heads, *dt.stride(), bias.stride(0), *dy.stride(),
            BACKWARD=backward, ROWS=8, BLOCK=triton.next_power_of_2(heads), BUG=bug,
        )  # fmt: skip
    return out


def make_spec(bug: str = "") -> FusionSpec:
    def fused(dt: Tensor, bias: Tensor) -> Tensor:
        return Softplus.apply(dt, bias, bug)

    return FusionSpec(
        name=f"softplus_grad {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"dt": tensor("rows heads"), "bias": tensor("heads")},
        dims={"rows": dim(0, 32), "heads": dim(0, 64)},
        grad=True,
    )
