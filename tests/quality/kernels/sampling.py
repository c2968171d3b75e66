"""Drawing a token from logits after a top-k cut, by the Gumbel trick or by the cumulated sum, with planted bugs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

SEEDS = st.integers(0, 2**31 - 1)


def reference(logits: Tensor, seed: int, temperature: float, k: int) -> Tensor:
    scaled = logits.float() / temperature
    cut = scaled.topk(min(k, scaled.shape[-1]), -1).values[..., -1:]
    return torch.softmax(torch.where(scaled >= cut, scaled, -torch.inf), -1)


@triton.jit
def gumbel_kernel(logits, cut, out, vocab, row_pitch, col_pitch, seed, inverse, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < vocab
    score = tl.load(logits + row * row_pitch + c * col_pitch, mask=inside, other=-float("inf")).to(tl.float32)
    if BUG != "no-temperature":
        score = score * inverse
    score = tl.where(score >= tl.load(cut + row), score, -float("inf"))
    offset = row * vocab + c
    if BUG == "row-repeats":
        offset = c + row * 0
    if BUG == "seed-ignored":
        uniform = tl.rand(7, offset)
    else:
        uniform = tl.rand(seed, offset)
    if BUG == "coarse-uniform":
        # Eight random bits, rounded up: one number in 256 is 1, whose noise is infinite.
        uniform = tl.ceil(uniform * 256) / 256
    if BUG == "exponential":
        noise = -tl.log(1 - uniform)
    else:
        noise = -tl.log(-tl.log(tl.maximum(uniform, 1e-30)))
    best = tl.argmax(tl.where(inside, score + noise, -float("inf")), axis=0)
    if BUG == "next-token":
        best += 1
    tl.store(out + row, best.to(tl.int64))


@triton.jit
def cumulated_kernel(logits, cut, out, vocab, row_pitch, col_pitch, seed, inverse, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < vocab
    score = tl.load(logits + row * row_pitch + c * col_pitch, mask=inside, other=-float("inf")).to(tl.float32) * inverse
    score = tl.where(inside & (score >= tl.load(cut + row)), score, -float("inf"))
    weight = tl.exp(score - tl.max(score, axis=0))
    total = tl.cumsum(weight, axis=0)
    place = tl.rand(seed, row.to(tl.int32)) * tl.sum(weight, axis=0)
    hit = (total > place) & (weight > 0)
    chosen = tl.min(tl.where(hit, c, BLOCK), axis=0)
    last = tl.max(tl.where(weight > 0, c, 0), axis=0)
    tl.store(out + row, tl.minimum(chosen, last).to(tl.int64))


def sample(logits: Tensor, seed: int, temperature: float, k: int, bug: str, *, cumulated: bool) -> Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    inverse = 1 / temperature
    taken = min(k + (bug == "one-too-many"), vocab)
    cut = (logits.float() / temperature).topk(taken, -1).values[:, -1].contiguous()
    # The kernel multiplies by the inverse: what lies on the cut must not fall below it.
    cut = cut - cut.abs() * 2.0**-20
    block = triton.next_power_of_2(vocab)
    given = (logits, cut, out, vocab, *logits.stride(), seed, inverse)
    if cumulated:
        cumulated_kernel[(rows,)](*given, BLOCK=block)
    else:
        gumbel_kernel[(rows,)](*given, BLOCK=block, BUG=bug)
    return out


def make_spec(bug: str = "", *, cumulated: bool = False) -> FusionSpec:
    def fused(logits: Tensor, seed: int, temperature: float, k: int) -> Tensor:
        return sample(logits, seed, temperature, k, bug, cumulated=cumulated)

    return FusionSpec(
        name=f"sample {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "logits": tensor("rows vocab", values=values.normal(0, 1)),
            "seed": SEEDS,
            "temperature": st.sampled_from([1.0, 0.5]),
            "k": st.sampled_from([4, 300]),
        },
        dims={"rows": dim(0, 40), "vocab": dim(1, 300)},
        dtypes=torch.float32,
        rng="seed",
        distribution=True,
    )
