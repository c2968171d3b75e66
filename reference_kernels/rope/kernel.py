"""Fused rotary embedding: every head of queries and keys in one launch, and the turn back as their gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl

from reference_kernels._common import FLOATS, INTERPRETED, Rows, broadcasts, check_tensor, jit, placed, row_offset

Layout = Literal["half", "interleaved"]

WIDEST = 1024  # a head's dimensions; one more power of two would leave the registers


@dataclass(frozen=True, slots=True)
class RopeTile:
    """What a program turns: ``tokens`` times (``q_heads + k_heads``) heads of ``pairs`` pairs, and ``rest`` elements of
    each head that it copies (0: none). It takes ``blocks`` programs to get through the heads of a token."""

    tokens: int
    q_heads: int
    k_heads: int
    pairs: int
    rest: int
    blocks: int
    warps: int


def config(q_heads: int, k_heads: int, half: int, rest: int, *, interpreted: bool = INTERPRETED) -> RopeTile:
    """Tile for heads of ``half`` pairs that turn and ``rest`` elements that stay.

    All heads of a token where they fit, so that its angles are read once: 32 query and 8 key heads of 128 are 2560
    pairs, 20 for each thread of 4 warps. The loads of queries and keys are both under way before either is stored.
    """
    pairs, beside = max(16, triton.next_power_of_2(half)), triton.next_power_of_2(rest) if rest else 0
    budget = 256 if interpreted else 2048
    head = max(pairs, beside // 2)
    most = min(triton.next_power_of_2(max(q_heads, k_heads, 1)), max(1, budget // head))
    blocks = max(1, triton.cdiv(max(q_heads, k_heads), most))
    q_tile, k_tile = (triton.next_power_of_2(max(1, triton.cdiv(heads, blocks))) for heads in (q_heads, k_heads))
    held = (q_tile + k_tile) * head
    tokens = max(1, (4096 if interpreted else 1024) // triton.next_power_of_2(held))
    warps = max(4, min(8, tokens * held // 512))
    return RopeTile(tokens, q_tile, k_tile, pairs, beside, blocks, 4 if warps < 8 else 8)


@jit
def _pairs(
    x_ptr: tl.tensor,
    inside: tl.tensor,
    half: tl.tensor,
    step: tl.tensor,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both elements of each pair in float32, ``(tokens, heads, PAIRS)``; ``x_ptr`` is where the heads begin."""
    if INTERLEAVED:
        # Neighbours come in one wide load; every second element would be a load of its own.
        column = tl.arange(0, 2 * PAIRS)[None, None, :].to(tl.int64)
        both = tl.load(x_ptr + column * step, mask=inside & (column < 2 * half), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [both.shape[0], both.shape[1], PAIRS, 2]))
    else:
        column = tl.arange(0, PAIRS)[None, None, :].to(tl.int64)
        mask = inside & (column < half)
        first = tl.load(x_ptr + column * step, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + (column + half) * step, mask=mask, other=0.0).to(tl.float32)
    return first, second


@jit
def _store_turned(
    y_ptr: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    inside: tl.tensor,
    half: tl.tensor,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Turn the pairs by angles of ``(tokens, 1, PAIRS)`` and put them where the contiguous heads ``y_ptr`` begin."""
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, None, :].to(tl.int64)
        both = tl.reshape(tl.join(turned_first, turned_second), [first.shape[0], first.shape[1], 2 * PAIRS])
        tl.store(y_ptr + column, both, mask=inside & (column < 2 * half))
    else:
        column = tl.arange(0, PAIRS)[None, None, :].to(tl.int64)
        mask = inside & (column < half)
        tl.store(y_ptr + column, turned_first, mask=mask)
        tl.store(y_ptr + column + half, turned_second, mask=mask)


@jit
def _copy_rest(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    inside: tl.tensor,
    half: tl.tensor,
    dim: tl.tensor,
    step: tl.tensor,
    REST: tl.constexpr,
) -> None:
    """The elements of each head that do not turn, from ``2 * half`` on."""
    column = tl.arange(0, REST)[None, None, :].to(tl.int64) + 2 * half
    mask = inside & (column < dim)
    tl.store(y_ptr + column, tl.load(x_ptr + column * step, mask=mask, other=0.0), mask=mask)


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

    pair = tl.arange(0, PAIRS)[None, None, :].to(tl.int64)
    known = (token < tokens) & (pair < half)
    cos_at = row_offset(token, size1, size2, cos_stride0, cos_stride1, cos_stride2) + pair * cos_step
    sin_at = row_offset(token, size1, size2, sin_stride0, sin_stride1, sin_stride2) + pair * sin_step
    cos = tl.load(cos_ptr + cos_at, mask=known, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + sin_at, mask=known, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    q_first, q_second = _pairs(q_in, q_inside, half, q_step, INTERLEAVED, PAIRS)
    k_first, k_second = _pairs(k_in, k_inside, half, k_step, INTERLEAVED, PAIRS)
    _store_turned(q_out, q_first, q_second, cos, sin, q_inside, half, INTERLEAVED, PAIRS)
    _store_turned(k_out, k_first, k_second, cos, sin, k_inside, half, INTERLEAVED, PAIRS)
    if REST > 0:
        _copy_rest(q_out, q_in, q_inside, half, dim, q_step, REST)
        _copy_rest(k_out, k_in, k_inside, half, dim, k_step, REST)


@torch.library.custom_op("reference_kernels::rope", mutates_args=())
def _rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if q_out.numel() + k_out.numel() == 0:
        return q_out, k_out
    batch, half, dim = q.shape[:-2], cos.shape[-1], q.shape[-1]
    angles = [angle.broadcast_to(*batch, half).unsqueeze(-2) for angle in (cos, sin)]
    rows = Rows.of(q, k, *angles, trailing=2)
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
            *rows.sizes[1:],
            *(stride for four in rows.strides for stride in four),
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
    if layout not in get_args(Layout):
        raise ValueError(f"rope: layout is {layout!r}, known: {', '.join(get_args(Layout))}")
    check_tensor("rope", "q", q, q, FLOATS)
    check_tensor("rope", "k", k, q, (q.dtype,))
    if min(q.ndim, k.ndim) < 2 or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"rope: q {tuple(q.shape)} and k {tuple(k.shape)} do not fit; they are (*batch, q_heads, dim) and "
            "(*batch, k_heads, dim), so transpose a layout whose heads come before the tokens"
        )
    if q.shape[-1] > WIDEST:
        raise ValueError(f"rope: a head has {q.shape[-1]} dimensions, supported: up to {WIDEST}")
    for name, angle in (("cos", cos), ("sin", sin)):
        check_tensor("rope", name, angle, q, FLOATS)
        if angle.ndim == 0 or not broadcasts(angle.shape[:-1], q.shape[:-2]):
            raise ValueError(
                f"rope: {name} of shape {tuple(angle.shape)} does not broadcast to (*batch, half) of q {tuple(q.shape)}"
            )
        if angle.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"rope: {name} requires a gradient, which this kernel does not compute; detach it")
    if cos.shape[-1] != sin.shape[-1] or 2 * cos.shape[-1] > q.shape[-1]:
        raise ValueError(
            f"rope: cos has {cos.shape[-1]} angles, sin {sin.shape[-1]}, and a head {q.shape[-1]} dimensions; both "
            "have one angle for each pair, at most dim // 2. Of a table that repeats them, pass cos[..., : dim // 2]"
        )
    q_out, k_out = _rope(q, k, cos, sin, layout == "interleaved", False)
    return q_out, k_out
