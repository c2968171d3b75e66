"""What picks a few of many: sampling from a vocabulary, gating of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.suite.families.made import normal
from benchmarks.suite.model import Bar, Problem, Row, Way, Work, bars, moved, over
from reference_kernels.moe_gate import moe_gate
from reference_kernels.sampling import sample
from reference_kernels.sampling.reference import sampling_probabilities

_HEAT = 0.7


def _drawn(p: torch.Tensor) -> torch.Tensor:
    """A token by exponential races, as vLLM draws it: no wait for the device, which `torch.multinomial` has."""
    return (p / torch.empty_like(p).exponential_(1)).argmax(-1)


def _sorted(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The usual pipeline: sort, cut, softmax, cut, put back, draw."""
    x = logits / _HEAT
    if top_k == 0 and top_p >= 1:
        return _drawn(torch.softmax(x, -1))
    ordered, order = x.sort(-1, descending=True)
    if top_k:
        ordered = ordered.masked_fill(torch.arange(x.shape[-1], device=x.device) >= top_k, float("-inf"))
    p = torch.softmax(ordered, -1)
    if top_p < 1:
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
    return order.gather(-1, _drawn(p).unsqueeze(-1)).squeeze(-1)


def _topped(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """For a small k: no sort, and the cuts among k alone."""
    ordered, order = (logits / _HEAT).topk(top_k, -1)
    p = torch.softmax(ordered, -1)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
    return order.gather(-1, _drawn(p).unsqueeze(-1)).squeeze(-1)


def tokens(device: torch.device, rows: int, vocab: int, top_k: int, top_p: float) -> Problem:
    logits = normal(device, rows, vocab, dtype=torch.float32, scale=2.0)

    def permitted(inputs: Mapping[str, Any], found: torch.Tensor) -> str:
        """Every draw is one that can be drawn; where two nearly equal logits decide a cut, either may stay."""
        p = sampling_probabilities(inputs["logits"], _HEAT, top_k, top_p)
        if found.shape != p.shape[:1] or bool(((found < 0) | (found >= vocab)).any()):
            return "it draws what is no token"
        wrong = int((p.gather(-1, found[:, None]) <= 0).sum())
        return f"{wrong} of {rows} draws are of tokens that are cut" if wrong > rows // 50 else ""

    others = {"topk first": Way(lambda logits: _topped(logits, top_k, top_p))} if 0 < top_k <= 64 else {}
    return Problem(
        {"logits": logits},
        lambda logits: sample(logits, 20261122, _HEAT, top_k, top_p),
        lambda logits: _sorted(logits, top_k, top_p),
        Work(moved(logits)),
        others,
        agrees=permitted,
    )


def _gated(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, experts = torch.softmax(logits, -1).topk(k, -1)
    return weights / weights.sum(-1, keepdim=True), experts


def gate(device: torch.device, rows: int, experts: int, k: int) -> Problem:
    logits = normal(device, rows, experts, dtype=torch.float32)
    return Problem(
        {"logits": logits},
        lambda logits: moe_gate(logits, k),
        lambda logits: _gated(logits, k),
        Work(moved(logits) + rows * k * 12),
        backward=Work(2 * moved(logits) + rows * k * 12),
        grads=("logits",),
    )


ROWS = [
    *(
        Row(
            "sampling",
            f"top-k {top_k}, top-p {top_p}, 256x128256 float32",
            tokens,
            {"rows": 256, "vocab": 128256, "top_k": top_k, "top_p": top_p},
            {"rows": 9, "vocab": 300, "top_k": top_k, "top_p": top_p},
            bars(Bar("us", 250), Bar("us", 150, goal=True), over(eager=8.0, compile=3.0)),
        )
        for top_k, top_p in ((50, 0.95), (0, 0.95))
    ),
    Row(
        "sampling",
        "temperature alone, 256x128256 float32",
        tokens,
        {"rows": 256, "vocab": 128256, "top_k": 0, "top_p": 1.0},
        {"rows": 9, "vocab": 300, "top_k": 0, "top_p": 1.0},
        bars(Bar("us", 150, goal=True)),
    ),
    Row(
        "moe_gate",
        "8 of 256, 32768 rows, float32",
        gate,
        {"rows": 32768, "experts": 256, "k": 8},
        {"rows": 33, "experts": 60, "k": 4},
        bars(Bar("us", 20), over(eager=5.0)),
        backward=True,
    ),
]
