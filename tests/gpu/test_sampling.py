"""Sampling from vocabularies of full size, on a GPU: several tiles a row, lists past one tile, rows that share a
program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from reference_kernels.moe_gate import moe_gate, moe_gate_reference
from reference_kernels.sampling import sample, sampling_probabilities

pytestmark = pytest.mark.gpu

CUTS: list[dict[str, Any]] = [
    {},
    {"top_k": 50},
    {"top_k": 5000},
    {"top_p": 0.83},
    {"top_p": 0.05},
    {"top_k": 50, "top_p": 0.95, "temperature": 0.7},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("vocab", [5000, 128256])
def test_draws_from_a_full_vocabulary(cuts: dict[str, Any], vocab: int) -> None:
    """Of 10,000 draws none has probability 0 and their places in the cumulated probabilities are uniform, in the
    tokens' own order and by falling probability."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(7)
    row = 2 * torch.randn(vocab, generator=generator, device=device)
    p = sampling_probabilities(row, **cuts, compute=torch.float64)

    drawn = torch.cat([sample(row.expand(500, vocab), seed, **cuts) for seed in range(20)])

    # Where adding up in another order ends the nucleus one token earlier or later, that one draw in many may differ.
    assert int((p[drawn] == 0).sum()) <= (2 if "top_p" in cuts else 0)
    for order in (torch.arange(vocab, device=device), torch.sort(p, descending=True).indices):
        below = torch.empty_like(p).scatter_(0, order, p[order].cumsum(0) - p[order])
        uniform = torch.rand(len(drawn), generator=generator, device=device, dtype=torch.float64)
        counts = torch.bincount(((below[drawn] + p[drawn] * uniform) * 16).long().clamp(0, 15), minlength=16)
        expected = len(drawn) / 16
        # 15 degrees of freedom: more than 52 has a probability of 1e-5.
        assert float(((counts - expected) ** 2 / expected).sum()) < 52


@pytest.mark.parametrize("cuts", CUTS)
def test_the_same_call_draws_the_same(cuts: dict[str, Any]) -> None:
    """Bit for bit at one seed, whatever other rows do on the device and in how many programs they are."""
    logits = torch.randn(700, 128256, device="cuda")
    wanted = sample(logits, 3, **cuts)

    for _ in range(5):
        assert torch.equal(sample(logits, 3, **cuts), wanted)
    assert torch.equal(sample(logits[:9], 3, **cuts), wanted[:9])


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_full_batch_of_gates(renormalize: bool) -> None:
    """32768 tokens of 256 experts choose what a stable sort chooses, ties of bfloat16 included."""
    logits = torch.randn(32768, 256, device="cuda").bfloat16()

    weights, experts = moe_gate(logits, 8, renormalize)

    wanted = moe_gate_reference(logits, 8, renormalize)
    assert torch.equal(experts, wanted[1])
    torch.testing.assert_close(weights, wanted[0], rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("experts", "k"), [(8, 2), (60, 4), (64, 6), (128, 8), (160, 6), (300, 5), (512, 64), (4096, 64)]
)
def test_gates_of_any_width(experts: int, k: int, dtype: torch.dtype) -> None:
    """Each width is another layout of the rounds over groups and over their members: all choose as a stable sort."""
    logits = (4 * torch.randn(777, experts, device="cuda")).round().to(dtype)
    logits[5, experts // 2], logits[6] = torch.nan, -torch.inf

    weights, chosen = moe_gate(logits, k)

    wanted = moe_gate_reference(logits, k)
    assert torch.equal(chosen, wanted[1])
    torch.testing.assert_close(weights, wanted[0], rtol=2**-7, atol=1e-6, equal_nan=True)
