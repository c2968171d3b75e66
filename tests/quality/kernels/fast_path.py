# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""``(x + residual) * weight`` with its backward: one kernel for any strides, a faster one for aligned rows.

``x`` and ``residual`` are ``(rows, cols)``, ``weight`` ``(cols,)``. The faster kernel is launched where all tensors of
a call begin at multiples of 16 bytes, and so do their rows, which lie without gaps between neighbours; where they are
contiguous as a whole, rows need not.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

BLOCK = 64
VECTOR = 8


def reference(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return ((x.float() + residual.float()) * weight.float()).to(x.dtype)


@triton.jit
def any_kernel(x, residual, weight, out, cols, x_row, x_col, r_row, r_col, w_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < cols
    a = tl.load(x + row * x_row + c * x_col, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(residual + row * r_row + c * r_col, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + c * w_col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * cols + c, ((a + b) * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def flat_kernel(x, residual, weight, out, cols, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at % cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, ((a + b) * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def pitched_kernel(x, residual, weight, out, cols, x_row, r_row, out_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < cols
    a = tl.load(x + row * x_row + c, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(residual + row * r_row + c, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + c, ((a + b) * w).to(out.dtype.element_ty), mask=inside)


def _whole(*tensors: Tensor) -> bool:
    return all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)


def _pitched(*tensors: Tensor) -> bool:
    """Rows that begin at multiples of 16 bytes."""
    return all(t.stride(-1) == 1 and t.data_ptr() % 16 == 0 for t in tensors) and all(
        t.stride(0) * t.itemsize % 16 == 0 for t in tensors if t.dim() == 2
    )


def add_mul(x: Tensor, residual: Tensor, weight: Tensor, bug: str = "") -> Tensor:
    rows, cols = x.shape
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if _whole(x, residual, weight):
        count = out.numel() // VECTOR * VECTOR if bug == "vectors-only" else out.numel()
        if count:
            flat_kernel[(triton.cdiv(count, BLOCK),)](x, residual, weight, out, cols, count, BLOCK=BLOCK)
        return out
    grid = (rows, triton.cdiv(cols, BLOCK))
    if _pitched(x, residual, weight):
        pitch = x.stride(0) if bug == "output-pitch" else cols
        pitched_kernel[grid](
            x, residual, weight, out, cols, x.stride(0), residual.stride(0), pitch, BLOCK=BLOCK
        )  # fmt: skip
    else:
        any_kernel[grid](
            x, residual, weight, out, cols, *x.stride(), *residual.stride(), weight.stride(0), BLOCK=BLOCK
        )  # fmt: skip
    return out


class AddMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bug: str) -> Tensor:
        ctx.save_for_backward(x, residual, weight)
        ctx.bug = bug
        return add_mul(x, residual, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, residual, weight = ctx.saved_tensors
        none = torch.zeros_like(dy)
        dx = add_mul(dy, none, weight, ctx.bug if _whole(x, residual) else "")
        summed = dy.float() * (x.float() + residual.float())
        return dx, dx.clone(), summed.sum(0).to(weight.dtype), None


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return add_mul(x, residual, weight, bug)

    return _spec(f"fast_path {bug}", fused)


def make_grad_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return AddMul.apply(x, residual, weight, bug)

    return _spec(f"fast_path_grad {bug}", fused, grad=True)


def _spec(name: str, fused: Any, **more: Any) -> FusionSpec:
    return FusionSpec(
        name=name.strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows cols"), "residual": tensor("rows cols"), "weight": tensor("cols")},
        dims={"rows": dim(0, 16)},
        **more,
    )
