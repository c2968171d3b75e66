"""Fused rotary embedding and cache write: queries turned, keys turned and values as they are put into pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from reference_kernels._attention import readable
from reference_kernels._common import Rows, broadcast, check_apart, check_tensor, jit, placed, row_offset
from reference_kernels.rope.pairs import Layout, angles, check_heads, config, copy_columns, pairs, store_pairs, turned

FLOAT8 = torch.float8_e4m3fn
INDICES = (torch.int32, torch.int64)


@jit
def _rope_cache_kernel(
    q_out_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    tokens: tl.tensor,
    q_heads: tl.tensor,
    k_heads: tl.tensor,
    half: tl.tensor,
    dim: tl.tensor,
    page_size: tl.tensor,
    capacity: tl.tensor,
    q_head_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_head_stride: tl.tensor,
    k_page: tl.tensor,
    k_row: tl.tensor,
    k_cache_head: tl.tensor,
    k_cache_step: tl.tensor,
    v_page: tl.tensor,
    v_row: tl.tensor,
    v_cache_head: tl.tensor,
    v_cache_step: tl.tensor,
    k_scale_step: tl.tensor,
    v_scale_step: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    q_stride0: tl.tensor,
    q_stride1: tl.tensor,
    q_stride2: tl.tensor,
    q_step: tl.tensor,
    k_stride0: tl.tensor,
    k_stride1: tl.tensor,
    k_stride2: tl.tensor,
    k_step: tl.tensor,
    v_stride0: tl.tensor,
    v_stride1: tl.tensor,
    v_stride2: tl.tensor,
    v_step: tl.tensor,
    cos_stride0: tl.tensor,
    cos_stride1: tl.tensor,
    cos_stride2: tl.tensor,
    cos_step: tl.tensor,
    sin_stride0: tl.tensor,
    sin_stride1: tl.tensor,
    sin_stride2: tl.tensor,
    sin_step: tl.tensor,
    slots_stride0: tl.tensor,
    slots_stride1: tl.tensor,
    slots_stride2: tl.tensor,
    INTERLEAVED: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """``BLOCK_TOKENS`` tokens and a block of the heads of each. ``q_out`` is contiguous ``(tokens, heads, dim)``; the
    caches have ``capacity`` slots and strides, by page, row, head and element. A token without a slot writes no key."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None, None]
    block = tl.program_id(1).to(tl.int64)
    q_head = block * BLOCK_Q + tl.arange(0, BLOCK_Q)[None, :, None]
    k_head = block * BLOCK_K + tl.arange(0, BLOCK_K)[None, :, None]
    slots_at = row_offset(token, size1, size2, slots_stride0, slots_stride1, slots_stride2)
    slot = tl.load(slots_ptr + slots_at, mask=token < tokens, other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot < capacity)
    slot = tl.where(kept, slot, 0)
    page = slot // page_size
    within = slot % page_size

    q_inside = (token < tokens) & (q_head < q_heads)
    k_inside = kept & (k_head < k_heads)
    q_in = q_ptr + row_offset(token, size1, size2, q_stride0, q_stride1, q_stride2) + q_head * q_head_stride
    k_in = k_ptr + row_offset(token, size1, size2, k_stride0, k_stride1, k_stride2) + k_head * k_head_stride
    v_in = v_ptr + row_offset(token, size1, size2, v_stride0, v_stride1, v_stride2) + k_head * v_head_stride
    q_out = q_out_ptr + (token * q_heads + q_head) * dim
    k_out = k_cache_ptr + page * k_page + within * k_row + k_head * k_cache_head
    v_out = v_cache_ptr + page * v_page + within * v_row + k_head * v_cache_head

    cos_in = cos_ptr + row_offset(token, size1, size2, cos_stride0, cos_stride1, cos_stride2)
    sin_in = sin_ptr + row_offset(token, size1, size2, sin_stride0, sin_stride1, sin_stride2)
    cos = angles(cos_in, token < tokens, half, cos_step, PAIRS)
    sin = angles(sin_in, token < tokens, half, sin_step, PAIRS)
    q_first, q_second = pairs(q_in, q_inside, half, q_step, INTERLEAVED, PAIRS)
    k_first, k_second = pairs(k_in, k_inside, half, k_step, INTERLEAVED, PAIRS)
    q_first, q_second = turned(q_first, q_second, cos, sin)
    k_first, k_second = turned(k_first, k_second, cos, sin)
    k_factor = 1.0
    v_factor = 1.0
    if HAS_K_SCALE:
        k_factor = 1.0 / tl.load(k_scale_ptr + k_head * k_scale_step, mask=k_head < k_heads, other=1.0)
        k_first *= k_factor
        k_second *= k_factor
    if HAS_V_SCALE:
        v_factor = 1.0 / tl.load(v_scale_ptr + k_head * v_scale_step, mask=k_head < k_heads, other=1.0)
    store_pairs(q_out, q_first, q_second, q_inside, half, 1, INTERLEAVED, PAIRS)
    store_pairs(k_out, k_first, k_second, k_inside, half, k_cache_step, INTERLEAVED, PAIRS)
    copy_columns(v_out, v_in, k_inside, 0, dim, v_cache_step, v_step, v_factor, HAS_V_SCALE, WIDTH)
    if REST > 0:
        copy_columns(q_out, q_in, q_inside, 2 * half, dim, 1, q_step, 1.0, False, REST)
        copy_columns(k_out, k_in, k_inside, 2 * half, dim, k_cache_step, k_step, k_factor, HAS_K_SCALE, REST)


