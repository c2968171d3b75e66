"""The unfused reference of linear_cross_entropy."""

from __future__ import annotations

import torch

from reference_kernels.cross_entropy.reference import cross_entropy_reference
from reference_kernels.linear_cross_entropy.chunks import config


def linear_cross_entropy_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    gradients: str = "backward",
    chunk_rows: int | None = None,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`cross_entropy_reference` of the logits ``x @ weight.T + bias``, rounded to ``x``'s dtype; the loss in
    ``compute``.

    ``x`` is ``(*batch, hidden)``, ``weight`` ``(vocab, hidden)``, ``bias`` ``(vocab,)``, ``target`` int64 ``(*batch)``.
    ``gradients="forward"`` rounds the gradient by ``weight`` after each ``chunk_rows`` rows, and nothing else:
    ``"backward"`` rounds every gradient once, the logits' too.
    """
    count = target.numel()
    rows, labels = x.reshape(count, x.shape[-1]), target.reshape(count)
    step = config(count, len(weight), x.dtype, chunk_rows).rows if gradients == "forward" else max(count, 1)
    losses = []
    for begin in range(0, max(count, 1), step):
        logits = rows[begin : begin + step].to(compute) @ weight.to(compute).t()
        if bias is not None:
            logits = logits + bias.to(compute)
        losses.append(
            cross_entropy_reference(
                logits.to(x.dtype),
                labels[begin : begin + step],
                ignore_index,
                label_smoothing,
                z_loss,
                softcap,
                "none",
                compute,
            )
        )
    found = torch.cat(losses)
    if reduction == "none":
        return found.reshape(target.shape)
    total = found.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()
