# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Embedding bag, mean over the entries that are not padding: float32 sums, one rounding to ``table.dtype`` at the end.

``table`` is ``(vocab, width)``, ``indices`` int64 ``(total,)``, ``offsets`` int64 ``(bags + 1,)`` from 0 to
``total``, ``padding`` an int; a bag with nothing to count is zero.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, derived, dim, tensor, values


def reference(table: Tensor, indices: Tensor, offsets: Tensor, padding: int) -> Tensor:
    rows = []
    bounds = offsets.tolist()
    for start, end in itertools.pairwise(bounds):
        chosen = indices[start:end]
        chosen = chosen[chosen != padding]
        rows.append((table[chosen].float().sum(0) / max(len(chosen), 1)).to(table.dtype))
    return torch.stack(rows) if rows else table.new_zeros((0, table.shape[1]))


@triton.jit
def bag_kernel(
    table, indices, offsets, out, width, padding, table_row, table_col, indices_pitch, offsets_pitch,
    BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    bag = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets + bag * offsets_pitch)
    end = tl.load(offsets + (bag + 1) * offsets_pitch)
    c = tl.arange(0, BLOCK)
    if BUG == "sums-in-table-dtype":
        total = tl.zeros([BLOCK], table.dtype.element_ty)
    else:
        total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([], tl.int32)
    for i in range(start, end):
        entry = tl.load(indices + i * indices_pitch)
        keep = entry != padding
        row = tl.load(table + entry * table_row + c * table_col, mask=(c < width) & keep, other=0.0)
        total += row.to(total.dtype)
        if BUG == "counts-padding":
            count += 1
        else:
            count += keep.to(tl.int32)
    if BUG != "empty-bag":
        count = tl.maximum(count, 1)
    result = total.to(tl.float32) / count
    tl.store(out + bag * width + c, result.to(out.dtype.element_ty), mask=c < width)


def bag_mean(table: Tensor, indices: Tensor, offsets: Tensor, padding: int, *, bug: str = "") -> Tensor:
    bags, width = offsets.numel() - 1, table.shape[1]
    out = torch.empty((bags, width), dtype=table.dtype, device=table.device)
    programs = bags - 1 if bug == "last-bag" else bags
    if out.numel() and programs:
        bag_kernel[(programs,)](
            table, indices, offsets, out, width, padding, *table.stride(), indices.stride(0), offsets.stride(0),
            BLOCK=triton.next_power_of_2(width), BUG=bug,
        )  # fmt: skip
    return out


def draw_offsets(bags: int, total: int, generator: torch.Generator) -> Tensor:
    device = generator.device
    cuts = torch.randint(0, total + 1, (bags + 1,), generator=generator, device=device)
    cuts[0], cuts[-1] = 0, total if bags else 0
    return cuts.sort().values


def make_spec(bug: str = "") -> FusionSpec:
    def fused(table: Tensor, indices: Tensor, offsets: Tensor, padding: int) -> Tensor:
        return bag_mean(table, indices, offsets, padding, bug=bug)

    return FusionSpec(
        name=f"bag_mean {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "table": tensor("vocab width"),
            "indices": tensor("total", dtype=torch.int64, values=values.indices("vocab")),
            "offsets": derived(draw_offsets),
            "padding": 0,
        },
        dims={"vocab": dim(1, 40), "width": dim(0, 48), "total": dim(0, 60), "bags": dim(0, 12)},
    )
