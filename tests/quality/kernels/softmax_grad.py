# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Softmax of rows with its backward, batch invariant: a row's bits and its gradient's do not depend on other rows.

``x`` is ``(rows, cols)``; sums run over the columns in steps, in float32, with one rounding at the end.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

STEP = 16


def reference(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


@triton.jit
def forward_kernel(x, y, cols, x_row, x_col, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([STEP], float("-inf"), tl.float32)
    for start in range(0, cols, STEP):
        c = start + tl.arange(0, STEP)
        value = tl.load(x + row * x_row + c * x_col, mask=c < cols, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, value)
    most = tl.max(largest, axis=0)
    total = tl.zeros([STEP], tl.float32)
    for start in range(0, cols, STEP):
        c = start + tl.arange(0, STEP)
        value = tl.load(x + row * x_row + c * x_col, mask=c < cols, other=float("-inf")).to(tl.float32)
        total += tl.exp(value - most)
    scale = 1 / tl.sum(total, axis=0)
    for start in range(0, cols, STEP):
        c = start + tl.arange(0, STEP)
        value = tl.load(x + row * x_row + c * x_col, mask=c < cols, other=float("-inf")).to(tl.float32)
        tl.store(y + row * cols + c, tl.exp(value - most) * scale, mask=c < cols)


@triton.jit
def backward_kernel(y, dy, dx, cols, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([STEP], tl.float32)
    for start in range(0, cols, STEP):
        c = start + tl.arange(0, STEP)
        value = tl.load(y + row * cols + c, mask=c < cols, other=0.0)
        total += value * tl.load(dy + row * cols + c, mask=c < cols, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0)
    for start in range(0, cols, STEP):
        c = start + tl.arange(0, STEP)
        value = tl.load(y + row * cols + c, mask=c < cols, other=0.0)
        g = tl.load(dy + row * cols + c, mask=c < cols, other=0.0).to(tl.float32)
        tl.store(dx + row * cols + c, (value * (g - mean)).to(dx.dtype.element_ty), mask=c < cols)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bug: str) -> Tensor:
        rows, cols = x.shape
        y = torch.empty((rows, cols), dtype=torch.float32, device=x.device)
        # As many programs as that keep a GPU busy without wide tiles (vllm #48391, at 256 rows).
        step = 4 * STEP if bug == "wide-tiles-for-many" and rows >= 300 else STEP
        if x.numel():
            forward_kernel[(rows,)](x, y, cols, *x.stride(), STEP=step)
        ctx.save_for_backward(y)
        ctx.bug = bug
        return y.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        rows, cols = y.shape
        dx = torch.empty((rows, cols), dtype=dy.dtype, device=y.device)
        step = 4 * STEP if ctx.bug == "wide-tiles-in-backward" and rows > 128 else STEP
        if y.numel():
            backward_kernel[(rows,)](y, dy.contiguous(), dx, cols, STEP=step)
        return dx, None


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return Softmax.apply(x, bug)

    return FusionSpec(
        name=f"softmax_grad {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows cols", values=values.finite())},
        dims={"cols": dim(1, 400)},
        grad=True,
        invariant="rows",
    )
