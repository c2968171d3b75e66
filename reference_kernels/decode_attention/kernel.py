"""Fused decoding attention: one query a sequence over a cache of keys and values, in chunks that run in parallel."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from reference_kernels._attention import (
    LN_2,
    LOG2_E,
    attended,
    check_features,
    check_groups,
    check_window,
    finished,
    padded,
    readable,
    scale_of,
)
from reference_kernels._common import FLOATS, INTERPRETED, check_tensor, jit, placed

INDICES = (torch.int32, torch.int64)
FLOAT8 = torch.float8_e4m3fn
MOST_CHUNKS = 32
MOST_HEADS = 64  # of a group in one program


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Keys of a tile and query heads that share it (powers of two, at least 16), warps and pipeline stages; and how
    many keys a program walks through, a multiple of ``keys``."""

    keys: int
    heads: int
    chunk: int
    warps: int
    stages: int


def config(
    group: int,
    features: int,
    capacity: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    *,
    interpreted: bool = INTERPRETED,
) -> DecodeTile:
    """Tile for ``group`` query heads of ``dtype`` on each head of a cache of dtype ``cache`` with room for ``capacity``
    keys.

    Two warps for 16 heads: more of them wait for each other's parts of a sum. A chunk depends on the capacity alone,
    never on how many sequences there are or whether they lie in pages, so that neither does a result: what leaves 32 of
    them to combine, at least 1024 keys, or of one byte 2048, whose sums cost 0.8 % of their bytes.
    """
    heads = min(MOST_HEADS, padded(group))
    if interpreted:
        return DecodeTile(16, heads, 32, warps=4, stages=1)
    chunk = max(2048 // cache.itemsize, triton.cdiv(triton.cdiv(capacity, MOST_CHUNKS), 128) * 128)
    if dtype == torch.float32:  # on the ordinary cores, where registers bound the tile
        return DecodeTile(16, min(heads, 16), chunk, warps=4, stages=2)
    keys = max(16, min(128, 8192 // padded(features)))
    return DecodeTile(keys, heads, chunk, warps=2 if heads == 16 else 4, stages=3)


@jit
def _halved(query: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Rows of float32 as float16 below 4 times a power of two each, which is what bfloat16 needs to fit."""
    bits = tl.max(tl.abs(query), axis=1).to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return (query * inverse[:, None]).to(tl.float16), bits.to(tl.float32, bitcast=True)


@jit
def _decode_kernel(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    table_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    q_step: tl.tensor,
    k_block: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    k_step: tl.tensor,
    v_block: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    v_step: tl.tensor,
    lengths_step: tl.tensor,
    table_row: tl.tensor,
    table_step: tl.tensor,
    k_scale_step: tl.tensor,
    v_scale_step: tl.tensor,
    splits: tl.tensor,
    parts: tl.tensor,
    kv_heads: tl.tensor,
    group: tl.tensor,
    features: tl.tensor,
    capacity: tl.tensor,
    pages: tl.tensor,
    window: tl.tensor,
    factor: tl.tensor,
    SPLIT: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HALF: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> None:
    """One chunk of one sequence's keys for the queries of a group. ``SPLIT``: its mean and its log-sum-exp to base 2 in
    float32, ``(batch, heads, splits, features)`` and ``(batch, heads, splits)``; else the results themselves. ``PAGE``
    is the size of a page, 0 where the cache has none."""
    program = tl.program_id(0)
    split = program % splits
    part = program // splits % parts
    kv_head = (program // splits // parts % kv_heads).to(tl.int64)
    batch = (program // splits // parts // kv_heads).to(tl.int64)
    length = tl.load(lengths_ptr + batch * lengths_step)
    length = tl.minimum(tl.maximum(length, 0), capacity).to(tl.int32)
    seen = length * 0
    if HAS_WINDOW:
        seen = tl.maximum(length - window, 0)
    chunk = seen // CHUNK + split
    begin = tl.maximum(seen // BLOCK_KEYS * BLOCK_KEYS, chunk * CHUNK)
    end = tl.minimum(length, (chunk + 1) * CHUNK)

    member = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head = kv_head * group + member
    column = tl.arange(0, BLOCK_FEATURES)
    inside = (member < group)[:, None] & (column < features)[None, :]
    at = (batch * q_batch + head * q_head)[:, None] + (column * q_step)[None, :]
    query = tl.load(q_ptr + at, mask=inside, other=0.0)
    unit = tl.full([BLOCK_HEADS], 1.0, tl.float32)
    if HALF:
        query, unit = _halved(query.to(tl.float32))
    if HAS_K_SCALE:
        unit *= tl.load(k_scale_ptr + kv_head * k_scale_step)
    mixed = tl.zeros([BLOCK_HEADS, BLOCK_FEATURES], tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    top = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    for first in range(begin, end, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        counts = (key >= seen) & (key < end)
        if PAGE > 0:
            page = tl.load(table_ptr + batch * table_row + key // PAGE * table_step, mask=counts, other=0).to(tl.int64)
            known = counts & (page >= 0) & (page < pages)
            k_at = page * k_block + (key % PAGE).to(tl.int64) * k_row
            v_at = page * v_block + (key % PAGE).to(tl.int64) * v_row
        else:
            known = counts
            k_at = batch * k_block + key.to(tl.int64) * k_row
            v_at = batch * v_block + key.to(tl.int64) * v_row
        wanted = known[:, None] & (column < features)[None, :]
        k_at = (k_at + kv_head * k_head)[:, None] + (column * k_step)[None, :]
        v_at = (v_at + kv_head * v_head)[:, None] + (column * v_step)[None, :]
        k = tl.load(k_ptr + k_at, mask=wanted, other=0.0).to(query.dtype)
        v = tl.load(v_ptr + v_at, mask=wanted, other=0.0).to(query.dtype)
        products = tl.dot(query, tl.trans(k), input_precision="ieee")
        if HALF or HAS_K_SCALE:
            products *= unit[:, None]
        if PAGE > 0:  # one that does not exist makes the sequence NaN
            products = tl.where(known[None, :], products, float("nan"))
        products = tl.where(counts[None, :], products, float("-inf"))
        mixed, total, top = attended(products, factor, v, mixed, total, top, q_ptr.dtype.element_ty)

    mixed, log_total = finished(mixed, total, top)
    if HAS_V_SCALE:
        mixed = mixed * tl.load(v_scale_ptr + kv_head * v_scale_step)
    row = batch * (kv_heads * group) + head
    if SPLIT:
        row = row * splits + split
        inside = inside & (begin < end)  # what a chunk without keys leaves unwritten is not read
        tl.store(lse_ptr + row, log_total, mask=member < group)
    else:
        tl.store(lse_ptr + row, log_total * LN_2, mask=member < group)
    tl.store(out_ptr + row[:, None] * features + column[None, :], mixed, mask=inside)


@jit
def _combine_kernel(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    means_ptr: tl.tensor,
    logs_ptr: tl.tensor,
    splits: tl.tensor,
    features: tl.tensor,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> None:
    """The chunks of one head of one sequence, weighted by their sums of exponentials."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    logs = tl.load(logs_ptr + head * splits + split, mask=split < splits, other=float("-inf"))
    top = tl.max(logs, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(logs - shift), axis=0)
    column = tl.arange(0, BLOCK_FEATURES)
    mixed = tl.zeros([BLOCK_FEATURES], tl.float32)
    for first in range(0, splits, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        log = tl.load(logs_ptr + head * splits + row, mask=row < splits, other=float("-inf"))
        inside = (log > float("-inf"))[:, None] & (column < features)[None, :]
        at = (head * splits + row)[:, None] * features + column[None, :]
        means = tl.load(means_ptr + at, mask=inside, other=0.0)
        mixed += tl.sum(means * tl.exp2(log - shift)[:, None], axis=0)
    empty = total == 0.0
    mixed = mixed / tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
    tl.store(out_ptr + head * features + column, mixed, mask=column < features)
    tl.store(lse_ptr + head, lse)


def _results(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


@torch.library.custom_op("reference_kernels::decode_attention", mutates_args=())
def _decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None,
    window: int | None,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    checked: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, features = q.shape
    size = 0 if page_table is None else k_cache.shape[1]
    capacity = k_cache.shape[1] if page_table is None else page_table.shape[1] * size
    if checked:
        _check_numbers(lengths, page_table, window, capacity, k_cache.shape)
    out, lse = _results(q)
    if out.numel() == 0:
        return out, lse
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    tile = config(group, features, capacity, q.dtype, k_cache.dtype)
    far = window is None or window >= capacity
    splits = max(triton.cdiv(capacity, tile.chunk), 1)
    if not far:
        splits = min(splits, triton.cdiv(window, tile.chunk) + 1)
    parts = triton.cdiv(group, tile.heads)
    means, logs = out, lse
    if splits > 1:
        means, logs = (
            torch.empty(shape, dtype=torch.float32, device=q.device)
            for shape in ((batch, heads, splits, features), (batch, heads, splits))
        )
    wide = padded(features)
    with placed(q.device):
        _decode_kernel[(batch * kv_heads * parts * splits,)](
            means,
            logs,
            q,
            k_cache,
            v_cache,
            lengths,
            *(q if each is None else each for each in (page_table, k_scale, v_scale)),  # absent: never dereferenced
            *q.stride(),
            *k_cache.stride(),
            *v_cache.stride(),
            lengths.stride(0),
            *((0, 0) if page_table is None else page_table.stride()),
            *(0 if each is None else each.stride(0) for each in (k_scale, v_scale)),
            splits,
            parts,
            kv_heads,
            group,
            features,
            capacity,
            k_cache.shape[0],
            0 if far else window,
            scale * LOG2_E.value,
            SPLIT=splits > 1,
            PAGE=size,
            HAS_WINDOW=not far,
            HAS_K_SCALE=k_scale is not None,
            HAS_V_SCALE=v_scale is not None,
            HALF=k_cache.dtype == FLOAT8 and q.dtype != torch.float32,
            CHUNK=tile.chunk,
            BLOCK_HEADS=tile.heads,
            BLOCK_KEYS=tile.keys,
            BLOCK_FEATURES=wide,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            _combine_kernel[(batch * heads,)](
                out,
                lse,
                means,
                logs,
                splits,
                features,
                BLOCK_SPLITS=triton.next_power_of_2(splits),
                BLOCK_ROWS=16,
                BLOCK_FEATURES=wide,
                num_warps=4,
            )
    return out, lse


@_decode_attention.register_fake
def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _results(q)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    checked: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale * q @ k.T) @ v`` by head for one query a sequence, and its log-sum-exp: of ``q``'s shape and
    dtype, and float32 ``(batch, heads)``.

    ``q`` is ``(batch, heads, features)`` in float32, float16 or bfloat16; the caches, of its dtype or float8_e4m3fn,
    are ``(batch, capacity, kv_heads, features)`` or, with an int32 or int64 ``page_table`` ``(batch, most)``,
    ``(pages, page_size, kv_heads, features)``; ``lengths`` ``(batch,)`` are int32 or int64, ``k_scale`` and ``v_scale``
    ``(kv_heads,)`` float32. Any strides; 1 to 256 features. What they mean, and what becomes of a sequence without
    keys, says `decode_attention_reference`. No gradients.

    ``checked`` lengths and pages are read back before the launch, which on a CUDA device waits for it. Unchecked ones
    reach no memory outside the caches: lengths are kept from 0 to the capacity, and a page that does not exist makes
    its sequence NaN. Raises `TypeError` for other or mixed dtypes; `ValueError` for shapes that do not fit, options,
    lengths or pages out of range, or mixed devices.
    """
    name = "decode_attention"
    check_tensor(name, "q", q, q, FLOATS)
    check_tensor(name, "k_cache", k_cache, q, (q.dtype, FLOAT8))
    check_tensor(name, "v_cache", v_cache, q, (k_cache.dtype,))
    check_tensor(name, "lengths", lengths, q, INDICES)
    for label, each, dtypes in (
        ("page_table", page_table, INDICES),
        ("k_scale", k_scale, (torch.float32,)),
        ("v_scale", v_scale, (torch.float32,)),
    ):
        if each is not None:
            check_tensor(name, label, each, q, dtypes)
    _check_shapes(q, k_cache, v_cache, lengths, page_table, k_scale, v_scale)
    check_features(name, q.shape[2])
    check_groups(name, q.shape[1], k_cache.shape[2])
    check_window(name, window)
    wanted = scale_of(name, scale, q.shape[2])
    out, lse = _decode_attention(q, k_cache, v_cache, lengths, page_table, window, wanted, k_scale, v_scale, checked)
    return out, lse


def _check_shapes(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    leading = "(batch, capacity" if page_table is None else "(pages, page_size"
    shapes = f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}"
    wanted = f"q is (batch, heads, features), both caches are {leading}, kv_heads, features)"
    if q.ndim != 3 or k_cache.ndim != 4 or k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"decode_attention: {shapes} do not fit; {wanted}")
    if page_table is None and k_cache.shape[0] != q.shape[0]:
        raise ValueError(f"decode_attention: {shapes} do not fit; {wanted}, of one batch unless there is a page_table")
    heads = k_cache.shape[2:3]
    for name, each, shape in (
        ("lengths", lengths, q.shape[:1]),
        ("page_table", page_table, None if page_table is None else (q.shape[0], *page_table.shape[1:])),
        ("k_scale", k_scale, heads),
        ("v_scale", v_scale, heads),
    ):
        if each is not None and (each.shape != shape or each.ndim != (2 if name == "page_table" else 1)):
            allowed = f"({q.shape[0]}, most)" if name == "page_table" else tuple(shape or ())
            raise ValueError(f"decode_attention: {name} has shape {tuple(each.shape)}, allowed: {allowed}")
    if page_table is not None and k_cache.shape[1] == 0:
        raise ValueError("decode_attention: pages of 0 keys; allowed: 1 and more")


def _check_numbers(
    lengths: torch.Tensor, page_table: torch.Tensor | None, window: int | None, capacity: int, cache: torch.Size
) -> None:
    """Raise `ValueError` for a length past the capacity, and for a page that does not exist among those to be read."""
    readable("decode_attention", "lengths and pages", lengths)
    found = lengths.tolist()
    for sequence, length in enumerate(found):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"decode_attention: lengths[{sequence}] is {length}, allowed: 0 to {capacity}, for which there is room"
            )
    if page_table is None:
        return
    pages, size = cache[:2]
    for sequence, (length, row) in enumerate(zip(found, page_table.tolist(), strict=True)):
        first = 0 if window is None else max(length - window, 0) // size
        for number, page in enumerate(itertools.islice(row, first, triton.cdiv(length, size)), first):
            if not 0 <= page < pages:
                raise ValueError(
                    f"decode_attention: page_table[{sequence}, {number}] is {page}, allowed: 0 to {pages - 1}, since "
                    f"the sequence has {length} keys"
                )
