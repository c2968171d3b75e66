# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rotary embedding with its backward, halves convention: float32 inside, one rounding to ``q.dtype`` at the end.

``q`` is ``(seq, heads, 2 * half)``, ``angle`` a float32 ``(seq, half)`` without gradient. Backward turns the upstream
gradient the other way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values


def reference(q: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = q.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(q.dtype)


@triton.jit
def turn_kernel(
    q, angle, out, heads, half, q_seq, q_head, q_col, out_seq, out_head, out_col, angle_row, angle_col, sign,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    step = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = (h < heads) & (i < half)
    turn = tl.load(angle + step * angle_row + i * angle_col, mask=i < half, other=0.0)
    cos, sin = tl.cos(turn), tl.sin(turn) * sign
    source = q + step * q_seq + h * q_head
    first = tl.load(source + i * q_col, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + (i + half) * q_col, mask=inside, other=0.0).to(tl.float32)
    target = out + step * out_seq + h * out_head
    if BUG == "first-head":
        target = out + step * out_seq + h * 0
    tl.store(target + i * out_col, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(target + (i + half) * out_col, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)


def turn(q: Tensor, angle: Tensor, out: Tensor, sign: float, strides: tuple[int, ...], bug: str = "") -> Tensor:
    seq, heads, features = q.shape
    if q.numel():
        turn_kernel[(seq,)](
            q, angle, out, heads, features // 2, *strides, *out.stride(), *angle.stride(), sign,
            HEADS=triton.next_power_of_2(heads), BLOCK=triton.next_power_of_2(features // 2), BUG=bug,
        )  # fmt: skip
    return out


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, angle: Tensor, bug: str) -> Tensor:
        ctx.save_for_backward(angle)
        ctx.bug = bug
        return turn(q, angle, torch.empty(q.shape, dtype=q.dtype, device=q.device), 1.0, q.stride())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (angle,), bug = ctx.saved_tensors, ctx.bug
        strides = dy.stride()
        if bug == "guard-not-called":
            # The parentheses of is_contiguous() are missing, so that nothing is ever copied (unsloth #3782).
            if not dy.is_contiguous:
                dy = dy.contiguous()
            strides = (dy.shape[1] * dy.shape[2], dy.shape[2], 1)
        fresh = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
        out = dy if bug == "turns-in-place" else fresh
        sign = 1.0 if bug == "turns-forward" else -1.0
        return turn(dy, angle, out, sign, strides, bug), None, None


def make_spec(bug: str = "") -> FusionSpec:
    def fused(q: Tensor, angle: Tensor) -> Tensor:
        if bug == "raw-kernel":
            return turn(q, angle, torch.empty(q.shape, dtype=q.dtype, device=q.device), 1.0, q.stride())
        return Rope.apply(q, angle, bug)

    return FusionSpec(
        name=f"rope_grad {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "q": tensor("seq heads 2*half"),
            "angle": tensor("seq half", dtype=torch.float32, values=values.uniform(-20, 20)),
        },
        dims={"seq": dim(0, 12), "heads": dim(0, 6), "half": dim(0, 80)},
        grad="q",
    )
