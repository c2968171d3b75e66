"""The unfused reference of pointwise. Each computes in ``compute`` and rounds once, at the end."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def relu_scale_bias_reference(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """``relu(x) * scale + bias`` of ``x``'s dtype: ``x`` is ``(*batch, n)``, ``scale`` and ``bias`` ``(n,)``."""
    return (torch.relu(x.to(compute)) * scale.to(compute) + bias.to(compute)).to(x.dtype)


def add_mul_act_reference(
    x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, activation: str = "relu", compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """``activation((x + y) * z)`` of three tensors of one shape, in ``x``'s dtype; "gelu" is the exact one, by erf."""
    product = (x.to(compute) + y.to(compute)) * z.to(compute)
    function = {"relu": torch.relu, "gelu": F.gelu, "silu": F.silu}[activation]
    return function(product).to(x.dtype)


def dropout_reference(
    x: torch.Tensor,
    seed: int,  # noqa: ARG001 -- what it draws is in mask
    p: float,
    mask: torch.Tensor,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``x / (1 - p)`` where ``mask``, else 0, also in place of NaN; ``mask`` is a bool of ``x``'s shape."""
    kept = x.to(compute) * (1 / (1 - p) if p < 1 else 0.0)
    return torch.where(mask, kept, 0.0).to(x.dtype)