@torch.library.custom_op("reference_kernels::rope_cache", mutates_args=("k_cache", "v_cache"))
def _rope_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    interleaved: bool,
    checked: bool,
) -> torch.Tensor:
    check_apart("rope_cache", "k_cache", k_cache, v_cache=v_cache, q=q, k=k, v=v)
    check_apart("rope_cache", "v_cache", v_cache, q=q, k=k, v=v)
    pages, page_size = k_cache.shape[:2]
    if checked:
        _check_slots(slots, pages * page_size)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() + k.numel() == 0:
        return q_out
    batch, half, dim = q.shape[:-2], cos.shape[-1], q.shape[-1]
    tables = [broadcast(angle, (*batch, half)).unsqueeze(-2) for angle in (cos, sin)]
    rows = Rows.of(q, k, v, *tables, slots[..., None, None], trailing=2)
    tile = config(q.shape[-2], k.shape[-2], half, dim - 2 * half)
    *steps, slots_steps = rows.strides
    with placed(q.device):
        _rope_cache_kernel[(triton.cdiv(rows.count, tile.tokens), tile.blocks)](
            q_out,
            k_cache,
            v_cache,
            *rows.tensors,
            *(q if scale is None else scale for scale in (k_scale, v_scale)),  # absent: never dereferenced
            rows.count,
            q.shape[-2],
            k.shape[-2],
            half,
            dim,
            max(page_size, 1),
            pages * page_size,
            *(tensor.stride(-2) for tensor in rows.tensors[:3]),
            *k_cache.stride(),
            *v_cache.stride(),
            *(0 if scale is None else scale.stride(0) for scale in (k_scale, v_scale)),
            *rows.sizes[1:],
            *(stride for four in steps for stride in four),
            *slots_steps[:3],
            INTERLEAVED=interleaved,
            HAS_K_SCALE=k_scale is not None,
            HAS_V_SCALE=v_scale is not None,
            BLOCK_TOKENS=tile.tokens,
            BLOCK_Q=tile.q_heads,
            BLOCK_K=tile.k_heads,
            PAIRS=tile.pairs,
            REST=tile.rest,
            WIDTH=triton.next_power_of_2(max(dim, 1)),
            num_warps=tile.warps,
        )
    return q_out


