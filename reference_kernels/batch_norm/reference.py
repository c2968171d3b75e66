"""The unfused reference of batch_norm."""

from __future__ import annotations

import torch


def batch_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    relu: bool = False,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``relu((x - mean) / sqrt(var + eps) * weight + bias + residual)`` by channel, in the dtype of ``x``.

    ``x`` and ``residual`` are ``(batch, channels, *space)``, all else ``(channels,)``. In ``training`` mean and
    variance (of ``1 / n``) are those of ``x`` over all but the channels, and the running ones, where given, move
    towards the mean and the variance of ``1 / (n - 1)`` by ``momentum``, in place; otherwise the running ones are used.
    Computed in ``compute``, rounded once, before the relu.
    """
    wide = x.to(compute)
    over = [0, *range(2, x.ndim)]
    shape = (1, -1, *[1] * (x.ndim - 2))
    if training:
        mean, var = wide.mean(over), wide.var(over, correction=0)
        count = x.numel() // max(x.shape[1], 1)
        if count:
            with torch.no_grad():
                for running, value in ((running_mean, mean), (running_var, var * (count / max(count - 1, 1)))):
                    if running is not None:
                        running.copy_(running.to(compute) * (1 - momentum) + value * momentum)
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, var = running_mean.to(compute), running_var.to(compute)
    y = (wide - mean.view(shape)) * torch.rsqrt(var + eps).view(shape)
    if weight is not None:
        y = y * weight.to(compute).view(shape)
    if bias is not None:
        y = y + bias.to(compute).view(shape)
    if residual is not None:
        y = y + residual.to(compute)
    y = y.to(x.dtype)
    return torch.relu(y) if relu else y
