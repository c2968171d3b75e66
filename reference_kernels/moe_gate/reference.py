"""The unfused reference of moe_gate."""

from __future__ import annotations

import torch


def moe_gate_reference(
    logits: torch.Tensor, k: int, renormalize: bool = True, compute: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers (int64) of the ``k`` experts with the largest logits, ``(*batch, k)`` each, largest first.

    ``logits`` is ``(*batch, experts)``. The weights are its softmax over all experts in ``compute``, of the chosen ones
    alone if ``renormalize``, rounded once to its dtype. Of equal logits the lower number comes first; NaN counts as
    larger than any other, as for ``torch.topk``.
    """
    ordered, order = torch.sort(logits.to(compute), dim=-1, descending=True, stable=True)
    # Of the chosen alone, the softmax is the renormalised one: the sum over the others cancels.
    weights = torch.softmax(ordered[..., :k] if renormalize else ordered, dim=-1)[..., :k]
    return weights.to(logits.dtype), order[..., :k]
