"""What the rope kernels share: tiles, pairs of a head in registers and back in memory, what may turn at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from reference_kernels._common import FLOATS, INTERPRETED, broadcasts, check_tensor, jit

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
def pairs(
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
def angles(angle_ptr: tl.tensor, inside: tl.tensor, half: tl.tensor, step: tl.tensor, PAIRS: tl.constexpr) -> tl.tensor:
    """The cosine or sine of each pair in float32, ``(tokens, 1, PAIRS)``; ``angle_ptr`` is where the tokens' begin."""
    pair = tl.arange(0, PAIRS)[None, None, :].to(tl.int64)
    return tl.load(angle_ptr + pair * step, mask=inside & (pair < half), other=0.0).to(tl.float32)


@jit
def turned(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Each pair by its angle."""
    return first * cos - second * sin, second * cos + first * sin


@jit
def store_pairs(
    y_ptr: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    inside: tl.tensor,
    half: tl.tensor,
    step: tl.tensor,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Put both elements of each pair where the heads ``y_ptr`` begin, whose elements are ``step`` apart."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, None, :].to(tl.int64)
        both = tl.reshape(tl.join(first, second), [first.shape[0], first.shape[1], 2 * PAIRS])
        tl.store(y_ptr + column * step, fitted(both, dtype), mask=inside & (column < 2 * half))
    else:
        column = tl.arange(0, PAIRS)[None, None, :].to(tl.int64)
        mask = inside & (column < half)
        tl.store(y_ptr + column * step, fitted(first, dtype), mask=mask)
        tl.store(y_ptr + (column + half) * step, fitted(second, dtype), mask=mask)


@jit
def fitted(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """``x`` in ``dtype``; in float8 no further than its largest number, beyond which the casts of torch (NaN) and of
    the hardware (saturated) differ. A choice keeps NaN."""
    if dtype == tl.float8e4nv:
        x = x.to(tl.float32)
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    return x.to(dtype)


@jit
def copy_columns(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    inside: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    y_step: tl.tensor,
    x_step: tl.tensor,
    factor: tl.tensor,
    SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The elements from ``first`` to ``end`` of each head, ``SCALED`` by ``factor`` or as they are."""
    column = tl.arange(0, WIDTH)[None, None, :].to(tl.int64) + first
    mask = inside & (column < end)
    x = tl.load(x_ptr + column * x_step, mask=mask, other=0.0)
    if SCALED:
        x = x.to(tl.float32) * factor
    tl.store(y_ptr + column * y_step, fitted(x, y_ptr.dtype.element_ty), mask=mask)


def check_heads(
    kernel: str, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str
) -> None:
    """Raise `TypeError` for dtypes, `ValueError` for devices, shapes and a layout that no rope kernel takes: ``q`` and
    ``k`` are ``(*batch, heads, dim)``, ``cos`` and ``sin`` broadcast to ``(*batch, half)`` and want no gradient."""
    if layout not in get_args(Layout):
        raise ValueError(f"{kernel}: layout is {layout!r}, known: {', '.join(get_args(Layout))}")
    check_tensor(kernel, "q", q, q, FLOATS)
    check_tensor(kernel, "k", k, q, (q.dtype,))
    if min(q.ndim, k.ndim) < 2 or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{kernel}: q {tuple(q.shape)} and k {tuple(k.shape)} do not fit; they are (*batch, q_heads, dim) and "
            "(*batch, k_heads, dim), so transpose a layout whose heads come before the tokens"
        )
    if q.shape[-1] > WIDEST:
        raise ValueError(f"{kernel}: a head has {q.shape[-1]} dimensions, supported: up to {WIDEST}")
    for name, angle in (("cos", cos), ("sin", sin)):
        check_tensor(kernel, name, angle, q, FLOATS)
        if angle.ndim == 0 or not broadcasts(angle.shape[:-1], q.shape[:-2]):
            raise ValueError(
                f"{kernel}: {name} of shape {tuple(angle.shape)} does not broadcast to (*batch, half) of q "
                f"{tuple(q.shape)}"
            )
        if angle.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{kernel}: {name} requires a gradient, which this kernel does not compute; detach it")
    if cos.shape[-1] != sin.shape[-1] or 2 * cos.shape[-1] > q.shape[-1]:
        raise ValueError(
            f"{kernel}: cos has {cos.shape[-1]} angles, sin {sin.shape[-1]}, and a head {q.shape[-1]} dimensions; both "
            "have one angle for each pair, at most dim // 2. Of a table that repeats them, pass cos[..., : dim // 2]"
        )
