"""What the attention kernels of tutorial 06 share: two device functions, the inputs and what is exact."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.tutorials.common import assert_rounded, normal

triton = pytest.importorskip("triton")
tl = triton.language
HEAD_DIM = 16
SCALE = 0.3


@triton.jit
def rescale_and_add(acc, l_i, m_i, qk, v, keep):
    """One block of keys into the running softmax; ``qk`` is in units of log2."""
    qk = tl.where(keep, qk, -float("inf"))
    m_ij = tl.maximum(m_i, tl.max(qk, 1))
    p = tl.math.exp2(qk - m_ij[:, None])
    alpha = tl.math.exp2(m_i - m_ij)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, l_i * alpha + tl.sum(p, 1), m_ij


@triton.jit
def key_range(start_m, N_CTX, BLOCK_M: tl.constexpr, STAGE: tl.constexpr):
    """Which keys a stage takes: 1 those below the diagonal blocks, 2 the diagonal blocks, 3 all of them."""
    if STAGE == 1:
        lo, hi = 0, start_m * BLOCK_M
    elif STAGE == 2:
        lo, hi = start_m * BLOCK_M, min((start_m + 1) * BLOCK_M, N_CTX)
    else:
        lo, hi = 0, N_CTX
    return lo, hi


@dataclass(frozen=True)
class Exact:
    """Attention in float64; ``size`` is the sum of magnitudes in each output element."""

    p: Tensor
    output: Tensor
    size: Tensor
    log2_sum: Tensor
    roundings: int


def heads(batch: int, number: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = normal(3, batch, number, length, HEAD_DIM, dtype=dtype)
    return q, k, v


def exact_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Exact:
    """The reference, and how many float32 roundings a probability may be off.

    A logit sums ``HEAD_DIM`` products, and is scaled: that many roundings of the sum of their magnitudes become the
    relative error of its exponential. What follows (maximum, sum, rescaling of each block) adds at most 32.
    """
    q, k, v = q.double(), k.double(), v.double()
    logits = q @ k.mT * SCALE
    magnitude = (q.abs() @ k.abs().mT * SCALE).max().item()
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    p = torch.softmax(logits, -1)
    log2_sum = torch.logsumexp(logits, -1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
    return Exact(p, p @ v, p @ v.abs(), log2_sum, 32 + int((HEAD_DIM + 3) * magnitude))


def assert_attends(output: Tensor, log2_sum: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> None:
    """Probabilities are rounded to the dtype for the second product; their sum is not."""
    exact = exact_attention(q, k, v, causal=causal)
    assert_rounded(output, exact.output, roundings=exact.roundings, scale=exact.size, narrow=1)
    # The sum's relative error is the logarithm's absolute one.
    one = torch.ones_like(exact.log2_sum)
    assert_rounded(log2_sum, exact.log2_sum, roundings=2 * exact.roundings, scale=one)
