"""Formulas that kernels of several packages share, in plain torch, and inputs that belong to them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def residual_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm(total, weight, bias), total


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def geglu_tanh(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a, approximate="tanh") * b


def geglu_erf(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a) * b


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The halves of the last dimension turned by an angle."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """``(..., queries, size)`` by ``(..., keys, size)``; the last query sees the last key."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        queries, keys = scores.shape[-2:]
        future = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(-1) @ v


def angles(seq: int, half: int, like: Tensor) -> Tensor:
    """Rotary angles ``(seq, half)`` in float32."""
    position = torch.arange(seq, device=like.device, dtype=torch.float32)
    return position[:, None] * 10000.0 ** (-torch.arange(half, device=like.device) / max(half, 1))


def labels(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """A class for each row; one in four is to be ignored."""
    classes = torch.randint(vocab, (rows,), generator=generator, device=generator.device)
    ignored = torch.rand(rows, generator=generator, device=generator.device) < 0.25
    ignored[:1] = False  # at least one row counts
    return torch.where(ignored, -100, classes)


def log_probabilities(scale: float = 1.0) -> Callable[..., Tensor]:
    """A function for ``values=``: rows of logarithms of probabilities."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        logits = torch.randn(shape, generator=generator, device=generator.device) * scale
        return logits.log_softmax(-1).to(dtype)

    return make


def probabilities(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """For ``values=``: rows of probabilities."""
    return torch.randn(shape, generator=generator, device=generator.device).softmax(-1).to(dtype)
