# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Packed sequences of different lengths: rows scaled and added to those before them, means, offsets of lengths.

``x`` is ``(total, width)``, ``bounds`` an int32 ``(sequences + 1,)`` with the first row of each sequence and the end,
``scale`` ``(sequences, width)``. A row without one before it in its sequence gets 0 from there; the mean of no rows
is 0. float32 inside, one rounding to ``x.dtype``.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

ROWS = 8


def reference(x: Tensor, bounds: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    shifted, means = [], []
    for sequence, (first, end) in enumerate(itertools.pairwise(bounds.tolist())):
        rows = x[first:end].float()
        before = torch.cat([rows.new_zeros((1, rows.shape[1])), rows])[: end - first]
        shifted.append((rows * scale[sequence].float() + before).to(x.dtype))
        means.append((rows.sum(0) / max(end - first, 1)).to(x.dtype))
    return torch.cat(shifted), torch.stack(means)


@triton.jit
def shift_kernel(
    x, bounds, scale, out, sequences, width, x_row, x_col, bounds_pitch, scale_row, scale_col,
    BOUNDS: tl.constexpr, WIDTH: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BOUNDS)
    bound = tl.load(bounds + s * bounds_pitch, mask=s < sequences, other=2147483647)
    begun = bound <= row
    if BUG == "search-from-left":
        begun = bound < row
    first = tl.max(tl.where(begun, bound, 0), axis=0)
    if BUG == "starts-marked-once":
        earlier = tl.load(bounds + (s - 1) * bounds_pitch, mask=(s > 0) & (s < sequences), other=-1)
        begun = begun & (bound != earlier)
    sequence = tl.maximum(tl.sum(begun.to(tl.int32), axis=0) - 1, 0)
    if BUG == "shift-across-border":
        first = first * 0
    c = tl.arange(0, WIDTH)
    inside = c < width
    v = tl.load(x + row * x_row + c * x_col, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(x + (row - 1) * x_row + c * x_col, mask=inside & (row > first), other=0.0).to(tl.float32)
    factor = tl.load(scale + sequence * scale_row + c * scale_col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + c, (v * factor + before).to(out.dtype.element_ty), mask=inside)


@triton.jit
def mean_kernel(
    x, bounds, out, total, sequences, width, x_row, x_col, bounds_pitch,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    if BUG == "bounds-pitch":
        bounds_pitch = 1
    first, end = tl.load(bounds + sequence * bounds_pitch), tl.load(bounds + (sequence + 1) * bounds_pitch)
    if BUG == "ends-with-the-last-row":
        if first == total:
            return
    length = end - first
    if BUG == "at-least-one-row":
        length = tl.maximum(length, 1)
    most = length
    if BUG == "twice-the-average":
        most = tl.minimum(length, tl.cdiv(tl.cdiv(2 * total, sequences), ROWS) * ROWS)
    c = tl.arange(0, WIDTH)
    added = tl.zeros([WIDTH], tl.float32)
    for begin in range(0, most, ROWS):
        r = begin + tl.arange(0, ROWS)
        live = r < length
        if BUG == "full-block-as-empty":
            live = live & ((begin + ROWS < length) | (r - begin < length % ROWS))
        both = live[:, None] & (c < width)[None, :]
        block = tl.load(x + (first + r)[:, None] * x_row + c[None, :] * x_col, mask=both, other=0.0)
        added += tl.sum(block.to(tl.float32), axis=0)
    if BUG != "divides-by-length":
        length = tl.maximum(length, 1)
    tl.store(out + sequence * width + c, (added / length).to(out.dtype.element_ty), mask=c < width)


def packed(x: Tensor, bounds: Tensor, scale: Tensor, *, bug: str = "") -> tuple[Tensor, Tensor]:
    (total, width), sequences = x.shape, scale.shape[0]
    out = torch.empty((total, width), dtype=x.dtype, device=x.device)
    means = torch.empty((sequences, width), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    if total:
        shift_kernel[(total,)](
            x, bounds, scale, out, sequences, width, *x.stride(), bounds.stride(0), *scale.stride(),
            BOUNDS=triton.next_power_of_2(sequences), WIDTH=block, BUG=bug,
        )  # fmt: skip
    mean_kernel[(sequences,)](
        x, bounds, means, total, sequences, width, *x.stride(), bounds.stride(0), ROWS=ROWS, WIDTH=block, BUG=bug
    )
    return out, means


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, bounds: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return packed(x, bounds, scale, bug=bug)

    return FusionSpec(
        name=f"packed {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "x": tensor("total width", values=values.finite()),
            "bounds": tensor("sequences+1", dtype=torch.int32, values=values.offsets("total")),
            "scale": tensor("sequences width", values=values.normal()),
        },
        dims={"total": dim(0, 300), "width": dim(1, 20), "sequences": dim(1, 12)},
    )


def offsets_reference(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


@triton.jit
def offsets_kernel(lengths, bounds, count, pitch, BLOCK: tl.constexpr, BUG: tl.constexpr):
    total = tl.zeros([1], tl.int64)
    tl.store(bounds + tl.arange(0, 1), total)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        length = tl.load(lengths + at * pitch, mask=at < count, other=0)
        ends = tl.cumsum(length, axis=0) + total
        if BUG == "in-32-bits":
            ends = ends.to(tl.int32).to(tl.int64)
        if BUG == "in-16-bits":
            ends = ends.to(tl.int16).to(tl.int64)
        if BUG == "in-bfloat16":
            ends = ends.to(tl.float32).to(tl.bfloat16).to(tl.int64)
        tl.store(bounds + 1 + at, ends, mask=at < count)
        total += tl.sum(length, axis=0)


def offsets_of(lengths: Tensor, *, bug: str = "") -> Tensor:
    bounds = torch.empty(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    offsets_kernel[(1,)](lengths, bounds, len(lengths), lengths.stride(0), BLOCK=16, BUG=bug)
    return bounds


def make_offsets_spec(bug: str = "", *, total: int = 40_000) -> FusionSpec:
    def fused(lengths: Tensor) -> Tensor:
        return offsets_of(lengths, bug=bug)

    return FusionSpec(
        name=f"offsets of {total} {bug}".strip(),
        fused=fused,
        reference=offsets_reference,
        inputs={"lengths": tensor("sequences", dtype=torch.int64, values=values.lengths(total))},
        dims={"sequences": dim(1, 200)},
    )
