"""Gradients of attention: probabilities again from the log-sum-exp; one launch by queries, one by keys and values.

No atomics: a program owns the rows that it writes. That by keys and values walks through all heads of a group, so that
gradients have the same bits on every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._attention import LN_2, LOG2_E, extents, seen, span, tile_at
from reference_kernels._common import INTERPRETED, jit, placed
from reference_kernels.flash_attention.call import AttentionTile, Call


def config_queries(features: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED) -> AttentionTile:
    """Tile of the gradient by queries: a block of queries stays, keys and values pass by."""
    if interpreted:
        return AttentionTile(32, 16, warps=4, stages=1)
    if dtype == torch.float32:
        size = 32 if features <= 64 else 16
        return AttentionTile(size, size, warps=4, stages=1)
    if features <= 128:
        return AttentionTile(128, 64, warps=8, stages=3 if features <= 64 else 2)
    return AttentionTile(64, 32, warps=8, stages=2)


def config_keys(features: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED) -> AttentionTile:
    """Tile of the gradients by keys and values: a block of them stays, queries pass by.

    Two sums of ``keys x features`` and two products of ``keys x queries`` are in registers at once: with 64 queries at
    128 features 360 bytes of them spill, with 32 it is 24 (bfloat16, cuobjdump, sm_90).
    """
    if interpreted:
        return AttentionTile(16, 32, warps=4, stages=1)
    if dtype == torch.float32:
        size = 32 if features <= 64 else 16
        return AttentionTile(size, size, warps=4 if features <= 128 else 8, stages=1)
    if features <= 128:
        return AttentionTile(64 if features <= 64 else 32, 128, warps=8, stages=3)
    return AttentionTile(32, 32, warps=8, stages=2)


@jit
def _delta_kernel(
    delta_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    dlse_ptr: tl.tensor,
    dout_batch: tl.tensor,
    dout_row: tl.tensor,
    dout_head: tl.tensor,
    dout_step: tl.tensor,
    dlse_batch: tl.tensor,
    dlse_head: tl.tensor,
    dlse_step: tl.tensor,
    blocks: tl.tensor,
    heads: tl.tensor,
    rows: tl.tensor,
    features: tl.tensor,
    HAS_REST: tl.constexpr,
    HAS_DOUT: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> None:
    """What a row's gradients by scores have in common, ``sum(dout * out) - dlse``, as ``(batch, heads, rows)``.

    ``out`` with what its rounding lost: else the error of ``delta`` is as large as that of all products together where
    one weight is near 1 and the gradient near 0 (Qiu and Yao, arXiv 2510.04212, trace diverging trainings to it).
    """
    program = tl.program_id(0)
    head = (program // blocks % heads).to(tl.int64)
    batch = (program // blocks // heads).to(tl.int64)
    row = (program % blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    delta = tl.zeros([BLOCK_ROWS], tl.float32)
    if HAS_DOUT:
        column = tl.arange(0, BLOCK_FEATURES)
        inside = (row < rows)[:, None] & (column < features)[None, :]
        at = ((batch * rows + row) * heads + head)[:, None] * features + column[None, :]
        out = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_REST:
            out += tl.load(rest_ptr + at, mask=inside, other=0.0).to(tl.float32)
        at = (batch * dout_batch + row * dout_row + head * dout_head)[:, None] + (column * dout_step)[None, :]
        delta += tl.sum(out * tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32), axis=1)
    if HAS_DLSE:
        at = batch * dlse_batch + head * dlse_head + row * dlse_step
        delta -= tl.load(dlse_ptr + at, mask=row < rows, other=0.0)
    tl.store(delta_ptr + (batch * heads + head) * rows + row, delta, mask=row < rows)


@jit
def _sums_of(lse_ptr: tl.tensor, row: tl.tensor, rows: tl.tensor) -> tl.tensor:
    """Log-sum-exps to base 2; ``+inf``, which makes probabilities 0, for queries that saw no key and for none."""
    lse = tl.load(lse_ptr + row, mask=row < rows, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@jit
def _by_query(
    dq: tl.tensor,
    query: tl.tensor,
    dout: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    k_base: tl.tensor,
    v_base: tl.tensor,
    position: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    keys: tl.tensor,
    features: tl.tensor,
    factor: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    k_row: tl.tensor,
    k_step: tl.tensor,
    v_row: tl.tensor,
    v_step: tl.tensor,
    MASKED: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> tl.tensor:
    """What the keys from ``begin`` to ``end`` add to the gradient by a block of queries."""
    column = tl.arange(0, BLOCK_FEATURES)
    for first in range(begin, end, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        k = tile_at(k_base, key, keys, k_row, column, features, k_step, MASKED, WHOLE)
        v = tile_at(v_base, key, keys, v_row, column, features, v_step, MASKED, WHOLE)
        exponent = tl.dot(query, tl.trans(k), input_precision="ieee") * factor - lse[:, None]
        if MASKED:
            met = seen(position, key, keys, before, after, HAS_BEFORE, HAS_AFTER)
            exponent = tl.where(met, exponent, float("-inf"))
        slope = tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None]
        dq = tl.dot((tl.exp2(exponent) * slope).to(k.dtype), k, dq, input_precision="ieee")
    return dq


@jit
def _by_key(
    dk: tl.tensor,
    dv: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    q_base: tl.tensor,
    dout_base: tl.tensor,
    lse_base: tl.tensor,
    delta_base: tl.tensor,
    position: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    queries: tl.tensor,
    features: tl.tensor,
    factor: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    q_row: tl.tensor,
    q_step: tl.tensor,
    dout_row: tl.tensor,
    dout_step: tl.tensor,
    MASKED: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What the queries from ``begin`` to ``end`` of one head add to the gradients by a block of keys and values.

    Everything is transposed: keys down, queries across. ``position`` is that of a key among the queries. Rows past the
    last query are loaded as 0 with weights of 0, and need no mask.
    """
    column = tl.arange(0, BLOCK_FEATURES)
    for first in range(begin, end, BLOCK_QUERIES):
        row = first + tl.arange(0, BLOCK_QUERIES)
        query = tile_at(q_base, row, queries, q_row, column, features, q_step, True, WHOLE)
        dout = tile_at(dout_base, row, queries, dout_row, column, features, dout_step, True, WHOLE)
        lse = _sums_of(lse_base, row, queries)
        delta = tl.load(delta_base + row, mask=row < queries, other=0.0)
        exponent = tl.dot(k, tl.trans(query), input_precision="ieee") * factor - lse[None, :]
        if MASKED:
            met = seen(position, row, queries, after, before, HAS_AFTER, HAS_BEFORE)
            exponent = tl.where(met, exponent, float("-inf"))
        weight = tl.exp2(exponent)
        dv = tl.dot(weight.to(dout.dtype), dout, dv, input_precision="ieee")
        slope = tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :]
        dk = tl.dot((weight * slope).to(query.dtype), query, dk, input_precision="ieee")
    return dk, dv


