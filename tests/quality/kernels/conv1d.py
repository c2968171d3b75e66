# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Causal depthwise convolution, and its step by one token: float32 inside, one rounding to ``x.dtype`` at the end.

``x`` is ``(batch, channels, seq)``, ``weight`` ``(channels, width)``, ``bias`` ``(channels,)`` or None: output ``t``
sees inputs ``t - width + 1`` to ``t``, what lies before the start is zero. The step has ``x`` ``(batch, channels)`` and
a ``state`` of the last ``width - 1`` inputs, ``(batch, channels, width - 1)``, which it shifts in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pytest_fusion import FusionSpec, dim, optional, tensor

# A limit of a real grid's second axis is 65535 (flash-linear-attention #1077); 64 here, for an interpreter to reach.
AXIS_LIMIT = 64


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    width = weight.shape[1]
    padded = functional.pad(x.float(), (width - 1, 0))
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap in range(width):
        out = out + padded[:, :, tap : tap + x.shape[2]] * weight.float()[:, tap, None]
    return (out if bias is None else out + bias.float()[:, None]).to(x.dtype)


def step_reference(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    window = torch.cat([state, x[:, :, None]], -1)
    state.copy_(window[:, :, 1:])
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap in range(weight.shape[1]):
        total = total + window[:, :, tap].float() * weight.float()[:, tap]
    return total.to(x.dtype)


@triton.jit
def conv_kernel(
    x, weight, bias, out, channels, seq, width, blocks, x_batch, x_channel, x_col, weight_row, weight_col, bias_pitch,
    BIASED: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    line = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if BUG == "lines-on-axis-1":
        line = tl.program_id(1).to(tl.int64)
        block = tl.program_id(0)
    sample, channel = line // channels, line % channels
    t = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    source = x + sample * x_batch + channel * x_channel
    for tap in range(width):
        at = t - (width - 1) + tap
        inside = (at >= 0) & (at < seq)
        if BUG == "reads-before-start":
            inside = at < seq
        value = tl.load(source + at * x_col, mask=inside, other=0.0).to(tl.float32)
        row = channel
        if BUG == "weight-of-first-channel":
            row = channel * 0
        total += value * tl.load(weight + row * weight_row + tap * weight_col).to(tl.float32)
    if BIASED:
        total += tl.load(bias + channel * bias_pitch).to(tl.float32)
    tl.store(out + line * seq + t, total.to(out.dtype.element_ty), mask=t < seq)


@triton.jit
def step_kernel(
    x, state, weight, out, channels, width, x_batch, x_col, state_batch, state_channel, state_col, weight_row,
    weight_col, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = (tl.program_id(0) // tl.cdiv(channels, BLOCK)).to(tl.int64)
    c = (tl.program_id(0) % tl.cdiv(channels, BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.arange(0, TAPS)[None, :]
    inside = c < channels
    window = state + sample * state_batch + c[:, None] * state_channel
    old = inside[:, None] & (tap < width - 1)
    fresh = tl.load(x + sample * x_batch + c * x_col, mask=inside, other=0.0)
    kept = tl.load(window + tap * state_col, mask=old, other=0.0)
    taps = tl.load(weight + c[:, None] * weight_row + tap * weight_col, mask=old, other=0.0).to(tl.float32)
    last = tl.load(weight + c * weight_row + (width - 1) * weight_col, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(kept.to(tl.float32) * taps, axis=1) + fresh.to(tl.float32) * last
    moved = tl.load(window + (tap + 1) * state_col, mask=inside[:, None] & (tap < width - 2), other=0.0)
    shifted = tl.where(tap == width - 2, fresh[:, None], moved)
    # Another thread may hold the neighbour that is overwritten here.
    tl.debug_barrier()
    tl.store(window + tap * state_col, shifted, mask=old)
    tl.store(out + sample * channels + c, total.to(out.dtype.element_ty), mask=inside)


CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]
restored_step = triton.autotune(CONFIGS, key=[], restore_value=["state"])(step_kernel)
shifting_step = triton.autotune(CONFIGS, key=[])(step_kernel)


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, *, bug: str = "") -> Tensor:
    batch, channels, seq = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[1]
    if bug == "short-sequence" and seq < width:
        return out
    if not out.numel():
        return out
    blocks = triton.cdiv(seq - 1 if bug == "one-too-few" else seq, 32)
    if bug == "one-too-few" and not blocks:
        return out
    grid: tuple[int, ...] = (blocks * batch * channels,)
    if bug == "lines-on-axis-1":
        grid = (blocks, batch * channels)
        if grid[1] > AXIS_LIMIT:
            grid = (blocks, 1 << 16)  # what CUDA refuses, as the interpreter does
    conv_kernel[grid](
        x, weight, bias, out, channels, seq, width, blocks, *x.stride(), *weight.stride(),
        0 if bias is None else bias.stride(0), BIASED=bias is not None, BLOCK=32, BUG=bug,
    )  # fmt: skip
    return out


def conv_step(x: Tensor, state: Tensor, weight: Tensor, *, bug: str = "") -> Tensor:
    batch, channels = x.shape
    width = weight.shape[1]
    out = torch.empty((batch, channels), dtype=x.dtype, device=x.device)
    kernel = shifting_step if bug == "no-restore" else restored_step
    if out.numel():
        kernel[lambda meta: (batch * triton.cdiv(channels, meta["BLOCK"]),)](
            x, state, weight, out, channels, width, *x.stride(), *state.stride(), *weight.stride(),
            TAPS=triton.next_power_of_2(width),
        )  # fmt: skip
    return out


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return conv1d(x, weight, bias, bug=bug)

    return FusionSpec(
        name=f"conv1d {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "x": tensor("batch channels seq"),
            "weight": tensor("channels width"),
            "bias": optional(tensor("channels")),
        },
        dims={"batch": dim(0, 6), "channels": dim(0, 24), "seq": dim(0, 80), "width": dim(1, 5)},
    )


def make_step_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
        return conv_step(x, state, weight, bug=bug)

    written = tensor("batch channels past", layouts=("contiguous", "padded", "transposed", "step", "offset"))
    return FusionSpec(
        name=f"conv_step {bug}".strip(),
        fused=fused,
        reference=step_reference,
        inputs={"x": tensor("batch channels"), "state": written, "weight": tensor("channels past+1")},
        dims={"batch": dim(0, 6), "channels": dim(0, 40), "past": dim(1, 4)},
        mutates="state",
    )
