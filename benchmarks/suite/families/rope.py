"""Rotary embedding of queries and keys."""

from __future__ import annotations

import torch

from benchmarks.suite.families.made import liger, normal
from benchmarks.suite.model import LIGER, Bar, Problem, Row, Way, Work, bars, moved, over
from reference_kernels.rope import rope

SMALL = {"batch": 2, "tokens": 9, "heads": 4, "kv_heads": 2, "features": 32}


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def turn(device: torch.device, batch: int, tokens: int, heads: int, kv_heads: int, features: int) -> Problem:
    """As in transformers, whose tables repeat the angles and have the dtype of the model; ours are float32."""
    q, k = (normal(device, batch, tokens, each, features) for each in (heads, kv_heads))
    frequency = 10000.0 ** (-torch.arange(features // 2, device=device) / (features // 2))
    angle = torch.arange(tokens, device=device)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    wide_cos, wide_sin = (torch.cat((each, each), -1).to(q.dtype).unsqueeze(0) for each in (cos, sin))

    def eager(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,  # noqa: ARG001
        sin: torch.Tensor,  # noqa: ARG001
        wide_cos: torch.Tensor,
        wide_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            _turned(q, wide_cos.unsqueeze(2), wide_sin.unsqueeze(2)),
            _turned(k, wide_cos.unsqueeze(2), wide_sin.unsqueeze(2)),
        )

    def of_liger(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,  # noqa: ARG001
        sin: torch.Tensor,  # noqa: ARG001
        wide_cos: torch.Tensor,
        wide_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """It takes heads before tokens, and turns them where they lie."""
        found = liger("rope", "LigerRopeFunction")(q.transpose(1, 2), k.transpose(1, 2), wide_cos, wide_sin)
        return found[0].transpose(1, 2), found[1].transpose(1, 2)

    once = moved(q, k)
    return Problem(
        {"q": q, "k": k, "cos": cos, "sin": sin, "wide_cos": wide_cos, "wide_sin": wide_sin},
        lambda q, k, cos, sin, wide_cos, wide_sin: rope(q, k, cos, sin),
        eager,
        Work(2 * once + moved(cos, sin)),
        {LIGER: Way(of_liger, mutates=("forward", "both"))},
        backward=Work(2 * once + moved(cos, sin)),
        grads=("q", "k"),
    )


_BARS = bars(Bar("copy", 0.85), Bar("copy", 0.88, goal=True), over(eager=4.0, compile=1.0, Liger=1.2))
_HEADS = {"heads": 32, "kv_heads": 8, "features": 128}

ROWS = [
    Row(
        "rope",
        "q32/k8, 8x4096x128",
        turn,
        {"batch": 8, "tokens": 4096, **_HEADS},
        SMALL,
        bars(_BARS, Bar("us", 184)),
        backward=True,
    ),
    Row("rope", "q32/k8, 4x4096x128", turn, {"batch": 4, "tokens": 4096, **_HEADS}, SMALL, over(best=0.98)),
]
