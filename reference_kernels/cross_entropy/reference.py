"""The unfused reference of cross_entropy."""

from __future__ import annotations

import torch


def cross_entropy_reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The loss in ``compute``: of every row for ``"none"``, their ``"sum"``, or their ``"mean"`` over rows that count.

    ``logits`` is ``(*batch, vocab)``, ``target`` int64 ``(*batch)``. With ``softcap`` the logits are first
    ``softcap * tanh(logits / softcap)``. A row's loss is ``-log p[target]``, mixed with the mean of ``-log p`` over the
    vocabulary by ``label_smoothing``, plus ``z_loss * logsumexp**2``. Rows whose target is ``ignore_index`` give 0 and
    do not count, whatever their logits; if none counts, the mean is NaN. Any other target outside ``[0, vocab)`` makes
    its row NaN, and the row's gradient.
    """
    ignored = target == ignore_index
    known = (target >= 0) & (target < logits.shape[-1])
    wide = logits.to(compute).masked_fill(ignored.unsqueeze(-1), 0.0)
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    if logits.shape[-1] == 0:
        losses = wide.new_full(target.shape, float("nan"))
    else:
        log_p = torch.log_softmax(wide, dim=-1)
        place = torch.where(known, target, 0).unsqueeze(-1)
        losses = -(1 - label_smoothing) * log_p.gather(-1, place).squeeze(-1)
        if label_smoothing:
            losses = losses - label_smoothing * log_p.mean(-1)
        if z_loss:
            losses = losses + z_loss * torch.logsumexp(wide, dim=-1).square()
        losses = losses * torch.where(known | ignored, 1.0, float("nan"))  # a factor, so that the gradient is NaN too
    losses = losses.masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (~ignored).sum()
