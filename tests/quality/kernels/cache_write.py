# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Writes keys into a paged cache in place: pure copies, bit for bit.

``cache`` is ``(blocks, page, features)``, ``key`` ``(tokens, features)`` of the same dtype, ``slots`` an int64
``(tokens,)`` without repetition; a slot of -1 is skipped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, derived, dim, tensor


def reference(cache: Tensor, key: Tensor, slots: Tensor) -> None:
    page = cache.shape[1]
    live = slots >= 0
    cache[slots[live] // page, slots[live] % page] = key[live]


@triton.jit
def write_kernel(
    cache, key, slots, page, features, cache_block, cache_slot, cache_col, key_row, key_col, slots_pitch,
    BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slots_pitch)
    if BUG != "writes-skipped":
        if slot < 0:
            return
    if BUG == "allocator-page":
        page = 4
    if BUG == "ignores-row-stride":
        key_row = features
    target = cache + (slot // page) * cache_block + (slot % page) * cache_slot
    c = tl.arange(0, BLOCK)
    value = tl.load(key + token * key_row + c * key_col, mask=c < features, other=0.0)
    tl.store(target + c * cache_col, value, mask=c < features)


@triton.jit
def pair_kernel(
    cache, key, slots, page, pairs, cache_block, cache_slot, key_row, slots_pitch, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slots_pitch)
    if slot < 0:
        return
    c = tl.arange(0, BLOCK)
    source = key.to(tl.pointer_type(tl.int32)) + token * key_row
    target = cache.to(tl.pointer_type(tl.int32)) + (slot // page) * cache_block + (slot % page) * cache_slot
    tl.store(target + c, tl.load(source + c, mask=c < pairs, other=0), mask=c < pairs)


def write(cache: Tensor, key: Tensor, slots: Tensor, *, bug: str = "") -> None:
    _, page, features = cache.shape
    if not key.numel():
        return
    two_bytes = key.element_size() == 2 and key.stride(1) == 1 and cache.stride(2) == 1
    pitches = (cache.stride(0), cache.stride(1), key.stride(0))
    if bug == "pairs-of-odd-pitch":
        paired = two_bytes and features % 2 == 0
    elif bug == "pairs-of-odd-width":
        paired = two_bytes and all(pitch % 2 == 0 for pitch in pitches)
    else:
        even = features % 2 == 0 and all(pitch % 2 == 0 for pitch in pitches)
        paired = two_bytes and even and key.data_ptr() % 4 == 0 and cache.data_ptr() % 4 == 0
    block = triton.next_power_of_2(features)
    if paired:
        pair_kernel[(key.shape[0],)](
            cache, key, slots, page, features // 2, *(pitch // 2 for pitch in pitches), slots.stride(0), BLOCK=block
        )
    else:
        write_kernel[(key.shape[0],)](
            cache, key, slots, page, features, *cache.stride(), *key.stride(), slots.stride(0), BLOCK=block, BUG=bug
        )


def draw_slots(tokens: int, blocks: int, page: int, generator: torch.Generator) -> Tensor:
    """Distinct slots in random order, of which about a fifth, and all that the cache has no room for, are -1."""
    device = generator.device
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    order = torch.randperm(blocks * page, generator=generator, device=device)[:tokens]
    slots[: order.numel()] = order
    return torch.where(torch.rand(tokens, generator=generator, device=device) < 0.2, -1, slots)


def make_spec(bug: str = "") -> FusionSpec:
    def fused(cache: Tensor, key: Tensor, slots: Tensor) -> None:
        write(cache, key, slots, bug=bug)

    return FusionSpec(
        name=f"cache_write {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "cache": tensor("blocks page features"),
            "key": tensor("tokens features"),
            "slots": derived(draw_slots),
        },
        dims={"blocks": dim(0, 6), "page": dim(1, 9), "tokens": dim(0, 24)},
        mutates=["cache"],
    )