@jit
def _queries_kernel(
    dq_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    dout_batch: tl.tensor,
    dout_row: tl.tensor,
    dout_head: tl.tensor,
    dout_step: tl.tensor,
    q_batch: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    q_step: tl.tensor,
    k_batch: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    k_step: tl.tensor,
    v_batch: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    v_step: tl.tensor,
    offsets_ptr: tl.tensor,
    k_offsets_ptr: tl.tensor,
    sequences: tl.tensor,
    blocks: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    rows: tl.tensor,
    key_rows: tl.tensor,
    features: tl.tensor,
    factor: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    PACKED: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> None:
    """The gradient by one block of queries of one head, contiguous ``(batch, rows, heads, features)``."""
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    head = (program // blocks % heads).to(tl.int64)
    batch = (program // blocks // heads).to(tl.int64)
    block, start, queries, key_start, keys = extents(
        block, offsets_ptr, k_offsets_ptr, sequences, rows, key_rows, PACKED, BLOCK_QUERIES
    )
    if block * BLOCK_QUERIES >= queries:
        return
    shift = keys - queries
    row = block * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    column = tl.arange(0, BLOCK_FEATURES)
    q_base = q_ptr + batch * q_batch + start.to(tl.int64) * q_row + head * q_head
    dout_base = dout_ptr + batch * dout_batch + start.to(tl.int64) * dout_row + head * dout_head
    k_base = k_ptr + batch * k_batch + key_start.to(tl.int64) * k_row + head // group * k_head
    v_base = v_ptr + batch * v_batch + key_start.to(tl.int64) * v_row + head // group * v_head
    of_rows = (batch * heads + head) * rows + start
    query = tile_at(q_base, row, queries, q_row, column, features, q_step, True, WHOLE)
    dout = tile_at(dout_base, row, queries, dout_row, column, features, dout_step, True, WHOLE)
    lse = _sums_of(lse_ptr + of_rows, row, queries)
    delta = tl.load(delta_ptr + of_rows + row, mask=row < queries, other=0.0)

    begin, whole, broken, end = span(
        block * BLOCK_QUERIES, shift, keys, before, after, HAS_BEFORE, HAS_AFTER, BLOCK_QUERIES, BLOCK_KEYS
    )
    dq = tl.zeros([BLOCK_QUERIES, BLOCK_FEATURES], tl.float32)
    if HAS_BEFORE:
        dq = _by_query(
            dq, query, dout, lse, delta, k_base, v_base, row + shift, begin, tl.minimum(whole, end), keys, features,
            factor, before, after, k_row, k_step, v_row, v_step,
            True, HAS_BEFORE, HAS_AFTER, WHOLE, BLOCK_KEYS, BLOCK_FEATURES,
        )  # fmt: skip
    dq = _by_query(
        dq, query, dout, lse, delta, k_base, v_base, row + shift, whole, broken, keys, features,
        factor, before, after, k_row, k_step, v_row, v_step,
        False, HAS_BEFORE, HAS_AFTER, WHOLE, BLOCK_KEYS, BLOCK_FEATURES,
    )  # fmt: skip
    dq = _by_query(
        dq, query, dout, lse, delta, k_base, v_base, row + shift, broken, end, keys, features,
        factor, before, after, k_row, k_step, v_row, v_step,
        True, HAS_BEFORE, HAS_AFTER, WHOLE, BLOCK_KEYS, BLOCK_FEATURES,
    )  # fmt: skip
    at = ((batch * rows + start + row) * heads + head)[:, None] * features + column[None, :]
    tl.store(dq_ptr + at, dq * (factor * LN_2), mask=(row < queries)[:, None] & (column < features)[None, :])


@jit
def _keys_kernel(
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    dout_batch: tl.tensor,
    dout_row: tl.tensor,
    dout_head: tl.tensor,
    dout_step: tl.tensor,
    q_batch: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    q_step: tl.tensor,
    k_batch: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    k_step: tl.tensor,
    v_batch: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    v_step: tl.tensor,
    offsets_ptr: tl.tensor,
    k_offsets_ptr: tl.tensor,
    sequences: tl.tensor,
    blocks: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    rows: tl.tensor,
    key_rows: tl.tensor,
    features: tl.tensor,
    factor: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    PACKED: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> None:
    """The gradients by one block of keys and values of one head, contiguous ``(batch, key_rows, kv_heads, features)``.
    First blocks first: with a causal mask they take longest."""
    program = tl.program_id(0)
    kv_heads = heads // group
    block = program % blocks
    kv_head = (program // blocks % kv_heads).to(tl.int64)
    batch = (program // blocks // kv_heads).to(tl.int64)
    block, key_start, keys, start, queries = extents(
        block, k_offsets_ptr, offsets_ptr, sequences, key_rows, rows, PACKED, BLOCK_KEYS
    )
    if block * BLOCK_KEYS >= keys:
        return
    shift = queries - keys
    key = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    column = tl.arange(0, BLOCK_FEATURES)
    k_base = k_ptr + batch * k_batch + key_start.to(tl.int64) * k_row + kv_head * k_head
    v_base = v_ptr + batch * v_batch + key_start.to(tl.int64) * v_row + kv_head * v_head
    k = tile_at(k_base, key, keys, k_row, column, features, k_step, True, WHOLE)
    v = tile_at(v_base, key, keys, v_row, column, features, v_step, True, WHOLE)

    # A query sees so far before itself as a key is seen by queries after it.
    begin, whole, _, end = span(
        block * BLOCK_KEYS, shift, queries, after, before, HAS_AFTER, HAS_BEFORE, BLOCK_KEYS, BLOCK_QUERIES
    )
    if HAS_BEFORE:
        whole = end  # one loop, always masked: a second one spills some 300 bytes of registers (128 features, sm_90)
    dk = tl.zeros([BLOCK_KEYS, BLOCK_FEATURES], tl.float32)
    dv = tl.zeros([BLOCK_KEYS, BLOCK_FEATURES], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        q_base = q_ptr + batch * q_batch + start.to(tl.int64) * q_row + head * q_head
        dout_base = dout_ptr + batch * dout_batch + start.to(tl.int64) * dout_row + head * dout_head
        of_rows = (batch * heads + head) * rows + start
        if HAS_AFTER:
            dk, dv = _by_key(
                dk, dv, k, v, q_base, dout_base, lse_ptr + of_rows, delta_ptr + of_rows, key + shift,
                begin, tl.minimum(whole, end), queries, features,
                factor, before, after, q_row, q_step, dout_row, dout_step,
                True, HAS_BEFORE, HAS_AFTER, WHOLE, BLOCK_QUERIES, BLOCK_FEATURES,
            )  # fmt: skip
        if not HAS_BEFORE:
            dk, dv = _by_key(
                dk, dv, k, v, q_base, dout_base, lse_ptr + of_rows, delta_ptr + of_rows, key + shift,
                whole, end, queries, features,
                factor, before, after, q_row, q_step, dout_row, dout_step,
                False, HAS_BEFORE, HAS_AFTER, WHOLE, BLOCK_QUERIES, BLOCK_FEATURES,
            )  # fmt: skip
    at = ((batch * key_rows + key_start + key) * kv_heads + kv_head)[:, None] * features + column[None, :]
    inside = (key < keys)[:, None] & (column < features)[None, :]
    tl.store(dk_ptr + at, dk * (factor * LN_2), mask=inside)
    tl.store(dv_ptr + at, dv, mask=inside)


def gradients(
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    call: Call,
) -> None:
    """Fill ``found``, contiguous gradients by ``q``, ``k`` and ``v``, those without elements excepted.

    ``dout`` and ``dlse`` have any strides; at least one of them is there. ``results`` are
    what forward returned.
    """
    dq, dk, dv = found
    out, lse, rest = results
    if not (call.q.numel() and call.k.numel()):
        for each in found:
            each.zero_()
        return
    batch, rows, heads, features = call.q.shape
    shared = call.arguments()
    if dout is None:
        dout = out.new_zeros(()).expand(out.shape)
        has_dout = False
    else:
        has_dout = True
    if call.offsets is not None:
        dout, dlse = dout.unsqueeze(0), None if dlse is None else dlse.unsqueeze(0)
    delta = torch.empty_like(lse)
    with placed(out.device):
        block = 64
        blocks = triton.cdiv(rows, block)
        _delta_kernel[(blocks * heads * batch,)](
            delta,
            out,
            rest,
            dout,
            lse if dlse is None else dlse,
            *dout.stride(),
            *((0, 0, 0) if dlse is None else dlse.stride()),
            blocks=blocks,
            heads=heads,
            rows=rows,
            features=features,
            HAS_REST=rest.numel() > 0,
            HAS_DOUT=has_dout,
            HAS_DLSE=dlse is not None,
            BLOCK_ROWS=block,
            BLOCK_FEATURES=shared["BLOCK_FEATURES"],
        )
        inputs = (lse, delta, dout, call.q, call.k, call.v, *dout.stride(), *call.strides())
        if dq.numel():
            tile = config_queries(features, dq.dtype)
            blocks = call.blocks(rows, tile.queries)
            _launch(_queries_kernel, blocks * heads * batch, tile, (dq, *inputs), shared, blocks)
        if dk.numel():
            tile = config_keys(features, dk.dtype)
            blocks = call.blocks(call.k.shape[1], tile.keys)
            _launch(_keys_kernel, blocks * dk.shape[-2] * batch, tile, (dk, dv, *inputs), shared, blocks)


def _launch(
    kernel: Any, programs: int, tile: AttentionTile, arguments: tuple[Any, ...], shared: dict[str, Any], blocks: int
) -> None:
    kernel[(programs,)](
        *arguments,
        blocks=blocks,
        **shared,
        BLOCK_QUERIES=tile.queries,
        BLOCK_KEYS=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
