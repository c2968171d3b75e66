"""The unfused reference of adamw."""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.no_grad()
def adamw_reference(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    masters: Sequence[torch.Tensor] | None = None,
    compute: torch.dtype = torch.float32,
) -> None:
    """Step number ``step`` (from 1) of AdamW, in place: parameters, both moments, and the masters if there are any.

    Weights decay by ``1 - lr * weight_decay`` before the update; ``eps`` is added to the root of the corrected second
    moment. With ``masters`` these are what is updated, and each parameter becomes its master, rounded. Computed in
    ``compute``; each tensor that is written is rounded once.
    """
    correction1, correction2 = (1 - beta**step for beta in betas)
    wides = parameters if masters is None else masters
    for parameter, gradient, m, v, kept in zip(parameters, gradients, first, second, wides, strict=True):
        g = gradient.to(compute)
        mean = m.to(compute) + (g - m.to(compute)) * (1 - betas[0])
        square = v.to(compute) * betas[1] + g * g * (1 - betas[1])
        update = mean / (square.sqrt() / correction2**0.5 + eps) * (lr / correction1)
        wide = kept.to(compute) * (1 - lr * weight_decay) - update
        for target, value in ((m, mean), (v, square), (kept, wide), (parameter, wide)):
            target.copy_(value)
