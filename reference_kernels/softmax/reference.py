"""The unfused reference of softmax."""

from __future__ import annotations

import torch


def softmax_reference(
    x: torch.Tensor,
    scale: float = 1.0,
    keep: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    diagonal: int | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,  # noqa: ARG001 -- what it draws is in mask
    mask: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``dropout(softmax(scale * x + bias))`` over the last dimension where ``keep``, in ``compute``, rounded once to
    ``x``'s dtype.

    ``x`` is ``(*batch, n)``; ``keep`` (bool, True = take part) and ``bias`` (floating) broadcast to it; with a
    ``diagonal``, row ``i`` of the last two dimensions keeps columns up to ``i + diagonal``. What is not kept is exactly
    zero, whatever lies there; a row without anything to keep, or of nothing but ``-inf``, is NaN, as `torch.softmax`
    has it. ``mask``, a bool of ``x``'s shape, is what dropout keeps, times ``1 / (1 - dropout_p)``; the rest is 0, also
    in place of NaN.
    """
    logits = x.to(compute) * scale
    if bias is not None:
        logits = logits + bias.to(compute)
    if keep is not None:
        logits = logits.masked_fill(~keep, float("-inf"))
    if diagonal is not None:
        below = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(diagonal)
        logits = logits.masked_fill(~below, float("-inf"))
    y = torch.softmax(logits, dim=-1)
    if mask is not None:
        y = torch.where(mask, y * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0), 0.0)
    return y.to(x.dtype)
