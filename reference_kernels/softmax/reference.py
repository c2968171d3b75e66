"""What the softmax kernel has to compute, unfused."""

from __future__ import annotations

import torch


def softmax_reference(
    x: torch.Tensor,
    scale: float = 1.0,
    keep: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale * x + bias)`` over the last dimension where ``keep``, in float32, rounded once to ``x``'s dtype.

    ``x`` is ``(*batch, n)``; ``keep`` (bool, True = take part) and ``bias`` (floating) broadcast to it. What is not
    kept is exactly zero, whatever lies there; a row without anything to keep, or of nothing but ``-inf``, is NaN, as
    `torch.softmax` has it.
    """
    logits = x.float() * scale
    if bias is not None:
        logits = logits + bias.float()
    if keep is not None:
        logits = logits.masked_fill(~keep, float("-inf"))
    return torch.softmax(logits, dim=-1).to(x.dtype)
