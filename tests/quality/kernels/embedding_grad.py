# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Embedding with the gradient of its table: rows are copied, gradients added up in float32 by atomics.

``table`` is ``(vocab, width)``, ``token`` an int64 ``(tokens,)``; the row ``PADDING`` gets no gradient. The order of
the additions, and with it the last bits of the gradient, may vary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

PADDING = 0


def reference(table: Tensor, token: Tensor) -> Tensor:
    # In float32, so that the gradient is added up there and rounded once. torch.embedding_dense_backward (2.11) makes
    # an illegal access on a GPU where rows have no elements.
    rows = table.float()[token]
    return torch.where((token == PADDING)[:, None], rows.detach(), rows).to(table.dtype)


@triton.jit
def gather_kernel(table, token, out, width, table_row, table_col, token_pitch, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    entry = tl.load(token + at * token_pitch)
    c = tl.arange(0, BLOCK)
    tl.store(out + at * width + c, tl.load(table + entry * table_row + c * table_col, mask=c < width), mask=c < width)


@triton.jit
def scatter_kernel(
    dy, token, total, width, dy_row, dy_col, token_pitch, PADDING: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    entry = tl.load(token + at * token_pitch)
    c = tl.arange(0, BLOCK)
    inside = c < width
    if BUG != "pads-too":
        inside = inside & (entry != PADDING)
    g = tl.load(dy + at * dy_row + c * dy_col, mask=c < width, other=0.0).to(total.dtype.element_ty)
    target = total + entry * width + c
    if BUG == "stores":
        tl.store(target, g, mask=inside)
    elif BUG == "no-mask":
        tl.atomic_add(target, g)
    else:
        tl.atomic_add(target, g, mask=inside)


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, token: Tensor, bug: str) -> Tensor:
        tokens, width = token.numel(), table.shape[1]
        out = torch.empty((tokens, width), dtype=table.dtype, device=table.device)
        if out.numel():
            gather_kernel[(tokens,)](
                table, token, out, width, *table.stride(), token.stride(0), BLOCK=triton.next_power_of_2(width)
            )
        ctx.save_for_backward(token)
        ctx.shape, ctx.dtype, ctx.bug = table.shape, table.dtype, bug
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (token,), bug = ctx.saved_tensors, ctx.bug
        dtype = ctx.dtype if bug == "sums-in-table-dtype" else torch.float32
        allocate = torch.empty if bug == "starts-from-anything" else torch.zeros
        total = allocate(ctx.shape, dtype=dtype, device=dy.device)
        if dy.numel():
            scatter_kernel[(token.numel(),)](
                dy, token, total, ctx.shape[1], *dy.stride(), token.stride(0),
                PADDING=PADDING, BLOCK=triton.next_power_of_2(ctx.shape[1]), BUG=bug,
            )  # fmt: skip
        return total.to(ctx.dtype), None, None


# They show, or are wrong beyond rounding, where many tokens meet in a row.
_MANY = ("undeclared", "sums-in-table-dtype")


def make_spec(bug: str = "", *, vocab: tuple[int, int] = (1, 40)) -> FusionSpec:
    def fused(table: Tensor, token: Tensor) -> Tensor:
        return Embedding.apply(table, token, bug)

    return FusionSpec(
        name=f"embedding_grad {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "table": tensor("vocab width"),
            "token": tensor("tokens", dtype=torch.int64, values=values.indices("vocab")),
        },
        dims={"vocab": dim(*vocab), "width": dim(0, 48), "tokens": dim(0, 4000 if bug in _MANY else 60)},
        grad="table",
        deterministic=bug == "undeclared" or {"dtable": False},
    )
