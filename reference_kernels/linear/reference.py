"""What the linear kernel has to compute, unfused."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)`` in float32 throughout, rounded once to ``x``'s dtype.

    ``x`` is ``(*batch, k)``, ``weight`` ``(n, k)`` as in `torch.nn.Linear`, ``bias`` ``(n,)``; returns ``(*batch, n)``.
    ``activation`` is ``None``, ``"relu"`` (which keeps NaN), ``"gelu"`` (exact, by erf) or ``"silu"``.
    """
    out = x.float() @ weight.float().t()
    if bias is not None:
        out = out + bias.float()
    if activation == "relu":
        out = torch.relu(out)
    elif activation == "gelu":
        out = F.gelu(out)
    elif activation == "silu":
        out = F.silu(out)
    return out.to(x.dtype)
