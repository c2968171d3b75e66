"""The unfused reference of rms_norm: one function for each casting convention in use.

All take ``x`` of shape ``(*batch, n)`` and ``weight`` of ``(n,)`` or none, compute in ``compute`` and return ``x``'s
shape and dtype. They differ only in where they round, which in bfloat16 changes about a third of the elements by one
unit in the last place.
"""

from __future__ import annotations

import torch


def _normalised(x: torch.Tensor, eps: float, compute: torch.dtype) -> torch.Tensor:
    """``x / sqrt(mean(x**2) + eps)`` over the last dimension, in ``compute``."""
    wide = x.to(compute)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def llama_reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """Normalised, rounded to ``x.dtype``, then multiplied by the weight in that dtype (``LlamaRMSNorm``)."""
    normalised = _normalised(x, eps, compute).to(x.dtype)
    return normalised if weight is None else weight * normalised


def gemma_reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """``compute`` throughout, times ``1 + weight``, rounded once at the end (``GemmaRMSNorm``)."""
    normalised = _normalised(x, eps, compute)
    return (normalised if weight is None else normalised * (1.0 + weight.to(compute))).to(x.dtype)


def torch_reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """``compute`` throughout, times the weight, rounded once at the end (``torch.nn.functional.rms_norm``)."""
    normalised = _normalised(x, eps, compute)
    return (normalised if weight is None else normalised * weight.to(compute)).to(x.dtype)


CONVENTIONS = {"llama": llama_reference, "gemma": gemma_reference, "torch": torch_reference}


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    convention: str = "llama",
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The function of the ``convention``: "llama", "gemma" or "torch"."""
    return CONVENTIONS[convention](x, weight, eps, compute)


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    convention: str = "llama",
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_reference` of ``x + residual``, and that sum: rounded to their dtype before it is normalised, as in a
    model that hands the sum on to its next layer."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, convention, compute), total
