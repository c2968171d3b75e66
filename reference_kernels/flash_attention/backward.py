"""Gradients of attention: probabilities again from the log-sum-exp; one launch by queries, one by keys and values.

No atomics: a program owns the rows that it writes. That by keys and values walks through all heads of a group, so that
gradients have the same bits on every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from reference_kernels._attention import LN_2, LOG2_E, extents, seen, span, tile_at
from reference_kernels._common import INTERPRETED, jit, placed
from reference_kernels.flash_attention.call import AttentionTile, Call, described, engine


def config_queries(features: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED) -> AttentionTile:
    """Tile of the gradient by queries: a block of queries stays, keys and values pass by."""
    if interpreted:
        return AttentionTile(32, 16, warps=4, stages=1)
    if dtype == torch.float32:
        size = 32 if features <= 64 else 16
        return AttentionTile(size, size, warps=4, stages=1)
    if features <= 128:
        return AttentionTile(128, 64, warps=8, stages=3)
    return AttentionTile(64, 32, warps=8, stages=2)


def config_keys(
    features: int, dtype: torch.dtype, described: bool = True, *, interpreted: bool = INTERPRETED
) -> AttentionTile:
    """Tile of the gradients by keys and values: a block of them stays, queries pass by.

    Two sums of ``keys x features`` and two products of ``keys x queries`` are in registers at once, which leaves none
    to compute addresses with.
    """
    if interpreted:
        return AttentionTile(16, 32, warps=4, stages=1)
    if dtype == torch.float32:
        size = 32 if features <= 64 else 16
        return AttentionTile(size, size, warps=4 if 64 < features <= 128 else 8, stages=1)
    if features <= 64:
        return AttentionTile(64, 64, warps=4, stages=3) if described else AttentionTile(64, 128, warps=8, stages=3)
    if features <= 128:
        return AttentionTile(64 if described else 32, 64, warps=4, stages=2)
    return AttentionTile(64, 64, warps=8, stages=2) if described else AttentionTile(32, 32, warps=8, stages=2)


@jit
def _rows_kernel(
    sums_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    sums_row: tl.tensor,
    lse_ptr: tl.tensor,
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
    """What a row's gradients by scores have in common, as ``(batch, heads, rows)``: log-sum-exps to base 2, ``+inf``,
    which makes probabilities 0, for a query that saw no key; and ``sum(dout * out) - dlse``. Up to the ``sums_row`` of
    them that a descriptor reads, past the last row 0: a weight of 0 times what was left in memory may be NaN.

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
    lse = tl.load(lse_ptr + (batch * heads + head) * rows + row, mask=row < rows, other=0.0)
    at = (batch * heads + head) * sums_row + row
    tl.store(delta_ptr + at, delta, mask=row < sums_row)
    tl.store(sums_ptr + at, tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E), mask=row < sums_row)


