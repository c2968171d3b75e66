# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Layer norm with its backward in tiles of rows: float32 inside, one rounding to the dtype of each result at the end.

``x`` is ``(rows, hidden)``, ``weight`` and ``bias`` ``(hidden,)`` or both None; the result is like ``x``. The
gradients of ``weight`` and ``bias`` are added up by float32 atomics, so that their last bits may vary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pytest_fusion import FusionSpec, dim, optional, tensor

ROWS = 4


def reference(x: Tensor, weight: Tensor | None, bias: Tensor, eps: float) -> Tensor:
    normed = functional.layer_norm(x.float(), x.shape[-1:], eps=eps)
    return (normed + bias.float() if weight is None else normed * weight.float() + bias.float()).to(x.dtype)


def written_out(x: Tensor, weight: Tensor | None, bias: Tensor, eps: float) -> Tensor:
    """The same, operator by operator: its own backward takes the mean's error out again, the kernels' do not."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normed + bias.float() if weight is None else normed * weight.float() + bias.float()).to(x.dtype)


def torchs_own(x: Tensor, weight: Tensor | None, bias: Tensor, eps: float) -> Tensor:
    """On the CPU ``x * scale - mean * scale``, forward and backward."""
    vectors = (None if t is None else t.float() for t in (weight, bias))
    return functional.layer_norm(x.float(), x.shape[-1:], *vectors, eps=eps).to(x.dtype)


@triton.jit
def forward_kernel(
    x, weight, bias, out, means, scales, rows, hidden, row_pitch, col_pitch, weight_pitch, bias_pitch, eps,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (c < hidden)[None, :]
    value = tl.load(x + r[:, None] * row_pitch + c[None, :] * col_pitch, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=1) / hidden
    centred = tl.where(inside, value - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / hidden + eps)
    result = centred * scale[:, None]
    if WEIGHTED:
        result *= tl.load(weight + c * weight_pitch, mask=c < hidden, other=0.0).to(tl.float32)[None, :]
    result += tl.load(bias + c * bias_pitch, mask=c < hidden, other=0.0).to(tl.float32)[None, :]
    tl.store(means + r, mean, mask=r < rows)
    tl.store(scales + r, scale, mask=r < rows)
    tl.store(out + r[:, None] * hidden + c[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dy, x, weight, means, scales, dx, dw, db, rows, hidden, dy_row, dy_col, x_row, x_col, weight_pitch,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    c = tl.arange(0, BLOCK)
    live = r < rows
    inside = live[:, None] & (c < hidden)[None, :]
    g = tl.load(dy + r[:, None] * dy_row + c[None, :] * dy_col, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + r[:, None] * x_row + c[None, :] * x_col, mask=inside, other=0.0).to(tl.float32)
    if BUG == "statistics-row-mask":
        mean = tl.load(means + r)
        scale = tl.load(scales + r)
    else:
        mean = tl.load(means + r, mask=live, other=0.0)
        scale = tl.load(scales + r, mask=live, other=0.0)
    normed = (value - mean[:, None]) * scale[:, None]
    if BUG == "mean-not-subtracted":
        normed = value * scale[:, None]
    weighted = g
    if WEIGHTED:
        weighted = g * tl.load(weight + c * weight_pitch, mask=c < hidden, other=0.0).to(tl.float32)[None, :]
    first = tl.sum(weighted, axis=1) / hidden
    second = tl.sum(weighted * normed, axis=1) / hidden
    if BUG == "collapses-rows":
        first = tl.sum(tl.sum(weighted, axis=1), axis=0) / hidden + tl.zeros([ROWS], tl.float32)
        second = tl.sum(tl.sum(weighted * normed, axis=1), axis=0) / hidden + tl.zeros([ROWS], tl.float32)
    if BUG == "unweighted-branch":
        if not WEIGHTED:
            first = first * 0.0
    result = scale[:, None] * (weighted - first[:, None] - normed * second[:, None])
    at = dx + r[:, None] * hidden + c[None, :]
    if BUG == "first-rows-only":
        at = dx + tl.arange(0, ROWS)[:, None] * hidden + c[None, :]
    tl.store(at, result.to(dx.dtype.element_ty), mask=inside)
    if WEIGHTED:
        if BUG == "stores-sums":
            tl.store(dw + c, tl.sum(g * normed, axis=0).to(dw.dtype.element_ty), mask=c < hidden)
        elif BUG == "atomic-without-mask":
            tl.atomic_add(dw + c, tl.sum(g * normed, axis=0))
        else:
            tl.atomic_add(dw + c, tl.sum(g * normed, axis=0).to(dw.dtype.element_ty), mask=c < hidden)
    tl.atomic_add(db + c, tl.sum(g, axis=0).to(db.dtype.element_ty), mask=c < hidden)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor, eps: float, bug: str) -> Tensor:
        rows, hidden = x.shape
        out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
        means, scales = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        if out.numel():
            forward_kernel[(triton.cdiv(rows, ROWS),)](
                x, weight, bias, out, means, scales, rows, hidden, *x.stride(),
                0 if weight is None else weight.stride(0), bias.stride(0), eps,
                WEIGHTED=weight is not None, ROWS=ROWS, BLOCK=triton.next_power_of_2(hidden),
            )  # fmt: skip
        ctx.save_for_backward(x, weight, means, scales)
        ctx.bias_dtype, ctx.bug = bias.dtype, bug
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, means, scales), bug = ctx.saved_tensors, ctx.bug
        rows, hidden = x.shape
        dx = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
        dtype = ctx.bias_dtype if bug == "sums-in-weight-dtype" else torch.float32
        allocate = torch.empty if bug == "starts-from-anything" else torch.zeros
        dw, db = (allocate(hidden, dtype=dtype, device=x.device) for _ in range(2))
        if x.numel():
            blocks = rows // ROWS if bug == "floor-grid" else triton.cdiv(rows, ROWS)
            if blocks:
                backward_kernel[(blocks,)](
                    dy, x, weight, means, scales, dx, dw, db, rows, hidden, *dy.stride(), *x.stride(),
                    0 if weight is None else weight.stride(0),
                    WEIGHTED=weight is not None, ROWS=ROWS, BLOCK=triton.next_power_of_2(hidden), BUG=bug,
                )  # fmt: skip
        if bug == "needs-weight":
            # As in unsloth #8629: the optional argument is used as if it were always there.
            return dx, dw.to(weight.dtype), db.to(ctx.bias_dtype), None, None
        return dx, None if weight is None else dw.to(weight.dtype), db.to(ctx.bias_dtype), None, None


def make_written_out_spec(*, own: bool = False) -> FusionSpec:
    """``own``: torch's layer norm in the kernel's place."""
    spec = make_spec()
    return spec.with_(fused=torchs_own if own else spec.fused, reference=written_out)


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, weight: Tensor | None, bias: Tensor, eps: float) -> Tensor:
        return LayerNorm.apply(x, weight, bias, eps, bug)

    return FusionSpec(
        name=f"layer_norm_grad {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "x": tensor("rows hidden"),
            "weight": optional(tensor("hidden")),
            "bias": tensor("hidden"),
            "eps": 1e-5,
        },
        dims={"rows": dim(0, 1100 if bug == "sums-in-weight-dtype" else 24)},
        grad=True,
        deterministic={"dweight": False, "dbias": False},
    )
