# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Partial rotary embedding, halves convention (GPT-NeoX): float32 inside, one rounding to ``q.dtype`` at the end.

``q`` is ``(batch, seq, heads, dim)``; the first ``2 * (dim // 4)`` features turn, the rest pass through.
``positions`` is an int64 ``(batch, seq)`` and may be negative (left padding), or ``(3, seq)`` for the sectioned form,
where feature ``i`` of ``half`` follows row ``3 * i // half``. ``theta`` is the base of the frequencies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from torch import Tensor

from pytest_fusion import FusionSpec, derived, dim, tensor


def frequencies(half: int, theta: float, device: torch.device) -> Tensor:
    exponent = torch.arange(half, dtype=torch.float32, device=device) / max(half, 1)
    return 1.0 / torch.pow(torch.full((), theta, dtype=torch.float32, device=device), exponent)


def rotate(q: Tensor, angle: Tensor) -> Tensor:
    """``angle`` is ``(..., seq, half)`` and lacks the head axis of ``q``."""
    half = angle.shape[-1]
    cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
    first, second, rest = q[..., :half].float(), q[..., half : 2 * half].float(), q[..., 2 * half :].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(q.dtype)


def reference(q: Tensor, positions: Tensor, theta: float) -> Tensor:
    inverse = frequencies(q.shape[-1] // 4, theta, q.device)
    return rotate(q, positions.float()[..., None] * inverse)


def in_place_reference(q: Tensor, positions: Tensor, theta: float) -> None:
    q.copy_(reference(q, positions, theta))


def sectioned_reference(q: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = q.shape[-1] // 4
    section = 3 * torch.arange(half, device=q.device) // max(half, 1)
    return rotate(q, positions.float()[section].T * frequencies(half, theta, q.device))


@triton.jit
def rope_kernel(
    q, positions, inverse, out, batches, length, heads, features, half,
    q_batch, q_seq, q_head, q_feature, out_batch, out_seq, out_head, out_feature, position_row, position_col,
    SECTIONED: tl.constexpr, HEADS: tl.constexpr, FEATURES: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // length).to(tl.int64)
    step = (tl.program_id(0) % length).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, FEATURES)[None, :]
    inside = (h < heads) & (i < features)
    turning = i < 2 * half
    pair = tl.where(i < half, i, i - half)
    other = tl.where(i < half, i + half, i - half)
    sign = tl.where(i < half, -1.0, 1.0)
    if BUG == "interleaved":
        pair = i // 2
        other = i ^ 1
        sign = tl.where(i % 2 == 0, -1.0, 1.0)
    if SECTIONED:
        section = 3 * pair // tl.maximum(half, 1)
        if BUG == "one-section":
            section = section * 0
        position = tl.load(positions + section * position_row + step * position_col, mask=turning, other=0)
        sample = step * 0
    else:
        sample = batch
        if BUG == "first-batch-positions":
            sample = batch * 0
        position = tl.load(positions + sample * position_row + step * position_col)
    speed = tl.load(inverse + pair, mask=turning, other=0.0)
    angle = position.to(tl.float32) * speed
    source = q + batch * q_batch + step * q_seq + h * q_head
    if BUG == "ignores-pitch":
        source = q + ((batch * length + step) * heads + h) * features * q_feature
    mine = tl.load(source + i * q_feature, mask=inside, other=0.0).to(tl.float32)
    theirs = tl.load(source + other * q_feature, mask=inside & turning, other=0.0).to(tl.float32)
    turned = mine * tl.cos(angle) + sign * theirs * tl.sin(angle)
    result = tl.where(turning, turned, mine)
    keep = inside
    if BUG == "no-pass-through":
        keep = inside & turning
    if BUG == "skips-negative":
        keep = inside & (position >= 0)
    target = out + batch * out_batch + step * out_seq + h * out_head + i * out_feature
    tl.store(target, result.to(out.dtype.element_ty), mask=keep)


def rope(q: Tensor, positions: Tensor, theta: float, *, out: Tensor, sectioned: bool = False, bug: str = "") -> Tensor:
    if bug == "hard-coded-theta":
        theta = 10000.0
    batches, length, heads, features = q.shape
    half = features // 4
    if q.numel():
        rope_kernel[(batches * length,)](
            q, positions, frequencies(half, theta, q.device), out, batches, length, heads, features, half,
            *q.stride(), *out.stride(), *positions.stride(),
            SECTIONED=sectioned, HEADS=triton.next_power_of_2(heads), FEATURES=triton.next_power_of_2(features),
            BUG=bug,
        )  # fmt: skip
    return out


def draw_positions(batch: int, seq: int, generator: torch.Generator) -> Tensor:
    """Consecutive positions; left padding makes the first ones of some sequences negative."""
    device = generator.device
    start = torch.randint(-8, 24, (batch, 1), generator=generator, device=device)
    return start + torch.arange(seq, device=device)


def draw_sections(seq: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 100, (3, seq), generator=generator, device=generator.device)


def make_spec(bug: str = "") -> FusionSpec:
    def fused(q: Tensor, positions: Tensor, theta: float) -> Tensor:
        fresh = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return rope(q, positions, theta, out=q if bug == "overwrites-input" else fresh, bug=bug)

    return FusionSpec(
        name=f"rope {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "q": tensor("batch seq heads features"),
            "positions": derived(draw_positions),
            "theta": st.sampled_from([1e4, 1e6]),
        },
        dims={"batch": dim(0, 3), "seq": dim(0, 6), "heads": dim(0, 4), "features": dim(0, 80)},
    )


def make_in_place_spec() -> FusionSpec:
    def fused(q: Tensor, positions: Tensor, theta: float) -> None:
        rope(q, positions, theta, out=q)

    return FusionSpec(
        name="rope_in_place",
        fused=fused,
        reference=in_place_reference,
        inputs={"q": tensor("batch seq heads features"), "positions": derived(draw_positions), "theta": 1e4},
        dims={"batch": dim(0, 3), "seq": dim(0, 6), "heads": dim(0, 4), "features": dim(0, 80)},
        mutates=["q"],
    )


def make_sectioned_spec(bug: str = "") -> FusionSpec:
    def fused(q: Tensor, positions: Tensor, theta: float) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return rope(q, positions, theta, out=out, sectioned=True, bug=bug)

    return FusionSpec(
        name=f"rope_sectioned {bug}".strip(),
        fused=fused,
        reference=sectioned_reference,
        inputs={"q": tensor("batch seq heads features"), "positions": derived(draw_sections), "theta": 1e4},
        dims={"batch": dim(0, 3), "seq": dim(0, 6), "heads": dim(0, 4), "features": dim(0, 80)},
    )
