"""Rotary embedding and the write into a paged cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.suite.families.made import normal
from benchmarks.suite.families.rope import SMALL, _turned
from benchmarks.suite.model import Bar, Problem, Row, Way, Work, bars, moved, over
from reference_kernels.rope import rope, rope_cache

_APART = "our rope, then scatter"


def written(
    device: torch.device, batch: int, tokens: int, heads: int, kv_heads: int, features: int, page: int = 16
) -> Problem:
    q = normal(device, batch, tokens, heads, features)
    k, v = (normal(device, batch, tokens, kv_heads, features) for _ in range(2))
    frequency = 10000.0 ** (-torch.arange(features // 2, device=device) / (features // 2))
    angle = torch.arange(tokens, device=device)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    wide_cos, wide_sin = (torch.cat((each, each), -1).to(q.dtype).unsqueeze(0) for each in (cos, sin))
    pages = -(-batch * tokens // page)
    keys, values = (torch.zeros(pages, page, kv_heads, features, dtype=q.dtype, device=device) for _ in range(2))
    slots = torch.randperm(pages * page, device=device)[: batch * tokens].view(batch, tokens)

    def scattered(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> None:
        for cache, new in ((keys, k), (values, v)):
            cache.view(-1, kv_heads, features).index_copy_(0, at.flatten(), new.flatten(0, 1))

    def ours(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, slots: Any, **_: Any) -> Any:
        return rope_cache(q, k, v, cos, sin, keys, values, slots, checked=False), keys, values

    def eager(
        q: Any, k: Any, v: Any, wide_cos: Any, wide_sin: Any, keys: Any, values: Any, slots: Any, **_: Any
    ) -> Any:
        cosine, sine = wide_cos.unsqueeze(2), wide_sin.unsqueeze(2)
        scattered(_turned(k, cosine, sine), v, keys, values, slots)
        return _turned(q, cosine, sine), keys, values

    def apart(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, slots: Any, **_: Any) -> Any:
        q, k = rope(q, k, cos, sin)
        scattered(k, v, keys, values, slots)
        return q, keys, values

    return Problem(
        {
            "q": q,
            "k": k,
            "v": v,
            "cos": cos,
            "sin": sin,
            "wide_cos": wide_cos,
            "wide_sin": wide_sin,
            "keys": keys,
            "values": values,
            "slots": slots,
        },
        ours,
        eager,
        Work(2 * moved(q, k, v) + moved(cos, sin, slots)),
        {_APART: Way(apart)},
        mutates=("forward",),
    )


ROWS = [
    Row(
        "rope",
        "q32/k8 and cache write, 8x4096x128",
        written,
        {"batch": 8, "tokens": 4096, "heads": 32, "kv_heads": 8, "features": 128},
        SMALL,
        bars(Bar("copy", 0.85), Bar("us", 220), over(eager=4.0, compile=1.0), Bar(_APART, 1.4)),
    ),
]
