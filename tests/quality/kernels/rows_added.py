# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rows added to those of a table, by index: runs of the sorted indices, float32 sums, one rounding at the end.

``table`` is ``(vocab, width)``, ``rows`` ``(tokens, width)`` of the same dtype, ``index`` an int64 ``(tokens,)``; the
result is a new table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

RUN = 16


def reference(table: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    return table.float().index_add(0, index, rows.float()).to(table.dtype)


@triton.jit
def add_kernel(
    table, rows, index, order, out, tokens, vocab, width, table_row, table_col, rows_row, rows_col, index_pitch,
    RUN: tl.constexpr, WIDTH: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    entry = tl.load(index + tl.load(order + place) * index_pitch)
    earlier = tl.load(order + place - 1, mask=place > 0, other=0)
    begins = (place == 0) | (tl.load(index + earlier * index_pitch) != entry)
    every = entry < 0
    if BUG == "first-is-last":
        every = tl.load(index) == tl.load(index + (tokens - 1) * index_pitch)
        begins = begins & ((place == 0) | (every == 0))
    if BUG == "last-row-left-out":
        begins = begins & (entry < vocab - 1)
    if begins:
        c = tl.arange(0, WIDTH)
        total = tl.load(table + entry * table_row + c * table_col, mask=c < width, other=0.0).to(tl.float32)
        end = tokens
        if BUG == "runs-of-16":
            end = tl.minimum(tokens, place + RUN)
        for begin in range(place, end, RUN):
            p = begin + tl.arange(0, RUN)
            token = tl.load(order + p, mask=p < tokens, other=0)
            mine = (tl.load(index + token * index_pitch, mask=p < tokens, other=-1) == entry) | (every & (p < tokens))
            if BUG == "equal-neighbours-once":
                beside = tl.load(index + (token - 1) * index_pitch, mask=(p < tokens) & (token > 0), other=-1)
                mine = mine & (beside != entry)
            both = mine[:, None] & (c < width)[None, :]
            block = tl.load(rows + token[:, None] * rows_row + c[None, :] * rows_col, mask=both, other=0.0)
            total += tl.sum(block.to(tl.float32), axis=0)
            if BUG == "sums-in-table-dtype":
                total = total.to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + entry * width + c, total.to(out.dtype.element_ty), mask=c < width)


def add_rows(table: Tensor, rows: Tensor, index: Tensor, *, bug: str = "") -> Tensor:
    (vocab, width), tokens = table.shape, len(index)
    out = torch.empty((vocab, width), dtype=table.dtype, device=table.device)
    if bug != "unused-rows":
        out.copy_(table)
    if tokens and width:
        order = torch.arange(tokens, device=table.device) if bug == "assumes-sorted" else index.argsort(stable=True)
        add_kernel[(tokens,)](
            table, rows, index, order, out, tokens, vocab, width, *table.stride(), *rows.stride(), index.stride(0),
            RUN=RUN, WIDTH=triton.next_power_of_2(width), BUG=bug,
        )  # fmt: skip
    return out


def make_spec(bug: str = "") -> FusionSpec:
    def fused(table: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        return add_rows(table, rows, index, bug=bug)

    return FusionSpec(
        name=f"rows_added {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "table": tensor("vocab width", values=values.finite()),
            "rows": tensor("tokens width", values=values.finite()),
            "index": tensor("tokens", dtype=torch.int64, values=values.indices("vocab")),
        },
        dims={"vocab": dim(1, 300), "width": dim(1, 20), "tokens": dim(0, 300)},
    )
