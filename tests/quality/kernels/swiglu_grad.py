# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Gated unit ``act(gate) * up`` with its backward: float32 inside, one rounding to ``gate.dtype`` at the end.

``gate`` and ``up`` are ``(rows, cols)``; ``act`` is SiLU, or the sigmoid where ``plain``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

BLOCK = 64


def reference(gate: Tensor, up: Tensor, plain: bool) -> Tensor:
    g = gate.float()
    return ((torch.sigmoid(g) if plain else g * torch.sigmoid(g)) * up.float()).to(gate.dtype)


@triton.jit
def forward_kernel(
    gate, up, out, cols, gate_row, gate_col, up_row, up_col, PLAIN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + row * gate_row + c * gate_col, mask=c < cols, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + c * up_col, mask=c < cols, other=0.0).to(tl.float32)
    active = tl.sigmoid(g)
    if not PLAIN:
        active = active * g
    tl.store(out + row * cols + c, (active * u).to(out.dtype.element_ty), mask=c < cols)


@triton.jit
def backward_kernel(
    dy, gate, up, dgate, dup, cols, dy_row, dy_col, gate_row, gate_col, up_row, up_col, dgate_row, dgate_col,
    PLAIN: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < cols
    if BUG == "no-mask":
        inside = c >= 0
    d = tl.load(dy + row * dy_row + c * dy_col, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_row + c * gate_col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + c * up_col, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    active = s
    slope = s * (1.0 - s)
    if not PLAIN:
        active = s * g
        slope = s + active * (1.0 - s)
    if BUG == "silu-slope-for-both":
        slope = s + s * g * (1.0 - s)
    if BUG == "activation-rounded":
        active = active.to(gate.dtype.element_ty).to(tl.float32)
    at = dup + row * cols + c
    if BUG == "output-row":
        at = dup + c
    if BUG == "output-tile":
        at = dup + row * cols + tl.arange(0, BLOCK)
    tl.store(dgate + row * dgate_row + c * dgate_col, (d * u * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(at, (d * active).to(dup.dtype.element_ty), mask=inside)


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, plain: bool, bug: str) -> Tensor:
        rows, cols = gate.shape
        out = torch.empty((rows, cols), dtype=gate.dtype, device=gate.device)
        if out.numel():
            forward_kernel[(rows, triton.cdiv(cols, BLOCK))](
                gate, up, out, cols, *gate.stride(), *up.stride(), PLAIN=plain, BLOCK=BLOCK
            )
        ctx.save_for_backward(gate, up)
        ctx.plain, ctx.bug = plain, bug
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (gate, up), bug = ctx.saved_tensors, ctx.bug
        rows, cols = gate.shape
        dup = torch.empty((rows, cols), dtype=gate.dtype, device=gate.device)
        # What Liger does on purpose to save memory: the gradient takes the place of what was saved.
        dgate = gate if bug == "overwrites-saved" else torch.empty_like(dup)
        pitches = dy.stride()
        if bug == "upstream-row-pitch-only":
            pitches = (dy.stride(0), 1)
        if dup.numel():
            blocks = cols // BLOCK if bug == "floor-blocks" else triton.cdiv(cols, BLOCK)
            if blocks:
                backward_kernel[(rows, blocks)](
                    dy, gate, up, dgate, dup, cols, *pitches, *gate.stride(), *up.stride(), *dgate.stride(),
                    PLAIN=ctx.plain, BLOCK=BLOCK, BUG=bug,
                )  # fmt: skip
        if bug == "only-both":
            # Both or none, though either may be frozen.
            return (dgate, dup, None, None) if all(ctx.needs_input_grad[:2]) else (None, None, None, None)
        return dgate, dup, None, None


def make_spec(bug: str = "") -> FusionSpec:
    def fused(gate: Tensor, up: Tensor, plain: bool) -> Tensor:
        return SwiGLU.apply(gate, up, plain, bug)

    return FusionSpec(
        name=f"swiglu_grad {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"gate": tensor("rows cols"), "up": tensor("rows cols"), "plain": st.booleans()},
        dims={"rows": dim(0, 16)},
        grad=True,
    )
