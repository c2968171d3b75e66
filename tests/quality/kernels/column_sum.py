# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Sum over rows, split over programs: float32 partial sums, one rounding to ``x.dtype`` at the end.

``x`` is ``(rows, cols)``, the result ``(cols,)``. Two ways: partial sums that a second kernel adds, and atomic
additions.
"""

from __future__ import annotations

import random

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

SPLITS = 4


def reference(x: Tensor) -> Tensor:
    return x.float().sum(0).to(x.dtype)


@triton.jit
def partial_kernel(
    x, partial, rows, cols, chunk, row_pitch, col_pitch,
    ATOMIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = split * chunk
    end = tl.minimum(start + chunk, rows)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(tl.cdiv(chunk, ROWS)):
        r = start + step * ROWS + tl.arange(0, ROWS)
        inside = (r < end)[:, None] & (c < cols)[None, :]
        if BUG == "row-mask-only":
            inside = (r < end)[:, None] & (c >= 0)[None, :]
        total += tl.load(x + r[:, None] * row_pitch + c[None, :] * col_pitch, mask=inside, other=0.0).to(tl.float32)
    mine = tl.sum(total, axis=0)
    if ATOMIC:
        if BUG == "atomic-without-mask" or BUG == "row-mask-only":
            tl.atomic_add(partial + c, mine)
        else:
            tl.atomic_add(partial + c, mine, mask=c < cols)
    else:
        tl.store(partial + split * cols + c, mine, mask=c < cols)


@triton.jit
def finish_kernel(partial, order, out, splits, cols, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(splits):
        split = tl.load(order + i).to(tl.int64)
        total += tl.load(partial + split * cols + c, mask=c < cols, other=0.0)
    tl.store(out + c, total.to(out.dtype.element_ty), mask=c < cols)


def column_sum(x: Tensor, *, bug: str = "") -> Tensor:
    rows, cols = x.shape
    out = torch.empty(cols, dtype=x.dtype, device=x.device)
    if not cols:
        return out
    splits = SPLITS if bug == "floor-chunk" else max(1, min(SPLITS, rows))
    chunk = rows // splits if bug == "floor-chunk" else triton.cdiv(rows, splits)
    partial = torch.empty((splits, cols), dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(cols, 64)
    partial_kernel[(splits, blocks)](
        x, partial, rows, cols, chunk, *x.stride(), ATOMIC=False, ROWS=4, BLOCK=64, BUG=bug
    )
    order = list(range(splits))
    # A scheduler's whim, seeded by nothing that a test controls.
    whim = random.SystemRandom()
    if bug == "any-order":
        whim.shuffle(order)
    if bug == "lost-update" and splits > 1 and whim.random() < 0.5:
        order.pop()
    finish_kernel[(blocks,)](
        partial, torch.tensor(order, dtype=torch.int32).to(x.device, non_blocking=True), out, len(order), cols, BLOCK=64
    )
    return out


def column_sum_atomic(x: Tensor, *, bug: str = "") -> Tensor:
    rows, cols = x.shape
    allocate = torch.empty if bug == "starts-from-anything" else torch.zeros
    total = allocate(cols, dtype=torch.float32, device=x.device)
    if x.numel():
        splits = min(SPLITS, rows)
        partial_kernel[(splits, triton.cdiv(cols, 64))](
            x, total, rows, cols, triton.cdiv(rows, splits), *x.stride(), ATOMIC=True, ROWS=4, BLOCK=64, BUG=bug
        )
    # float32 atomics and a cast: a copy also where the dtype is float32 already.
    return total.to(x.dtype)


def make_spec(bug: str = "", *, atomic: bool = False) -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return column_sum_atomic(x, bug=bug) if atomic else column_sum(x, bug=bug)

    return FusionSpec(
        name=f"column_sum{'_atomic' if atomic else ''} {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows cols")},
        dims={"rows": dim(0, 40), "cols": dim(0, 160)},
        deterministic=not atomic,
    )
