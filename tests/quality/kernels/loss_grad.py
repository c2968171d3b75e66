# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Cross entropy that makes its gradient in the forward pass, as fused losses do: float32 inside and out.

``logits`` is ``(rows, vocab)``, ``target`` an int64 ``(rows,)`` with -100 where a row is ignored; ``reduction`` is
``"none"`` (losses ``(rows,)``) or ``"mean"`` over the rows that count. The gradient is kept in float32, multiplied by
the upstream gradient and rounded to ``logits.dtype`` once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pytest_fusion import FusionSpec, derived, dim, tensor, values

IGNORED = -100


def reference(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
    losses = functional.cross_entropy(logits.float(), target, ignore_index=IGNORED, reduction="none")
    return losses if reduction == "none" else losses.sum() / (target != IGNORED).sum().clamp(min=1)


@triton.jit
def loss_kernel(
    logits, target, losses, saved, vocab, row_pitch, col_pitch, target_pitch, saved_row, saved_col, share,
    KEEP: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    label = tl.load(target + row * target_pitch)
    at = saved + row * saved_row + c * saved_col
    if label == -100:
        tl.store(losses + row, 0.0)
        if KEEP:
            if BUG != "leaves-ignored":
                tl.store(at, tl.zeros([BLOCK], saved.dtype.element_ty), mask=c < vocab)
        return
    x = tl.load(logits + row * row_pitch + c * col_pitch, mask=c < vocab, other=-float("inf")).to(tl.float32)
    chosen = tl.load(logits + row * row_pitch + label * col_pitch).to(tl.float32)
    top = tl.max(x, axis=0)
    weight = tl.exp(x - top)
    total = tl.sum(weight, axis=0)
    tl.store(losses + row, tl.log(total) + (top - chosen))
    if KEEP:
        gradient = weight / total
        if BUG != "forgets-target":
            gradient = tl.where(c == label, gradient - 1.0, gradient)
        tl.store(at, (gradient * share).to(saved.dtype.element_ty), mask=c < vocab)


@triton.jit
def scale_kernel(saved, dy, out, vocab, saved_row, saved_col, dy_pitch, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    if BUG == "first-upstream":
        dy_pitch = 0
    g = tl.load(dy + row * dy_pitch).to(tl.float32)
    value = tl.load(saved + row * saved_row + c * saved_col, mask=c < vocab, other=0.0).to(tl.float32)
    if BUG == "ignores-upstream":
        g = 1.0
    if BUG == "scales-twice":
        g = g * g
    tl.store(out + row * vocab + c, (value * g).to(out.dtype.element_ty), mask=c < vocab)
    if BUG == "scales-in-place":
        tl.store(saved + row * saved_row + c * saved_col, value * g, mask=c < vocab)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: str, bug: str) -> Tensor:
        rows, vocab = logits.shape
        losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
        keep = ctx.needs_input_grad[0]
        if bug == "no-grad-unbound":
            # Made only for training and used in any case, as in Liger-Kernel #930.
            if keep:
                saved = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
        elif bug == "gradient-into-logits":
            saved = logits
        else:
            saved = torch.empty((rows if keep else 0, vocab), dtype=torch.float32, device=logits.device)
        counted = (target != IGNORED).sum().clamp(min=1)
        divisor = rows if bug == "divides-by-all" else int(counted)
        share = 1.0 if reduction == "none" or bug == "forgets-mean" else 1.0 / max(divisor, 1)
        if rows:
            loss_kernel[(rows,)](
                logits, target, losses, saved, vocab, *logits.stride(), target.stride(0), *saved.stride(), share,
                KEEP=keep, BLOCK=triton.next_power_of_2(vocab), BUG=bug,
            )  # fmt: skip
        ctx.save_for_backward(saved)
        ctx.dtype, ctx.bug = logits.dtype, bug
        return losses if reduction == "none" else losses.sum() / counted

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        rows, vocab = saved.shape
        out = torch.empty((rows, vocab), dtype=ctx.dtype, device=saved.device)
        if rows:
            pitch = dy.stride(0) if dy.dim() else 0
            if ctx.bug == "upstream-pitch":
                pitch = dy.dim()
            scale_kernel[(rows,)](
                saved, dy, out, vocab, *saved.stride(), pitch, BLOCK=triton.next_power_of_2(vocab), BUG=ctx.bug
            )
        return out, None, None, None


def draw_target(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Labels of which about a third, at times all or none, are ignored."""
    device = generator.device
    label = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    share = torch.randint(0, 4, (), generator=generator, device=device) / 3
    ignored = torch.rand(rows, generator=generator, device=device) < share
    return torch.where(ignored, IGNORED, label)


def make_spec(bug: str = "") -> FusionSpec:
    def fused(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        return CrossEntropy.apply(logits, target, reduction, bug)

    return FusionSpec(
        name=f"loss_grad {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "logits": tensor("rows vocab", values=values.finite()),
            "target": derived(draw_target),
            "reduction": st.sampled_from(["none", "mean"]),
        },
        dims={"rows": dim(0, 12), "vocab": dim(1, 300)},
        grad="logits",
        syncs=True,  # the number of counted rows is read on the host
    )
