"""What the rms_norm kernel has to compute, unfused: one function for each casting convention in use.

All take ``x`` of shape ``(*batch, n)`` and ``weight`` of ``(n,)`` and return ``x``'s shape and dtype. They differ only
in where they round, which in bfloat16 changes about a third of the elements by one unit in the last place.
"""

from __future__ import annotations

import torch


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x**2) + eps)`` over the last dimension, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def llama_reference(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Normalised in float32, rounded to ``x.dtype``, then multiplied by the weight in that dtype (``LlamaRMSNorm``)."""
    return weight * _normalised(x, eps).to(x.dtype)


def gemma_reference(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Float32 throughout, times ``1 + weight``, rounded once at the end (``GemmaRMSNorm``)."""
    return (_normalised(x, eps) * (1.0 + weight.float())).to(x.dtype)


def torch_reference(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """Float32 throughout, times the weight if there is one, rounded once at the end (``torch.nn.functional``)."""
    normalised = _normalised(x, eps)
    return (normalised if weight is None else normalised * weight.float()).to(x.dtype)
