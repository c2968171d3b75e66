"""Fused attention: products, mask and softmax in one launch, no score in memory; grouped heads, packed sequences."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton.language as tl

from reference_kernels._attention import (
    LN_2,
    WIDEST,
    attended,
    check_features,
    check_groups,
    check_window,
    extents,
    finished,
    readable,
    scale_of,
    seen,
    span,
    tile_at,
)
from reference_kernels._common import FLOATS, INTERPRETED, check_tensor, jit, placed
from reference_kernels.flash_attention.backward import gradients
from reference_kernels.flash_attention.call import AttentionTile, Call, described, engine

INDICES = (torch.int32, torch.int64)


def config(
    features: int, dtype: torch.dtype, described: bool = True, *, interpreted: bool = INTERPRETED
) -> AttentionTile:
    """Forward tile for heads of ``features``, padded to a power of two; it follows from the head and the layout of its
    rows alone, so that a query's result does not depend on how many others there are.

    One group of 4 warps, with 64 queries for wgmma, and two programs on a multiprocessor: while one is at its softmax
    the other multiplies. Without the copy engine threads have addresses to compute, which larger tiles have fewer of.
    256 features leave room for one program, whose two groups of warps share the keys: 2019 instead of 3762 us at
    4x4096, causal, on an H200. Where features are padded to 256 it would spill. float32 runs on the ordinary cores.
    """
    if interpreted:
        return AttentionTile(32, 16, warps=4, stages=1)
    if dtype == torch.float32:
        return AttentionTile(32, 32, warps=4, stages=2) if features <= 64 else AttentionTile(16, 16, warps=4, stages=1)
    if features > 128:
        return AttentionTile(128 if described and features == WIDEST else 64, 64, warps=8, stages=2)
    if described:
        return AttentionTile(64, 64, warps=4, stages=3)
    if features <= 32:
        # Of tiles with 64 keys and more, Triton 3.6.0 and its ptxas 12.8 make code that reads registers which nothing
        # wrote, where keys have no unit stride: the second 16 counted for nothing on an H200, or a load was illegal.
        return AttentionTile(128, 32, warps=4, stages=3)
    return AttentionTile(128, 64, warps=4, stages=3) if features <= 64 else AttentionTile(128, 128, warps=8, stages=3)


@jit
def _attention_kernel(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
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
    KEEP_REST: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    WHOLE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> None:
    """One block of queries of one head: ``out`` contiguous ``(batch, rows, heads, features)``, ``lse`` ``(batch, heads,
    rows)``, and like ``out`` what its rounding lost. Last blocks first: with a causal mask they take longest."""
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
    # Not by descriptor: with 64 features, and with tiles of 128, results were wrong then (Triton 3.6.0, H200).
    query = tile_at(q_base, row, queries, q_row, column, features, q_step, WHOLE)
    if not DESCRIBED:
        k_base = k_ptr + batch * k_batch + key_start.to(tl.int64) * k_row + head // group * k_head
        v_base = v_ptr + batch * v_batch + key_start.to(tl.int64) * v_row + head // group * v_head

    begin, whole, broken, end = span(
        block * BLOCK_QUERIES, shift, keys, before, after, HAS_BEFORE, HAS_AFTER, BLOCK_QUERIES, BLOCK_KEYS
    )
    mixed = tl.zeros([BLOCK_QUERIES, BLOCK_FEATURES], tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    top = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    for first in range(begin, end, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        if DESCRIBED:
            k = k_ptr.load([batch.to(tl.int32), first, kv_head, 0]).reshape(BLOCK_KEYS, BLOCK_FEATURES)
        else:
            k = tile_at(k_base, key, keys, k_row, column, features, k_step, WHOLE)
        products = tl.dot(query, tl.trans(k), input_precision="ieee")
        if (first < whole) | (first >= broken):
            met = seen(row + shift, key, keys, before, after, HAS_BEFORE, HAS_AFTER)
            products = tl.where(met, products, float("-inf"))
        if DESCRIBED:
            v = v_ptr.load([batch.to(tl.int32), first, kv_head, 0]).reshape(BLOCK_KEYS, BLOCK_FEATURES)
        else:
            v = tile_at(v_base, key, keys, v_row, column, features, v_step, WHOLE)
        mixed, total, top = attended(products, factor, v, mixed, total, top, v.dtype)

    mixed, log_total = finished(mixed, total, top)
    at = (((batch * rows + start + row) * heads + head) * features)[:, None]
    inside = (row < queries)[:, None]
    if not WHOLE:
        inside &= (column < features)[None, :]
    rounded = mixed.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at + column[None, :], rounded, mask=inside)
    if KEEP_REST:
        tl.store(rest_ptr + at + column[None, :], mixed - rounded.to(tl.float32), mask=inside)
    tl.store(lse_ptr + (batch * heads + head) * rows + start + row, log_total * LN_2, mask=row < queries)


def _forward(out: torch.Tensor, lse: torch.Tensor, rest: torch.Tensor, call: Call) -> None:
    """Fill ``out``, ``lse`` and, unless it has no elements, ``rest``, contiguous as `_results` makes them."""
    if out.numel() == 0:
        return
    by_engine = engine(call, call.k, call.v)
    tile = config(call.q.shape[3], call.q.dtype, by_engine)
    blocks = call.blocks(call.q.shape[1], tile.queries)
    k, v = (described(each, tile.keys) if by_engine else each for each in (call.k, call.v))
    with placed(out.device):
        _attention_kernel[(blocks * call.q.shape[2] * call.q.shape[0],)](
            out,
            lse,
            rest,
            call.q,
            k,
            v,
            *call.strides(),
            blocks=blocks,
            **call.arguments(),
            DESCRIBED=by_engine,
            KEEP_REST=rest.numel() > 0,
            BLOCK_QUERIES=tile.queries,
            BLOCK_KEYS=tile.keys,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _results(q: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *batch, rows, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((*batch, heads, rows), dtype=torch.float32, device=q.device)
    return out, lse, torch.empty(q.shape if keep else (0,), dtype=torch.bfloat16, device=q.device)


@torch.library.custom_op("reference_kernels::flash_attention", mutates_args=())
def _flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor | None,
    k_offsets: torch.Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    checked: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the log-sum-exp and, to ``keep`` for the gradient, what rounding the result lost."""
    if checked:
        for name, each, rows in (("offsets", offsets, q.shape[0]), ("k_offsets", k_offsets, k.shape[0])):
            if each is not None:
                _check_offsets(name, each, rows)
    found = _results(q, keep)
    _forward(*found, Call.of((q, k, v), offsets, k_offsets, causal, window, scale))
    return found


