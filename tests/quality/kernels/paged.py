# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""One decoding step over a paged key/value cache: float32 inside, one rounding to ``q.dtype`` at the end.

``q`` is ``(batch, features)``, ``k_cache`` and ``v_cache`` are ``(blocks, page, features)``, ``table`` an int32
``(batch, pages)`` of block numbers and ``lengths`` an int32 ``(batch,)``. Slots past a sequence's length hold
anything and never matter; a sequence of length 0 gives zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, derived, dim, tensor

OUT_TILE = 16


def reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    page = k_cache.shape[1]
    rows = []
    for sequence, length in enumerate(lengths.tolist()):
        slot = torch.arange(length, device=q.device)
        block = table[sequence, slot // page].long()
        k, v = k_cache[block, slot % page].float(), v_cache[block, slot % page].float()
        weight = torch.softmax(k @ q[sequence].float() * q.shape[1] ** -0.5, -1)
        rows.append((weight[:, None] * v).sum(0).to(q.dtype))
    return torch.stack(rows) if rows else torch.zeros_like(q)


@triton.jit
def decode_kernel(
    q, k_cache, v_cache, table, lengths, out, features, page, scale,
    q_row, q_col, k_block, k_slot, k_col, v_block, v_slot, v_col, table_row, table_col, lengths_pitch,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, OUT_TILE: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + sequence * lengths_pitch)
    if BUG == "zero-length":
        if length == 0:
            return
    if BUG == "table-pitch":
        table_row = tl.cdiv(length, page)
    d = tl.arange(0, WIDTH)
    e = tl.program_id(1) * OUT_TILE + tl.arange(0, OUT_TILE)
    query = tl.load(q + sequence * q_row + d * q_col, mask=d < features, other=0.0).to(tl.float32)
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    mixed = tl.zeros([OUT_TILE], tl.float32)
    for number in range(tl.cdiv(length, page)):
        block = tl.load(table + sequence * table_row + number * table_col).to(tl.int64)
        s = tl.arange(0, PAGE)
        live = (s < page) & (number * page + s < length)
        key_mask = live[:, None] & (d < features)[None, :]
        key = tl.load(k_cache + block * k_block + s[:, None] * k_slot + d[None, :] * k_col, mask=key_mask, other=0.0)
        score = tl.sum(key.to(tl.float32) * query[None, :], axis=1) * scale
        score = tl.where(live, score, -float("inf"))
        value_mask = live[:, None] & (e < features)[None, :]
        if BUG == "value-tail":
            value_mask = (s < page)[:, None] & (e < features)[None, :]
        value_at = v_cache + block * v_block + s[:, None] * v_slot + e[None, :] * v_col
        value = tl.load(value_at, mask=value_mask, other=0.0)
        higher = tl.maximum(top, tl.max(score, axis=0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp(score - shift)
        fade = tl.exp(top - shift)
        mixed = mixed * fade + tl.sum(weight[:, None] * value.to(tl.float32), axis=0)
        total = total * fade + tl.sum(weight, axis=0)
        top = higher
    result = tl.where(length == 0, 0.0, mixed / tl.where(length == 0, 1.0, total))
    at = e
    if BUG == "output-tile":
        at = tl.arange(0, OUT_TILE)
    tl.store(out + sequence * features + at, result.to(out.dtype.element_ty), mask=e < features)


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, *, bug: str = "") -> Tensor:
    batch, features = q.shape
    page = k_cache.shape[1]
    out = torch.empty((batch, features), dtype=q.dtype, device=q.device)
    if out.numel():
        decode_kernel[(batch, triton.cdiv(features, OUT_TILE))](
            q, k_cache, v_cache, table, lengths, out, features, page, features**-0.5,
            *q.stride(), *k_cache.stride(), *v_cache.stride(), *table.stride(), lengths.stride(0),
            PAGE=triton.next_power_of_2(page), WIDTH=triton.next_power_of_2(features), OUT_TILE=OUT_TILE, BUG=bug,
        )  # fmt: skip
    return out


def draw_table(batch: int, pages: int, blocks: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, blocks, (batch, pages), generator=generator, device=generator.device, dtype=torch.int32)


def draw_lengths(batch: int, pages: int, page: int, generator: torch.Generator) -> Tensor:
    longest = pages * page
    return torch.randint(0, longest + 1, (batch,), generator=generator, device=generator.device, dtype=torch.int32)


def make_spec(bug: str = "") -> FusionSpec:
    def fused(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        return decode(q, k_cache, v_cache, table, lengths, bug=bug)

    return FusionSpec(
        name=f"paged_decode {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "q": tensor("batch features"),
            "k_cache": tensor("blocks page features"),
            "v_cache": tensor("blocks page features"),
            "table": derived(draw_table),
            "lengths": derived(draw_lengths),
        },
        dims={
            "batch": dim(0, 3),
            "blocks": dim(1, 8),
            "page": dim(1, 16),
            "pages": dim(0, 4),
            "features": dim(1, 36),
        },
    )
