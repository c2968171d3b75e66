"""The unfused reference of linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)`` in ``compute`` throughout, rounded once to ``x``'s dtype.

    ``x`` is ``(*batch, k)``, ``weight`` ``(n, k)`` as in `torch.nn.Linear`, ``bias`` ``(n,)``; returns ``(*batch, n)``.
    ``activation`` is ``None``, ``"relu"`` (which keeps NaN), ``"gelu"`` (exact, by erf) or ``"silu"``.
    """
    out = x.to(compute) @ weight.to(compute).t()
    if bias is not None:
        out = out + bias.to(compute)
    if activation == "relu":
        out = torch.relu(out)
    elif activation == "gelu":
        out = F.gelu(out)
    elif activation == "silu":
        out = F.silu(out)
    return out.to(x.dtype)


def qkv_linear_reference(
    x: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    query_bias: torch.Tensor | None = None,
    key_bias: torch.Tensor | None = None,
    value_bias: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`linear_reference` for queries, keys and values: three weights, which may differ in width, and biases or none."""
    pairs = (query_weight, query_bias), (key_weight, key_bias), (value_weight, value_bias)
    query, key, value = (linear_reference(x, weight, bias, None, compute) for weight, bias in pairs)
    return query, key, value


def gate_up_linear_reference(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """``silu(x @ gate_weight.T) * (x @ up_weight.T)`` in ``compute`` throughout, rounded once to ``x``'s dtype."""
    wide = x.to(compute)
    return (F.silu(wide @ gate_weight.to(compute).t()) * (wide @ up_weight.to(compute).t())).to(x.dtype)


def lora_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float = 1.0,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``x @ weight.T + scale * (x @ down.T) @ up.T`` in ``compute``, rounded once to ``x``'s dtype, and ``scale * (x @
    down.T)`` before: ``weight`` is ``(n, k)``, ``down`` ``(r, k)`` and ``up`` ``(n, r)``."""
    wide = x.to(compute)
    low = (wide @ down.to(compute).t() * scale).to(x.dtype).to(compute)
    return (wide @ weight.to(compute).t() + low @ up.to(compute).t()).to(x.dtype)
