"""The unfused reference of layer_norm."""

from __future__ import annotations

import torch


def layer_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension, with the variance of ``1 / n``.

    ``x`` is ``(*batch, n)``, ``weight`` and ``bias`` ``(n,)`` or absent. In ``compute`` throughout, rounded once to
    ``x``'s dtype, as `torch.nn.functional.layer_norm` does it.
    """
    wide = x.to(compute)
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(compute)
    if bias is not None:
        y = y + bias.to(compute)
    return y.to(x.dtype)


def add_layer_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm_reference` of ``x + residual``, and that sum: rounded to their dtype before it is normalised, as in a
    model that hands the sum on to its next layer."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps, compute), total