@_rope_cache.register_fake
def _(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def rope_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    layout: Layout = "half",
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    checked: bool = True,
) -> torch.Tensor:
    """``q`` turned as `rope` turns it, contiguous; ``k`` turned and ``v`` as it is are written into the caches.

    ``q`` is ``(*batch, q_heads, dim)``, ``k`` and ``v`` ``(*batch, k_heads, dim)`` of its dtype; ``cos``, ``sin`` and
    ``layout`` are those of `rope`. The caches, of that dtype or float8_e4m3fn, are ``(pages, page_size, k_heads, dim)``
    and changed in place: token ``i`` goes to page ``slots[i] // page_size``, row ``slots[i] % page_size``. ``slots`` is
    ``(*batch,)``, int32 or int64; a token whose slot is -1 (padding) is turned and not written. Keys are divided by
    ``k_scale`` and values by ``v_scale``, float32 ``(k_heads,)``, before the one rounding. All may have any strides,
    the caches too. No gradients.

    ``checked`` slots are read back before the launch, which on a CUDA device waits for it: one that is neither -1 nor
    one of the cache's, or that two tokens have, is refused. Unchecked ones reach no memory outside the caches: a slot
    that does not exist is as -1, and of two tokens in one slot each element is that of either. Raises `TypeError` for
    other or mixed dtypes; `ValueError` for shapes that do not fit, ``dim`` past 1024, an unknown layout, caches whose
    elements overlap, caches or angles that require a gradient, slots as above, mixed devices, or float8 on a GPU
    without it.
    """
    name = "rope_cache"
    check_heads(name, q, k, cos, sin, layout)
    check_tensor(name, "v", v, q, (q.dtype,))
    check_tensor(name, "slots", slots, q, INDICES)
    check_tensor(name, "k_cache", k_cache, q, (q.dtype, FLOAT8))
    check_tensor(name, "v_cache", v_cache, q, (k_cache.dtype,))
    for label, each, shape in (
        ("v", v, tuple(k.shape)),
        ("slots", slots, tuple(q.shape[:-2])),
        ("k_scale", k_scale, (k.shape[-2],)),
        ("v_scale", v_scale, (k.shape[-2],)),
    ):
        if each is not None and tuple(each.shape) != shape:
            raise ValueError(f"rope_cache: {label} has shape {tuple(each.shape)}, allowed: {shape}, as q and k ask for")
    for label, each in (("k_scale", k_scale), ("v_scale", v_scale)):
        if each is not None:
            check_tensor(name, label, each, q, (torch.float32,))
    _check_caches(k, k_cache, v_cache)
    interleaved = layout == "interleaved"
    q_out: torch.Tensor = _rope_cache(
        q, k, v, cos, sin, k_cache, v_cache, slots, k_scale, v_scale, interleaved, checked
    )
    return q_out


def _check_caches(k: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raise `ValueError` for a cache that does not fit the keys, or that cannot be written in place."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.ndim != 4 or cache.shape[2:] != k.shape[-2:] or cache.shape != k_cache.shape:
            raise ValueError(
                f"rope_cache: {name} {tuple(cache.shape)} does not fit; both caches are (pages, page_size, "
                f"{k.shape[-2]}, {k.shape[-1]}), so transpose one whose heads come before the rows"
            )
        if any(size > 1 and stride == 0 for size, stride in zip(cache.shape, cache.stride(), strict=True)):
            raise ValueError(f"rope_cache: elements of {name} share memory (a stride is 0); clone it")
        if cache.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"rope_cache: {name} requires a gradient, and is written in place; detach it")
    device = k.device
    if k_cache.dtype == FLOAT8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"rope_cache: {device} has no float8, which begins with capability 8.9; use {k.dtype} caches")


def _check_slots(slots: torch.Tensor, capacity: int) -> None:
    """Raise `ValueError` for a slot that does not exist, and for one that two tokens have."""
    readable("rope_cache", "slots", slots)
    found: dict[int, int] = {}
    numbers: Sequence[int] = slots.flatten().tolist()
    for token, slot in enumerate(numbers):
        if not -1 <= slot < capacity:
            raise ValueError(
                f"rope_cache: the slot of token {token} is {slot}, allowed: 0 to {capacity - 1}, for which the cache "
                "has room, or -1 for a token that is not kept"
            )
        if slot >= 0 and found.setdefault(slot, token) != token:
            raise ValueError(
                f"rope_cache: tokens {found[slot]} and {token} have the same slot, {slot}; allowed: one token for each"
            )