@jit
def _queries_kernel(
    dq_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    sums_row: tl.tensor,
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
    DESCRIBED: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> None:
    """The gradient by one block of queries of one head, contiguous ``(batch, rows, heads, features)``."""
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    block = blocks - 1 - program // heads % blocks
    batch = (program // heads // blocks).to(tl.int64)
    block, start, queries, key_start, keys = extents(
        block, offsets_ptr, k_offsets_ptr, sequences, rows, key_rows, PACKED, BLOCK_QUERIES
    )
    if block * BLOCK_QUERIES >= queries:
        return
    shift = keys - queries
    row = block * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    column = tl.arange(0, BLOCK_FEATURES)
    kv_head = (head // group).to(tl.int32)
    q_base = q_ptr + batch * q_batch + start.to(tl.int64) * q_row + head * q_head
    dout_base = dout_ptr + batch * dout_batch + start.to(tl.int64) * dout_row + head * dout_head
    query = tile_at(q_base, row, queries, q_row, column, features, q_step, WHOLE)
    dout = tile_at(dout_base, row, queries, dout_row, column, features, dout_step, WHOLE)
    if not DESCRIBED:
        k_base = k_ptr + batch * k_batch + key_start.to(tl.int64) * k_row + head // group * k_head
        v_base = v_ptr + batch * v_batch + key_start.to(tl.int64) * v_row + head // group * v_head
    of_rows = (batch * heads + head) * sums_row + start
    lse = tl.load(sums_ptr + of_rows + row, mask=row < queries, other=float("inf"))
    delta = tl.load(delta_ptr + of_rows + row, mask=row < queries, other=0.0)

    begin, whole, broken, end = span(
        block * BLOCK_QUERIES, shift, keys, before, after, HAS_BEFORE, HAS_AFTER, BLOCK_QUERIES, BLOCK_KEYS
    )
    dq = tl.zeros([BLOCK_QUERIES, BLOCK_FEATURES], tl.float32)
    for first in range(begin, end, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        if DESCRIBED:
            k = k_ptr.load([batch.to(tl.int32), first, kv_head, 0]).reshape(BLOCK_KEYS, BLOCK_FEATURES)
            v = v_ptr.load([batch.to(tl.int32), first, kv_head, 0]).reshape(BLOCK_KEYS, BLOCK_FEATURES)
        else:
            k = tile_at(k_base, key, keys, k_row, column, features, k_step, WHOLE)
            v = tile_at(v_base, key, keys, v_row, column, features, v_step, WHOLE)
        exponent = tl.dot(query, tl.trans(k), input_precision="ieee") * factor - lse[:, None]
        if (first < whole) | (first >= broken):
            met = seen(row + shift, key, keys, before, after, HAS_BEFORE, HAS_AFTER)
            exponent = tl.where(met, exponent, float("-inf"))
        slope = tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None]
        dq = tl.dot((tl.exp2(exponent) * slope).to(k.dtype), k, dq, input_precision="ieee")
    at = ((batch * rows + start + row) * heads + head)[:, None] * features + column[None, :]
    tl.store(dq_ptr + at, dq * (factor * LN_2), mask=(row < queries)[:, None] & (column < features)[None, :])


@jit
def _keys_kernel(
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    sums_row: tl.tensor,
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
    DESCRIBED: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> None:
    """The gradients by one block of keys and values of one head, contiguous ``(batch, key_rows, kv_heads, features)``.
    First blocks first: with a causal mask they take longest."""
    program = tl.program_id(0)
    kv_heads = heads // group
    kv_head = (program % kv_heads).to(tl.int64)
    block = program // kv_heads % blocks
    batch = (program // kv_heads // blocks).to(tl.int64)
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
    k = tile_at(k_base, key, keys, k_row, column, features, k_step, WHOLE)
    v = tile_at(v_base, key, keys, v_row, column, features, v_step, WHOLE)

    # A query sees so far before itself as a key is seen by queries after it.
    begin, whole, broken, end = span(
        block * BLOCK_KEYS, shift, queries, after, before, HAS_AFTER, HAS_BEFORE, BLOCK_KEYS, BLOCK_QUERIES
    )
    dk = tl.zeros([BLOCK_KEYS, BLOCK_FEATURES], tl.float32)
    dv = tl.zeros([BLOCK_KEYS, BLOCK_FEATURES], tl.float32)
    steps = tl.maximum(end - begin + BLOCK_QUERIES - 1, 0) // BLOCK_QUERIES
    # Triton pipelines the loop: it divides for the first steps before it asks whether there are any. Of a division by 0
    # LLVM concludes that there are, and 1 query beside 20,000 keys brought tiles for blocks that none meets; they came
    # late, into the memory by which some block stored its zeros (Triton 3.6.0 and 3.7.1).
    per_head = tl.maximum(steps, 1)
    for step in range(group * steps):
        head = kv_head * group + step // per_head
        first = begin + step % per_head * BLOCK_QUERIES
        row = first + tl.arange(0, BLOCK_QUERIES)
        if DESCRIBED:
            at = batch.to(tl.int32), first, head.to(tl.int32), 0
            query = q_ptr.load(at).reshape(BLOCK_QUERIES, BLOCK_FEATURES)
            dout = dout_ptr.load(at).reshape(BLOCK_QUERIES, BLOCK_FEATURES)
            # Rows past the last query are 0 as well: their weights of 1 meet gradients of 0.
            place = (batch * heads + head).to(tl.int32)
            lse = sums_ptr.load([place, first]).reshape(BLOCK_QUERIES)
            delta = delta_ptr.load([place, first]).reshape(BLOCK_QUERIES)
        else:
            q_base = q_ptr + batch * q_batch + start.to(tl.int64) * q_row + head * q_head
            dout_base = dout_ptr + batch * dout_batch + start.to(tl.int64) * dout_row + head * dout_head
            query = tile_at(q_base, row, queries, q_row, column, features, q_step, WHOLE)
            dout = tile_at(dout_base, row, queries, dout_row, column, features, dout_step, WHOLE)
            of_rows = (batch * heads + head) * sums_row + start
            lse = tl.load(sums_ptr + of_rows + row, mask=row < queries, other=float("inf"))
            delta = tl.load(delta_ptr + of_rows + row, mask=row < queries, other=0.0)
        exponent = tl.dot(k, tl.trans(query), input_precision="ieee")
        slope = tl.dot(v, tl.trans(dout), input_precision="ieee")
        exponent = exponent * factor - lse[None, :]
        if (first < whole) | (first >= broken):
            met = seen(key + shift, row, queries, after, before, HAS_AFTER, HAS_BEFORE)
            exponent = tl.where(met, exponent, float("-inf"))
        weight = tl.exp2(exponent)
        dv = tl.dot(weight.to(dout.dtype), dout, dv, input_precision="ieee")
        dk = tl.dot((weight * (slope - delta[None, :])).to(query.dtype), query, dk, input_precision="ieee")
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
    # Steps of 16 bytes, as descriptors ask for.
    sums, delta = lse.new_empty(2, batch * heads, triton.cdiv(rows, 4) * 4)
    known = sums, delta, sums.stride(0)
    with placed(out.device):
        block = 32
        blocks = triton.cdiv(rows, block)
        _rows_kernel[(blocks * heads * batch,)](
            *known,
            lse,
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
        strides = (*dout.stride(), *call.strides())
        if dq.numel():
            by_engine = engine(call, call.k, call.v)
            tile = config_queries(features, dq.dtype)
            blocks = call.blocks(rows, tile.queries)
            k, v = (described(each, tile.keys) if by_engine else each for each in (call.k, call.v))
            inputs = (*known, dout, call.q, k, v, *strides)
            _launch(
                _queries_kernel, blocks * heads * batch, tile, (dq, *inputs), shared | {"DESCRIBED": by_engine}, blocks
            )
        if dk.numel():
            by_engine = engine(call, call.q, dout)
            tile = config_keys(features, dk.dtype, by_engine)
            blocks = call.blocks(call.k.shape[1], tile.keys)
            q = call.q
            if by_engine:
                q, dout = (described(each, tile.queries) for each in (q, dout))
                sums, delta = (
                    TensorDescriptor(each, list(each.shape), list(each.stride()), [1, tile.queries])
                    for each in (sums, delta)
                )
            inputs = (sums, delta, known[2], dout, q, call.k, call.v, *strides)
            _launch(
                _keys_kernel,
                blocks * dk.shape[-2] * batch,
                tile,
                (dk, dv, *inputs),
                shared | {"DESCRIBED": by_engine},
                blocks,
            )


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
