"""The two versions: the suite's softmax, and a faster idea of it that is wrong for inputs which are rare at first."""

from __future__ import annotations

from torch import Tensor

from reference_kernels.softmax import softmax as incumbent
from reference_kernels.softmax.spec import SPEC

__all__ = ["SPEC", "candidate", "incumbent"]


def candidate(x: Tensor, scale: float = 1.0, keep: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Softmax without the pass for the maximum: equal as long as no logit exceeds 88, where float32's exp overflows."""
    logits = x.float() * scale
    if bias is not None:
        logits = logits + bias.float()
    power = logits.exp()
    if keep is not None:
        power = power.masked_fill(~keep, 0.0)
    return (power / power.sum(-1, keepdim=True)).to(x.dtype)