@_flash_attention.register_fake
def _(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _results(q, rest[-1])


@torch.library.custom_op("reference_kernels::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor | None,
    k_offsets: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    rest: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    queries: bool,
    keys: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by ``q``, by ``k`` and by ``v``; the first, or the other two, are empty where not needed."""
    found = _gradients(q, k, v, queries, keys)
    gradients(found, dout, dlse, (out, lse, rest), Call.of((q, k, v), offsets, k_offsets, causal, window, scale))
    return found


def _gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: bool, keys: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (
        torch.empty(each.shape if needed else (0,), dtype=each.dtype, device=each.device)
        for each, needed in ((q, queries), (k, keys), (v, keys))
    )
    return dq, dk, dv


@_flash_attention_backward.register_fake
def _(
    _dout: torch.Tensor | None,
    _dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _gradients(q, k, v, *rest[-2:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, offsets, k_offsets, *ctx.options, _, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # else torch fills zeros for the log-sum-exp, which most callers leave alone
    ctx.save_for_backward(q, k, v, offsets, k_offsets, *output)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: object) -> tuple[Any, ...]:
    by_q, by_k, by_v, *_ = ctx.needs_input_grad
    if dout is None and dlse is None:
        return (None,) * 10
    needed = by_q, by_k or by_v
    dq, dk, dv = _flash_attention_backward(dout, dlse, *ctx.saved_tensors, *ctx.options, *needed)
    return dq if by_q else None, dk if by_k else None, dv if by_v else None, *[None] * 7


_flash_attention.register_autograd(_differentiate, setup_context=_save)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    offsets: torch.Tensor | None = None,
    k_offsets: torch.Tensor | None = None,
    checked: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale * q @ k.T) @ v`` by head and its log-sum-exp: of ``q``'s shape and dtype, and float32.

    ``q`` is ``(batch, queries, heads, features)``, ``k`` and ``v`` ``(batch, keys, kv_heads, features)``, or packed,
    ``(total, heads, features)``, with int32 or int64 ``offsets`` ``(sequences + 1,)`` and, where keys are packed
    otherwise, ``k_offsets``. One of float32, float16 and bfloat16, any strides; 1 to 256 features. What mask, window
    and offsets mean, and what becomes of queries that see no key, says `flash_attention_reference`. Differentiable once
    by ``q``, ``k`` and ``v`` through both results, in two launches and a small one.

    On a CUDA device ``checked`` offsets are read back before the launch, which waits for the device; unchecked ones are
    only kept within the tensors. Raises `TypeError` for other or mixed dtypes; `ValueError` for shapes that do not fit,
    options out of range, offsets that do not run from 0 to the end, or mixed devices.
    """
    for name, each, dtypes in (("q", q, FLOATS), ("k", k, (q.dtype,)), ("v", v, (q.dtype,))):
        check_tensor("flash_attention", name, each, q, dtypes)
    _check_shapes(q, k, v, offsets, k_offsets)
    check_features("flash_attention", q.shape[-1])
    check_groups("flash_attention", q.shape[-2], k.shape[-2])
    check_window("flash_attention", window)
    wanted = scale_of("flash_attention", scale, q.shape[-1])
    keep = (
        q.dtype != torch.float32 and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    )
    out, lse, _ = _flash_attention(q, k, v, offsets, k_offsets, causal, window, wanted, checked, keep)
    return out, lse


def _check_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor | None,
    k_offsets: torch.Tensor | None,
) -> None:
    wanted = "(batch, tokens, heads, features)" if offsets is None else "(total, heads, features), as there are offsets"
    rank = 4 if offsets is None else 3
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == rank:
        raise ValueError(f"flash_attention: {shapes}; allowed: {wanted}. Packed sequences need offsets, a single one a "
                         "batch of 1: q.unsqueeze(0)")  # fmt: skip
    if k.shape != v.shape or q.shape[-1] != k.shape[-1] or q.shape[: rank - 3] != k.shape[: rank - 3]:
        raise ValueError(
            f"flash_attention: {shapes} do not fit; {wanted}, with equal features (and batch), and k and v of one shape"
        )
    if offsets is None:
        if k_offsets is not None:
            raise ValueError("flash_attention: k_offsets without offsets; both or offsets alone pack sequences")
        return
    for name, each in (("offsets", offsets), ("k_offsets", k_offsets)):
        if each is None:
            continue
        check_tensor("flash_attention", name, each, q, INDICES)
        if each.ndim != 1 or len(each) == 0 or len(each) != len(offsets):
            raise ValueError(
                f"flash_attention: {name} has shape {tuple(each.shape)}; allowed: (sequences + 1,), at least one "
                f"element, for queries and keys alike (offsets have {len(offsets)})"
            )
    if k_offsets is None and len(k) != len(q):
        raise ValueError(
            f"flash_attention: k has {len(k)} rows, q {len(q)}; pass k_offsets where keys are packed otherwise"
        )


def _check_offsets(name: str, offsets: torch.Tensor, rows: int) -> None:
    """Raise `ValueError` unless ``offsets`` run from 0 to ``rows`` without going back."""
    readable("flash_attention", name, offsets)
    found = offsets.tolist()
    if found[0] != 0 or found[-1] != rows:
        raise ValueError(f"flash_attention: {name} run from {found[0]} to {found[-1]}, allowed: from 0 to {rows}, the "
                         "number of rows")  # fmt: skip
    for sequence, (begin, end) in enumerate(itertools.pairwise(found)):
        if end < begin:
            raise ValueError(
                f"flash_attention: sequence {sequence} runs from {name} {begin} back to {end}; offsets never fall"
            )
