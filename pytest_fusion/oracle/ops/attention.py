"""Scaled dot-product attention of all back ends: one definition with the roundings of a fused kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.cancellation import of_stored_output
from pytest_fusion.oracle.operand import rolled
from pytest_fusion.oracle.ops.normalise import calm, softmax
from pytest_fusion.oracle.ops.product import product
from pytest_fusion.oracle.ops.reduction import total
from pytest_fusion.oracle.ops.rule_registry import Op, as_float, computed, named
from pytest_fusion.oracle.rounding import GRIDS


def _arguments(op: Op, q: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, bool, float]:
    """``(mask or bias, causal, scale)`` by the native schema of the chosen back end."""
    given = named(op.function, args, kwargs)
    mask = given.get("attn_mask", given.get("attn_bias"))
    if given.get("dropout_p"):
        raise NotImplementedError("attention dropout draws inside the kernel; its lanes are not modelled")
    scale = given.get("scale")
    return mask, bool(given.get("is_causal", False)), 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def _weights(op: Op, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Scores (scaled, masked) and their softmax, ``(L, B, H, M, N)``."""
    scores = op.relative(product(op, q, k.transpose(-1, -2)) * scale, 2)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None:
        mask = mask.reshape(mask.shape[0], *(1,) * (scores.dim() - mask.dim()), *mask.shape[1:])
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + as_float(mask)
    return scores, softmax(op, scores, [-1], calm(op, scores, op.relative(scores, 1)), rolled(scores))


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """Key or value heads repeated to the query's number of heads (grouped-query attention)."""
    heads, own = q.shape[-3], k.shape[-3]
    return k if heads == own else k.repeat_interleave(heads // own, -3)


def _stored(op: Op, weights: Tensor) -> Tensor:
    """The probabilities as a fused kernel passes them to the second product: in the dtype of the values."""
    dtype = op.outs[0].dtype
    return op.noise.rounded(weights, dtype) if dtype in GRIDS and not op.wide else weights


@computed(
    """
    _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_attention_math
    scaled_dot_product_attention
    """
)
def _attention(op: Op, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    mask, causal, scale = _arguments(op, q, (q, k, v, *args), kwargs)
    q, k, v = as_float(q), as_float(k), as_float(v)
    k, v = _grouped(q, k), _grouped(q, v)
    scores, weights = _weights(op, q, k, mask, causal, scale)
    value = op.relative(product(op, _stored(op, weights), v), 2)
    # Rows without a visible key: back ends return zeros or NaN, so the native answer is taken.
    empty = torch.isneginf(scores).all(-1, True)
    if bool(empty.any()):
        value = torch.where(empty, as_float(op.outs[0]).unsqueeze(0), value)
    return (value, *(None for _ in op.outs[1:])) if len(op.outs) > 1 else value


def _delta(op: Op, whole: Tensor, weights: Tensor) -> Tensor:
    """The sum by row as a kernel computes it from the result that it stored."""
    if op.spread is None or op.noise.kind != "E":
        return whole
    out = op.noise.spread(whole)
    out[1:].add_(of_stored_output(op.noise, weights[0], op.spread, -1))
    return out


@computed(
    """
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention_backward
    """
)
def _attention_backward(op: Op, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    mask, causal, scale = _arguments(op, q, (grad, q, k, v, *args), kwargs)
    grad, q, k, v = as_float(grad), as_float(q), as_float(k), as_float(v)
    heads = k.shape[-3]
    wide_k, wide_v = _grouped(q, k), _grouped(q, v)
    _, weights = _weights(op, q, wide_k, mask, causal, scale)
    op.spread = None
    inner = weights * product(op, grad, wide_v.transpose(-1, -2))
    scores = op.relative(inner - weights * _delta(op, total(op, inner, [-1], True), weights), 2)
    stored = _stored(op, scores)
    grad_q = op.relative(product(op, stored, wide_k) * scale, 2)
    grad_k = op.relative(product(op, stored.transpose(-1, -2), q) * scale, 2)
    grad_v = op.relative(product(op, _stored(op, weights).transpose(-1, -2), grad), 1)
    grads = [
        grad_q,
        *(
            g.reshape(*g.shape[:-3], heads, -1, *g.shape[-2:]).sum(-3) if g.shape[-3] != heads else g
            for g in (grad_k, grad_v)
        ),
    ]
    return (*grads, *(None for _ in op.outs[3:]))
