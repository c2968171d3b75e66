"""`batch_norm`: what it takes and refuses, and how forward and backward belong together."""

from __future__ import annotations

from typing import Any

import torch

from reference_kernels._common import FLOATS, check_tensor
from reference_kernels.batch_norm.backward import batch_norm_backward
from reference_kernels.batch_norm.kernel import _batch_norm, _statistics


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, _, mean, rest, scale, ctx.eps, relu = inputs
    ctx.dtypes = [None if each is None else each.dtype for each in (weight, bias)]
    ctx.save_for_backward(x, output if relu else None, weight, mean, rest, scale)


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    of_x, of_weight, of_bias, of_residual = ctx.needs_input_grad[:4]
    relu = ctx.saved_tensors[1] is not None
    dx, sums, dresidual = batch_norm_backward(dy, *ctx.saved_tensors, ctx.eps, of_residual and relu)
    dweight, dbias = (
        each.to(dtype, copy=True) if asked else None
        for each, dtype, asked in zip(sums, ctx.dtypes, (of_weight, of_bias), strict=True)
    )
    passed = (dresidual if relu else dy) if of_residual else None
    return dx if of_x else None, dweight, dbias, passed, None, None, None, None, None


_batch_norm.register_autograd(_differentiate, setup_context=_save)


def batch_norm(
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
) -> torch.Tensor:
    """``relu((x - mean) / sqrt(var + eps) * weight + bias + residual)`` by channel, of ``x``'s shape and dtype.

    ``x`` is ``(batch, channels, *space)`` of 2 to 5 dimensions in float32, float16 or bfloat16, ``residual`` of its
    shape and dtype; the vectors are ``(channels,)``, each in one of the floating dtypes. Any strides; the result is
    dense, with its channels last if those of ``x`` are. In ``training`` the running statistics, where given, are
    written: see `batch_norm_reference`. Differentiable once by ``x``, ``weight``, ``bias`` and ``residual``.

    Raises `TypeError` for other or mixed dtypes; `ValueError` for shapes that do not fit, a single element a channel in
    training, no running statistics in evaluation, numbers out of range, or mixed devices.
    """
    name = "batch_norm"
    check_tensor(name, "x", x, x, FLOATS)
    if not 2 <= x.ndim <= 5:
        raise ValueError(f"{name}: x has {x.ndim} dimensions, supported: (batch, channels) and up to three of space")
    vectors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    for label, each in vectors.items():
        if each is None:
            continue
        check_tensor(name, label, each, x, FLOATS)
        if each.shape != x.shape[1:2]:
            raise ValueError(f"{name}: {label} has shape {tuple(each.shape)}, x asks for ({x.shape[1]},)")
    if residual is not None:
        check_tensor(name, "residual", residual, x, (x.dtype,))
        if residual.shape != x.shape:
            raise ValueError(
                f"{name}: x has shape {tuple(x.shape)}, residual {tuple(residual.shape)}; they must be equal, expand it"
            )
    if not (0 <= momentum <= 1 and eps >= 0):
        raise ValueError(f"{name}: momentum={momentum}, eps={eps}; allowed: momentum from 0 to 1, eps from 0")
    mean, rest, scale = running_mean, None, running_var
    if training:
        if x.shape[1] and x.numel() == x.shape[1]:
            raise ValueError(f"{name}: x has shape {tuple(x.shape)}, one value a channel; training needs more than one")
        statistics = _statistics(x.detach(), running_mean, running_var, float(momentum), float(eps))
        mean, rest, scale = statistics.unbind(0)
    if mean is None or scale is None:
        raise ValueError(f"{name}: training=False takes running_mean and running_var; one of them is missing")
    y: torch.Tensor = _batch_norm(x, weight, bias, residual, mean, rest, scale, float(eps), relu)
    return y
