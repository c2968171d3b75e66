# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""RMS norm of ``x + residual``, both written in place as serving stacks do.

``x`` and ``residual`` are ``(rows, hidden)``, ``weight`` ``(hidden,)``, of one floating dtype. ``residual`` becomes
the sum, rounded; ``x`` the norm of that rounded sum, float32 inside with one rounding at the end. A row's bits do not
depend on how many rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor


def reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.copy_((x.float() + residual.float()).to(x.dtype))
    total = residual.float()
    x.copy_((total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype))


@triton.jit
def add_norm_kernel(
    x, residual, weight, hidden, x_row, x_col, residual_row, residual_col, weight_pitch, eps,
    BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if BUG == "residual-pitch":
        residual_row = x_row
    square = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_row + c * x_col, mask=c < hidden, other=0.0).to(tl.float32)
        at = residual + row * residual_row + c * residual_col
        value += tl.load(at, mask=c < hidden, other=0.0).to(tl.float32)
        total = value.to(x.dtype.element_ty)
        if BUG != "residual-not-written":
            tl.store(at, total, mask=c < hidden)
        square += total.to(tl.float32) * total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(square, axis=0) / hidden + eps)
    # The sums come back from memory, maybe to other threads than those that stored them.
    tl.debug_barrier()
    for start in range(0, hidden, BLOCK):
        c = start + tl.arange(0, BLOCK)
        source = residual + row * residual_row + c * residual_col
        total = tl.load(source, mask=c < hidden, other=0.0).to(tl.float32)
        if BUG == "adds-again":
            total += tl.load(x + row * x_row + c * x_col, mask=c < hidden, other=0.0).to(tl.float32)
        w = tl.load(weight + c * weight_pitch, mask=c < hidden, other=0.0).to(tl.float32)
        tl.store(x + row * x_row + c * x_col, (total * scale * w).to(x.dtype.element_ty), mask=c < hidden)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, bug: str = "") -> None:
    rows, hidden = x.shape
    block = 64
    if bug == "block-by-rows":
        # vllm #48391: wide blocks for few rows, narrow ones from a threshold on.
        block = 64 if rows < 8 else 16
    if x.numel():
        add_norm_kernel[(rows,)](
            x, residual, weight, hidden, *x.stride(), *residual.stride(), weight.stride(0), eps, BLOCK=block, BUG=bug
        )


def make_spec(bug: str = "", *, least: int = 0) -> FusionSpec:
    def fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        add_norm(x, residual, weight, eps, bug=bug)

    # An expanded tensor cannot be written row by row.
    written = tensor("rows hidden", layouts=("contiguous", "padded", "transposed", "step", "offset"))
    return FusionSpec(
        name=f"residual_norm {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": written, "residual": written, "weight": tensor("hidden"), "eps": 1e-6},
        dims={"rows": dim(0, 20), "hidden": dim(least, 200)},
        mutates=["x", "residual"],
        invariant="rows",
    )
