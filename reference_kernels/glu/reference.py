"""The unfused reference of glu."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from reference_kernels.linear.reference import linear_reference


def glu_reference(
    gate: torch.Tensor, up: torch.Tensor, activation: str = "silu", compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """``activation(gate) * up`` in ``compute`` throughout, rounded once to ``gate``'s dtype.

    Both are ``(*batch, hidden)``. ``activation`` is ``"silu"`` (SwiGLU), ``"gelu"`` (GeGLU, exact, by erf) or
    ``"gelu_tanh"`` (GeGLU by the usual approximation).
    """
    wide = gate.to(compute)
    if activation == "silu":
        gated = F.silu(wide)
    else:
        gated = F.gelu(wide, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (gated * up.to(compute)).to(gate.dtype)


def glu_packed_reference(
    x: torch.Tensor, activation: str = "silu", compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """`glu_reference` of the two halves of ``x``, ``(*batch, 2 * hidden)``: the gate first, as the projections of
    most models lay them out."""
    gate, up = x.chunk(2, dim=-1)
    return glu_reference(gate, up, activation, compute)


def feed_forward_reference(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    activation: str = "silu",
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`glu_reference` between linear layers: ``x`` ``(*batch, k)``, two weights ``(n, k)``, one ``(o, n)``.

    Each layer's result, and the unit's, is rounded to ``x``'s dtype, whatever ``compute`` is.
    """
    gate, up = (linear_reference(x, weight, None, None, compute) for weight in (gate_weight, up_weight))
    return linear_reference(glu_reference(gate, up, activation, compute), down_weight, None, None, compute)
