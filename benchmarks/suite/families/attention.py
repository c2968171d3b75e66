"""Attention beside SDPA's backends and FlexAttention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.suite.compiled import MODE
from benchmarks.suite.families.made import normal
from benchmarks.suite.model import Bar, Problem, Row, Way, Work, bars, moved
from reference_kernels.flash_attention import flash_attention

FLASH, CUDNN, FLEX, DENSE, MATH = "SDPA flash", "SDPA cuDNN", "FlexAttention", "SDPA, dense mask", "SDPA math"
SMALL = {"batch": 2, "tokens": 40, "heads": 4, "kv_heads": 2, "features": 32}


def _sdpa(backend: str, causal: bool) -> Any:
    """``(batch, tokens, heads, features)`` in and out, as our kernel has it; the transposes are views."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            found = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True
            )
        return found.transpose(1, 2)

    return call


def _dense(mask: torch.Tensor) -> Any:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[2] // k.shape[2]
        # No backend that takes a mask takes fewer heads of keys.
        k, v = (each.transpose(1, 2).repeat_interleave(group, 1) for each in (k, v))
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2)

    return call


class _Flex:
    """FlexAttention, compiled with its block mask where it is first called."""

    def __init__(self, causal: bool, window: int | None, mode: str | None) -> None:
        self._causal, self._window, self._mode = causal, window, mode
        self._made: Any = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._made is None:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            window, tokens = self._window, q.shape[1]

            def seen(b: Any, h: Any, query: Any, key: Any) -> Any:  # noqa: ARG001
                met = query >= key
                return met if window is None else met & (query - key < window)

            mask = create_block_mask(seen, None, None, tokens, tokens, device=q.device) if self._causal else None
            self._made = torch.compile(flex_attention, mode=self._mode, dynamic=False), mask
        call, mask = self._made
        found = call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask, enable_gqa=True)
        return found.transpose(1, 2)  # type: ignore[no-any-return]


def attention(
    device: torch.device,
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    features: int,
    causal: bool = True,
    window: int | None = None,
    tried: bool = False,
) -> Problem:
    """``tried``: FlexAttention tries tiles, which takes as long as many rows; else it takes those it has for sm_90."""
    q = normal(device, batch, tokens, heads, features)
    k, v = (normal(device, batch, tokens, kv_heads, features) for _ in range(2))
    if window is None:
        pairs = tokens * tokens // 2 if causal else tokens * tokens
        others = {FLASH: Way(_sdpa("FLASH_ATTENTION", causal)), CUDNN: Way(_sdpa("CUDNN_ATTENTION", causal))}
        truth = FLASH
    else:
        pairs = tokens * window - window * (window - 1) // 2
        at = torch.arange(tokens, device=device)
        mask = (at[:, None] >= at) & (at[:, None] - at < window)
        others, truth = {DENSE: Way(_dense(mask))}, DENSE
    if device.type == "cpu" and truth == FLASH:
        others, truth = {MATH: Way(_sdpa("MATH", causal))}, MATH
    if device.type != "cpu":
        others[FLEX] = Way(_Flex(causal, window, MODE if tried else None))
    flops = 4 * batch * heads * features * pairs
    return Problem(
        {"q": q, "k": k, "v": v},
        lambda q, k, v: flash_attention(q, k, v, causal=causal, window=window)[0],
        None,
        Work(2 * moved(q) + moved(k, v), flops),
        others,
        backward=Work(4 * moved(q) + 2 * moved(k, v), flops * 5 // 2),
        grads=("q", "k", "v"),
        compiles=None,
        truth=truth,
    )


_HEADS = {"heads": 32, "kv_heads": 8, "features": 128}

ROWS = [
    Row(
        "flash_attention",
        "causal, 32/8 heads, 4x8192x128",
        attention,
        {"batch": 4, "tokens": 8192, **_HEADS},
        SMALL,
        bars(
            Bar("tflops", 430),
            Bar("matmul", 0.54),
            Bar("us", 5100),
            Bar(FLASH, 1.05),
            Bar(CUDNN, 0.65),
            Bar("tflops", 300, "backward"),
            Bar(FLASH, 0.9, "backward"),
            Bar("tflops", 500, goal=True),
            Bar("tflops", 370, "backward", goal=True),
        ),
        backward=True,
    ),
    Row(
        "flash_attention",
        "causal, 32/8 heads, 4x4096x128",
        attention,
        {"batch": 4, "tokens": 4096, "tried": True, **_HEADS},
        SMALL,
        bars(
            Bar(FLEX, 1.0),
            Bar("tflops", 382),
            Bar(CUDNN, 1.0, goal=True),
            Bar("tflops", 532, goal=True),
            Bar(FLEX, 1.0, "both"),
        ),
        backward=True,
    ),
    Row(
        "flash_attention",
        "window 1024, 32/8 heads, 1x16384x128",
        attention,
        {"batch": 1, "tokens": 16384, "window": 1024, **_HEADS},
        {**SMALL, "window": 7},
        bars(Bar(DENSE, 4.0), Bar(FLEX, 0.9)),
    ),
    Row(
        "flash_attention",
        "all keys, 32/8 heads, 4x4096x128",
        attention,
        {"batch": 4, "tokens": 4096, "causal": False, **_HEADS},
        {**SMALL, "causal": False},
        bars(Bar(FLASH, 1.0), Bar(FLEX, 1.0)),
    ),
    *(
        Row(
            "flash_attention",
            f"causal, 32/8 heads, 4x4096x{features}",
            attention,
            {"batch": 4, "tokens": 4096, **_HEADS, "features": features},
            SMALL,
            bars(Bar(FLASH, 1.0), Bar(FLEX, 1.0)),
        )
        for features in (64, 256)
    ),
]
