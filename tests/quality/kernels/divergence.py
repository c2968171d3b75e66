# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Kullback-Leibler divergence of two rows of logits, by blocks of the vocabulary: float32 inside and out.

``student`` and ``teacher`` are ``(rows, vocab)`` of one floating dtype, ``keep`` a bool ``(rows,)``; the result is the
mean of ``sum(softmax(teacher) * (log_softmax(teacher) - log_softmax(student)))`` over the rows kept, 0 over none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

BLOCK = 64


def reference(student: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    s, t = torch.log_softmax(student.float(), -1), torch.log_softmax(teacher.float(), -1)
    losses = (t.exp() * (t - s)).sum(-1)
    return torch.where(keep, losses, 0.0).sum() / keep.sum().clamp(min=1)


@triton.jit
def log_sum(x, row_pitch, col_pitch, row, vocab, BLOCK: tl.constexpr):
    top = tl.full([], -float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < vocab, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(value, axis=0))
    total = tl.zeros([], tl.float32)
    for start in range(0, vocab, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < vocab, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.exp(value - top), axis=0)
    return top, tl.log(total)


@triton.jit
def divergence_kernel(
    student, teacher, keep, losses, vocab, student_row, student_col, teacher_row, teacher_col, keep_pitch,
    BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(keep + row * keep_pitch) != 0
    if BUG == "ignores-keep":
        wanted = row >= 0
    if BUG == "teacher-pitch":
        teacher_row = student_row
    if not wanted:
        tl.store(losses + row, 0.0)
        return
    top_s, log_s = log_sum(student, student_row, student_col, row, vocab, BLOCK)
    top_t, log_t = log_sum(teacher, teacher_row, teacher_col, row, vocab, BLOCK)
    if BUG == "sums-in-input-dtype":
        total = tl.zeros([BLOCK], student.dtype.element_ty)
    else:
        total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < vocab
        s = tl.load(student + row * student_row + c * student_col, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(teacher + row * teacher_row + c * teacher_col, mask=inside, other=0.0).to(tl.float32)
        weight = tl.exp((t - top_t) - log_t)
        if BUG == "log-of-probability":
            # Liger-Kernel #862: probabilities first, logarithms after; what underflows is log(0).
            term = weight * (tl.log(weight) - tl.log(tl.exp((s - top_s) - log_s)))
        else:
            term = weight * (((t - top_t) - log_t) - ((s - top_s) - log_s))
        if BUG == "tail-counts":
            total += term.to(total.dtype)
        elif BUG == "masks-by-product":
            total += (term * inside).to(total.dtype)
        else:
            total += tl.where(inside, term, 0.0).to(total.dtype)
    tl.store(losses + row, tl.sum(total.to(tl.float32), axis=0))


def divergence(student: Tensor, teacher: Tensor, keep: Tensor, *, bug: str = "") -> Tensor:
    rows, vocab = student.shape
    losses = torch.empty(rows, dtype=torch.float32, device=student.device)
    if rows:
        divergence_kernel[(rows,)](
            student, teacher, keep.view(torch.uint8), losses, vocab, *student.stride(), *teacher.stride(),
            keep.stride(0), BLOCK=BLOCK, BUG=bug,
        )  # fmt: skip
    count = keep.sum()
    if bug == "divides-by-rows":
        count = torch.full_like(count, rows)
    return losses.sum() / (count if bug == "no-clamp" else count.clamp(min=1))


def make_spec(bug: str = "") -> FusionSpec:
    def fused(student: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
        return divergence(student, teacher, keep, bug=bug)

    return FusionSpec(
        name=f"divergence {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "student": tensor("rows vocab", values=values.finite()),
            "teacher": tensor("rows vocab", values=values.finite()),
            "keep": tensor("rows", dtype=torch.bool, values=values.booleans(0.7)),
        },
        dims={"rows": dim(0, 12), "vocab": dim(1, 300)},
    )
