# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Tokens sent to their experts, scaled there and combined; and dense gates of experts that may repeat.

``x`` is ``(tokens, width)``, ``expert`` an int64 ``(tokens, slots)``, ``gate`` a float32 of that shape, ``scale``
``(experts, width)``. float32 inside, one rounding to ``x.dtype``; ``load`` counts the tokens of each expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

# Rows of an expert that one program scales; places that an expert has where its buffer is too small.
TILE, CAPACITY = 16, 8


def reference(x: Tensor, expert: Tensor, gate: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    share = gate / gate.sum(-1, keepdim=True)
    mixed = (share[..., None] * scale.float()[expert]).sum(1)
    load = torch.bincount(expert.flatten(), minlength=scale.shape[0])
    return (x.float() * mixed).to(x.dtype), load.to(torch.int32)


@triton.jit
def rank_kernel(expert, counts, rank, pairs, slots, expert_row, expert_col, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    e = tl.load(expert + (at // slots) * expert_row + (at % slots) * expert_col, mask=inside, other=0)
    tl.store(rank + at, tl.atomic_add(counts + e, 1, mask=inside), mask=inside)


@triton.jit
def place_kernel(
    expert, rank, start, source, pairs, slots, expert_row, expert_col,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    e = tl.load(expert + (at // slots) * expert_row + (at % slots) * expert_col, mask=inside, other=0)
    r = tl.load(rank + at, mask=inside, other=0)
    if BUG == "overwrites-past-capacity":
        r = tl.minimum(r, CAPACITY - 1)
    if BUG == "ranks-in-6-bits":
        r = r & 63
    place = tl.load(start + e, mask=inside, other=0) + r
    tl.store(source + place, at, mask=inside)
    tl.store(rank + at, place, mask=inside)


@triton.jit
def expert_kernel(
    x, source, start, counts, scale, y, load, pairs, slots, width, x_row, x_col, scale_row, scale_col,
    TILE: tl.constexpr, WIDTH: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0).to(tl.int64)
    first, count = tl.load(start + e), tl.load(counts + e)
    if BUG == "load-of-last-experts":
        if first == pairs:
            return
    if tl.program_id(1) == 0:
        tl.store(load + e, count)
    r = tl.program_id(1) * TILE + tl.arange(0, TILE)
    c = tl.arange(0, WIDTH)
    both = (r < count)[:, None] & (c < width)[None, :]
    token = tl.load(source + first + r, mask=r < count, other=0) // slots
    row = tl.load(x + token[:, None] * x_row + c[None, :] * x_col, mask=both, other=0.0).to(tl.float32)
    factor = tl.load(scale + e * scale_row + c * scale_col, mask=c < width, other=0.0).to(tl.float32)
    tl.store(y + (first + r)[:, None] * width + c[None, :], row * factor[None, :], mask=both)


@triton.jit
def combine_kernel(
    y, rank, expert, start, gate, out, slots, width, expert_row, expert_col, gate_row, gate_col,
    CAPACITY: tl.constexpr, WIDTH: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    mixed, total = tl.zeros([WIDTH], tl.float32), 0.0
    for s in range(slots):
        total += tl.load(gate + token * gate_row + s * gate_col)
    last = slots
    if BUG == "two-slots":
        last = tl.minimum(slots, 2)
    for s in range(last):
        place = tl.load(rank + token * slots + s)
        share = tl.load(gate + token * gate_row + s * gate_col) / total
        inside = c < width
        if BUG == "drops-past-capacity":
            e = tl.load(expert + token * expert_row + s * expert_col)
            inside = inside & (place - tl.load(start + e) < CAPACITY)
        mixed += share * tl.load(y + place * width + c, mask=inside, other=0.0)
    tl.store(out + token * width + c, mixed.to(out.dtype.element_ty), mask=c < width)


def through_experts(x: Tensor, expert: Tensor, gate: Tensor, scale: Tensor, *, bug: str = "") -> tuple[Tensor, Tensor]:
    (tokens, width), experts, slots = x.shape, scale.shape[0], expert.shape[1]
    pairs = tokens * slots
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    load = torch.empty(experts, dtype=torch.int32, device=x.device)
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    if not pairs:
        return out, load.zero_()
    rank, source = (torch.empty(pairs, dtype=torch.int32, device=x.device) for _ in range(2))
    y = torch.empty((pairs, width), dtype=torch.float32, device=x.device)
    blocks, block = (triton.cdiv(pairs, 64),), triton.next_power_of_2(width)
    rank_kernel[blocks](expert, counts, rank, pairs, slots, *expert.stride(), BLOCK=64)
    start = (counts.cumsum(0) - counts).to(torch.int32)
    place_kernel[blocks](
        expert, rank, start, source, pairs, slots, *expert.stride(), CAPACITY=CAPACITY, BLOCK=64, BUG=bug
    )
    most = triton.cdiv(2 * pairs, experts) if bug == "tiles-of-twice-the-average" else tokens
    expert_kernel[(experts, triton.cdiv(most, TILE))](
        x, source, start, counts, scale, y, load, pairs, slots, width, *x.stride(), *scale.stride(),
        TILE=TILE, WIDTH=block, BUG=bug,
    )  # fmt: skip
    combine_kernel[(tokens,)](
        y, rank, expert, start, gate, out, slots, width, *expert.stride(), *gate.stride(),
        CAPACITY=CAPACITY, WIDTH=block, BUG=bug,
    )  # fmt: skip
    return out, load


def dense_reference(expert: Tensor, gate: Tensor, experts: int) -> Tensor:
    """Of equal experts of a token the first slot counts; shares are of what counts."""
    dense = gate.new_zeros((len(gate), experts))
    for slot in reversed(range(expert.shape[1])):
        dense = dense.scatter(1, expert[:, slot : slot + 1], gate[:, slot : slot + 1])
    return dense / dense.sum(-1, keepdim=True)


@triton.jit
def dense_kernel(
    expert, gate, out, slots, expert_row, expert_col, gate_row, gate_col, EXPERTS: tl.constexpr, BUG: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    row, total = tl.zeros([EXPERTS], tl.float32), 0.0
    for s in range(slots):
        mine = tl.load(expert + token * expert_row + s * expert_col)
        weight = tl.load(gate + token * gate_row + s * gate_col)
        counts = (e == mine) & (row == 0)
        if BUG == "last-of-repeats":
            counts = e == mine
        if BUG == "adds-repeats":
            row = tl.where(e == mine, row + weight, row)
        else:
            row = tl.where(counts, weight, row)
        total += weight
    if BUG != "divides-by-all":
        total = tl.sum(row, axis=0)
    tl.store(out + token * EXPERTS + e, row / total)


def dense_gates(expert: Tensor, gate: Tensor, experts: int, *, bug: str = "") -> Tensor:
    out = torch.empty((len(gate), experts), dtype=torch.float32, device=gate.device)
    if out.numel():
        dense_kernel[(len(gate),)](
            expert, gate, out, expert.shape[1], *expert.stride(), *gate.stride(), EXPERTS=experts, BUG=bug
        )
    return out


GATE = tensor("tokens slots", dtype=torch.float32, values=values.positive(0.25, 4.0))


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, expert: Tensor, gate: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return through_experts(x, expert, gate, scale, bug=bug)

    return FusionSpec(
        name=f"experts {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "x": tensor("tokens width", values=values.finite()),
            "expert": tensor("tokens slots", dtype=torch.int64, values=values.routing("experts")),
            "gate": GATE,
            "scale": tensor("experts width", values=values.normal()),
        },
        dims={"tokens": dim(0, 300), "width": dim(1, 20), "slots": dim(1, 4), "experts": dim(4, 16)},
    )


def make_dense_spec(bug: str = "") -> FusionSpec:
    def fused(expert: Tensor, gate: Tensor, experts: int) -> Tensor:
        return dense_gates(expert, gate, experts, bug=bug)

    return FusionSpec(
        name=f"dense_gates {bug}".strip(),
        fused=fused,
        reference=dense_reference,
        inputs={
            "expert": tensor("tokens slots", dtype=torch.int64, values=values.indices(8)),
            "gate": GATE,
            "experts": 8,
        },
        dims={"tokens": dim(0, 100), "slots": dim(1, 6)},
    )
