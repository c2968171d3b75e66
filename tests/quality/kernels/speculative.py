"""Speculative decoding of one token: a draft's proposal, accepted or replaced, with random numbers used twice.

The next token is the one whose exponential clock of its own rate rings first. A rejected proposal has seen those
clocks: used again for its replacement, they favour tokens that the draft thinks unlikely, by a few hundredths of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values


def reference(model: Tensor, draft: Tensor, seed: int) -> Tensor:
    return torch.softmax(model.float(), -1)


@triton.jit
def clocks(seed, offset):
    return -tl.log(tl.maximum(1 - tl.rand(seed, offset), 1e-30))


@triton.jit
def rates(logits, row, pitch, step, column, inside):
    score = tl.load(logits + row * pitch + column * step, mask=inside, other=-float("inf")).to(tl.float32)
    weight = tl.exp(score - tl.max(score, axis=0))
    return weight / tl.sum(weight, axis=0)


@triton.jit
def next_kernel(
    model, draft, out, vocab, model_pitch, model_step, draft_pitch, draft_step, seed, BLOCK: tl.constexpr,
    BUG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    inside = c < vocab
    right = rates(model, row, model_pitch, model_step, c, inside)
    guess = rates(draft, row, draft_pitch, draft_step, c, inside)
    # Each row has numbers of its own: for the proposal, for the replacement, and one to accept by.
    first = row * (2 * vocab + 1)
    times = clocks(seed, first + c)
    proposal = tl.argmin(tl.where(guess > 0, times / guess, float("inf")), axis=0)
    chosen = c == proposal
    accepted = tl.rand(seed, first + 2 * vocab) * tl.sum(tl.where(chosen, guess, 0.0), axis=0) < tl.sum(
        tl.where(chosen, right, 0.0), axis=0
    )
    if BUG != "same-clocks":
        times = clocks(seed, first + vocab + c)
    left = tl.maximum(right - guess, 0.0)
    if BUG == "whole-row":
        left = right
    other = tl.argmin(tl.where(left > 0, times / left, float("inf")), axis=0)
    tl.store(out + row, tl.where(accepted, proposal, other).to(tl.int64))


def next_token(model: Tensor, draft: Tensor, seed: int, bug: str) -> Tensor:
    rows, vocab = model.shape
    out = torch.empty(rows, dtype=torch.int64, device=model.device)
    if rows:
        block = triton.next_power_of_2(vocab)
        next_kernel[(rows,)](model, draft, out, vocab, *model.stride(), *draft.stride(), seed, BLOCK=block, BUG=bug)
    return out


def make_spec(bug: str = "") -> FusionSpec:
    def fused(model: Tensor, draft: Tensor, seed: int) -> Tensor:
        return next_token(model, draft, seed, bug)

    return FusionSpec(
        name=f"speculative {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "model": tensor("rows vocab", values=values.normal()),
            "draft": tensor("rows vocab", values=values.normal()),
            "seed": st.integers(0, 2**31 - 1),
        },
        dims={"rows": dim(0, 48), "vocab": dim(1, 150)},
        rng="seed",
        distribution=True,
    )
