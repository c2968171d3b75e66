"""Fused rotary embedding: every head of queries and keys in one launch, and the turn back as their gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._common import Rows, broadcast, jit, placed, row_offset
from reference_kernels.rope.pairs import Layout, angles, check_heads, config, copy_columns, pairs, store_pairs, turned


@jit
def _rope_kernel(
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    tokens: tl.tensor,
    q_heads: tl.tensor,
    k_heads: tl.tensor,
    half: tl.tensor,
    dim: tl.tensor,
    q_head_stride: tl.tensor,
    k_head_stride: tl.tensor,
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
    cos_stride0: tl.tensor,
    cos_stride1: tl.tensor,
    cos_stride2: tl.tensor,
    cos_step: tl.tensor,
    sin_stride0: tl.tensor,
    sin_stride1: tl.tensor,
    sin_stride2: tl.tensor,
    sin_step: tl.tensor,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """``BLOCK_TOKENS`` tokens and a block of the heads of each. Outputs are contiguous ``(tokens, heads, dim)``."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None, None]
    block = tl.program_id(1).to(tl.int64)
    q_head = block * BLOCK_Q + tl.arange(0, BLOCK_Q)[None, :, None]
    k_head = block * BLOCK_K + tl.arange(0, BLOCK_K)[None, :, None]
    q_inside = (token < tokens) & (q_head < q_heads)
    k_inside = (token < tokens) & (k_head < k_heads)
    q_in = q_ptr + row_offset(token, size1, size2, q_stride0, q_stride1, q_stride2) + q_head * q_head_stride
    k_in = k_ptr + row_offset(token, size1, size2, k_stride0, k_stride1, k_stride2) + k_head * k_head_stride
    q_out = q_out_ptr + (token * q_heads + q_head) * dim
    k_out = k_out_ptr + (token * k_heads + k_head) * dim

    cos_in = cos_ptr + row_offset(token, size1, size2, cos_stride0, cos_stride1, cos_stride2)
    sin_in = sin_ptr + row_offset(token, size1, size2, sin_stride0, sin_stride1, sin_stride2)
    cos = angles(cos_in, token < tokens, half, cos_step, PAIRS)
    sin = angles(sin_in, token < tokens, half, sin_step, PAIRS)
    if INVERSE:
        sin = -sin
    q_first, q_second = pairs(q_in, q_inside, half, q_step, INTERLEAVED, PAIRS)
    k_first, k_second = pairs(k_in, k_inside, half, k_step, INTERLEAVED, PAIRS)
    q_first, q_second = turned(q_first, q_second, cos, sin)
    k_first, k_second = turned(k_first, k_second, cos, sin)
    store_pairs(q_out, q_first, q_second, q_inside, half, 1, INTERLEAVED, PAIRS)
    store_pairs(k_out, k_first, k_second, k_inside, half, 1, INTERLEAVED, PAIRS)
    if REST > 0:
        copy_columns(q_out, q_in, q_inside, 2 * half, dim, 1, q_step, 1.0, False, REST)
        copy_columns(k_out, k_in, k_inside, 2 * half, dim, 1, k_step, 1.0, False, REST)


@torch.library.custom_op("reference_kernels::rope", mutates_args=())
def _rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if q_out.numel() + k_out.numel() == 0:
        return q_out, k_out
    batch, half, dim = q.shape[:-2], cos.shape[-1], q.shape[-1]
    tables = [broadcast(angle, (*batch, half)).unsqueeze(-2) for angle in (cos, sin)]
    rows = Rows.of(q, k, *tables, trailing=2)
    tile = config(q.shape[-2], k.shape[-2], half, dim - 2 * half)
    with placed(q.device):
        _rope_kernel[(triton.cdiv(rows.count, tile.tokens), tile.blocks)](
            q_out,
            k_out,
            *rows.tensors,
            rows.count,
            q.shape[-2],
            k.shape[-2],
            half,
            dim,
            rows.tensors[0].stride(-2),
            rows.tensors[1].stride(-2),
            *rows.layout,
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            BLOCK_TOKENS=tile.tokens,
            BLOCK_Q=tile.q_heads,
            BLOCK_K=tile.k_heads,
            PAIRS=tile.pairs,
            REST=tile.rest,
            num_warps=tile.warps,
        )
    return q_out, k_out


@_rope.register_fake
def _(q: torch.Tensor, k: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    return q_out, k_out


def _save(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:  # noqa: ARG001 -- passed by name
    _, _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[Any, ...]:
    return *_rope(dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse), None, None, None, None


_rope.register_autograd(_differentiate, setup_context=_save)


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout = "half"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned by their positions: ``(*batch, heads, dim)`` each to contiguous ones of their dtype.

    ``q`` and ``k`` share batch, ``dim`` and dtype (float32, float16 or bfloat16) and differ in heads as they like;
    ``cos`` and ``sin``, in any of these dtypes, broadcast to ``(*batch, half)``: the first ``2 * half`` of ``dim``
    turn, in the pairs of `rope_reference`. All may have any strides. In float32, rounded once. Differentiable by ``q``
    and ``k``, as often as one likes: the gradient is the turn by the negative angles.

    Raises `TypeError` for other or mixed dtypes; `ValueError` for shapes that do not fit, ``dim`` past 1024, an unknown
    layout, angles that require a gradient, or mixed devices.
    """
    check_heads("rope", q, k, cos, sin, layout)
    q_out, k_out = _rope(q, k, cos, sin, layout == "interleaved", False)
    return q_out, k_out
