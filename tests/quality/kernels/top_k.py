# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The ``k`` largest of each row, in falling order, with their columns; of equals the lower column comes first.

``x`` is ``(rows, cols)`` without NaN, ``k`` an int of at most ``cols``; the result is ``(largest, columns)`` of shape
``(rows, k)``, of ``x``'s dtype and int64. A row's answer does not depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values


def reference(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    order = torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :k]
    return x.gather(-1, order), order


@triton.jit
def top_kernel(
    x, largest, columns, cols, k, row_pitch, col_pitch, LAST: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    left = c < cols
    pad = -float("inf")
    if BUG == "pads-with-zero":
        pad = 0.0
    value = tl.load(x + row * row_pitch + c * col_pitch, mask=left, other=pad).to(tl.float32)
    if BUG == "pads-with-zero":
        left = c >= 0
    taken = k
    if BUG == "one-too-few":
        taken = tl.maximum(k - 1, 1)
    for i in range(taken):
        top = tl.max(tl.where(left, value, -float("inf")), axis=0)
        best = left & (value == top)
        if LAST:
            column = tl.max(tl.where(best, c, -1), axis=0)
        else:
            column = tl.min(tl.where(best, c, BLOCK), axis=0)
        tl.store(largest + row * k + i, top.to(largest.dtype.element_ty))
        tl.store(columns + row * k + i, column.to(tl.int64))
        if BUG == "drops-ties":
            left = left & (value != top)
        else:
            left = left & (c != column)


def top_k(x: Tensor, k: int, *, bug: str = "") -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    largest = torch.empty((rows, k), dtype=x.dtype, device=x.device)
    columns = torch.empty((rows, k), dtype=torch.int64, device=x.device)
    # vllm #50979: from eight rows on another path, which treats ties another way.
    last = bug == "other-path" and rows >= 8
    if rows:
        top_kernel[(rows,)](
            x, largest, columns, cols, k, *x.stride(), LAST=last, BLOCK=triton.next_power_of_2(cols), BUG=bug
        )
    return largest, columns


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return top_k(x, k, bug=bug)

    return FusionSpec(
        name=f"top_k {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows cols", values=values.finite()), "k": st.sampled_from([1, 2, 4])},
        dims={"rows": dim(0, 24), "cols": dim(4, 128)},
        invariant="rows",
    )
