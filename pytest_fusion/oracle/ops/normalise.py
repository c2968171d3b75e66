"""Softmax and normalisation layers, expanded so that their inner sums, exponentials and roots are rounded too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.cancellation import again, of_stored_output
from pytest_fusion.oracle.ops.reduction import average, moments, total
from pytest_fusion.oracle.ops.rule_registry import Op, as_float, computed, dims_from_end, from_end, rank


def _exp(op: Op, below: Tensor) -> Tensor:
    """The argument's noise of 3 units covers ``exp2(x * log2 e)`` and online rescaling."""
    return op.relative(torch.exp(op.relative(below, 3)), 4)


def _score(op: Op, x: Tensor) -> Tensor:
    """Scores as kernels round them: scaled by log2 e before the largest is subtracted, ``exp2(y - max(y))``.

    A compiled fused multiply-add keeps all digits of the product; the interpreter and other compilers do not. The
    largest is rounded in the same way, so that no score overflows that is finite in a kernel.
    """
    noisy = op.relative(op.unrounded(x), 1)
    return _calm(op, x, noisy) if id(x) in op.held else torch.where(x.abs() * op.unit > 1, x, noisy)


def _calm(op: Op, x: Tensor, noisy: Tensor) -> Tensor:
    """``noisy``, but in half of the lanes ``x`` itself where its rounding errors could make an exponential overflow.

    There one kernel may overflow and another may not, and the result of the latter needs lanes that are finite.
    """
    coarse = x.abs() * op.unit > 1
    if not bool(coarse.any()):
        return noisy
    return torch.where(coarse & op.noise.other_half(x), x, noisy)


@computed("_softmax", "_safe_softmax", "softmax")
def _softmax(op: Op, x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
    value = softmax(op, as_float(x), dims_from_end(dim, rank(x)))
    if op.name == "_safe_softmax":
        return torch.where(torch.isneginf(x).all(from_end(dim, rank(x)), True), 0.0, value)
    return value


def softmax(op: Op, x: Tensor, dims: list[int], score: Tensor | None = None) -> Tensor:
    """``score`` is ``x`` as the difference with its largest value may read it, where ``x`` is no operand.

    Of a computed score what is divided may have been computed again: even the only one of a row is not exactly 1 then.
    """
    top = x.amax(dims, True) if x.numel() else x.sum(dims, True)
    grown = _exp(op, (_score(op, x) if score is None else _calm(op, x, score)) - top)
    whole = total(op, grown, dims, True)
    if score is not None or id(x) in op.held:
        second = op.again(x) if score is None else again(x, x)
        grown = _exp(op, _calm(op, x, op.relative(second, 1)) - top)
    # A row with an overflow is rescaled by 0 * inf in kernels that go by blocks.
    return op.relative(torch.where(torch.isinf(whole), math.nan, grown / whole), 2)


@computed("_log_softmax", "log_softmax")
def _log_softmax(op: Op, x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
    x, dims = as_float(x), dims_from_end(dim, rank(x))
    top = x.amax(dims, True) if x.numel() else x.sum(dims, True)
    whole = total(op, _exp(op, _score(op, x) - top), dims, True)
    below = (op.relative(op.again(x), 1) if id(x) in op.held else x) - top
    log = _log(op, whole)
    # x - lse, as kernels that need the log-sum-exp anyway have it: rounded where it is as large as the largest x.
    lse = torch.nan_to_num(top + log, 0.0, 0.0, 0.0)
    return op.relative(op.relative(below, 1) - log, 1) + (lse - op.relative(lse, 1))


def _log(op: Op, value: Tensor) -> Tensor:
    # log2(x) * ln 2: absolute error near one.
    return op.absolute(op.relative(torch.log(value), 4), 2)


@computed("logsumexp")
def _logsumexp(op: Op, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    x, dims = as_float(x), dims_from_end(dim, rank(x))
    if not dims or not x.numel():
        return torch.logsumexp(x, dims, keepdim) if dims else x
    top = x.amax(dims, True)
    top = torch.where(torch.isinf(top), 0.0, top)
    whole = total(op, _exp(op, _score(op, x) - top), dims, True)
    value = op.relative(_log(op, whole) + top, 1)
    return value if keepdim else value.reshape(value.shape[0], *op.outs[0].shape)


def _affine(op: Op, value: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        value = op.relative(value * _trailing(weight, value), 1)
    return value if bias is None else op.relative(value + _trailing(bias, value), 1)


def _trailing(parameter: Tensor, value: Tensor) -> Tensor:
    missing = value.dim() - parameter.dim()
    return as_float(parameter).reshape(parameter.shape[0], *(1,) * missing, *parameter.shape[1:])


@computed("native_layer_norm")
def _layer_norm(
    op: Op, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    x = as_float(x)
    mean, centred, variance = moments(op, x, list(range(-len(shape), 0)))
    root = op.relative(torch.rsqrt(variance + eps), 3)
    return _affine(op, op.relative(centred * root, 1), weight, bias), mean, root


@computed("_fused_rms_norm", "rms_norm", "_fused_rms_norm_cpu")
def _rms_norm(op: Op, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
    x = as_float(x)
    if eps is None:
        out = op.outs[0].dtype
        eps = torch.finfo(out if out == torch.float64 else torch.float32).eps
    dims = list(range(-len(shape), 0))
    root = op.relative(torch.rsqrt(average(op, x.square(), dims, True) + eps), 3)
    value = op.relative(x * root, 1)
    if weight is not None:
        value = op.relative(value * _trailing(weight, value), 1)
    return (value, root) if len(op.outs) > 1 else value


@computed("native_group_norm")
def _group_norm(
    op: Op,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    x = as_float(x)
    grouped = x.reshape(x.shape[0], batch, groups, channels // groups * inner)
    mean, centred, variance = moments(op, grouped, [-1], op.unrounded(x).reshape(-1, *grouped.shape[1:]))
    root = op.relative(torch.rsqrt(variance + eps), 3)
    value = op.relative(centred * root, 1)
    value = value.reshape(value.shape[0], *x.shape[1:])
    value = _per_channel(op, value, weight, bias)
    return value, mean.squeeze(-1), root.squeeze(-1)


def _per_channel(op: Op, value: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift along dim 1 of (L, N, C, ...)."""

    def along(parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else parameter.reshape(parameter.shape[0], -1, *(1,) * (value.dim() - 3))

    return _affine(op, value, along(weight), along(bias))


@computed("_softmax_backward_data")
def _softmax_backward(op: Op, grad: Tensor, output: Tensor, dim: int, *_: Any) -> Tensor:
    spread = op.spreads.get(id(grad))
    grad, output, dims = as_float(grad), as_float(output), dims_from_end(dim, rank(grad))
    whole = total(op, grad * output, dims, True)
    # Kernels have the whole from the forward pass's output (delta), so what was computed twice is subtracted.
    value = op.relative(output * op.relative(op.again(grad) - whole, 1), 2)
    if spread is None or op.noise.kind != "E":
        return value
    value = op.noise.spread(value)
    value[1:].addcmul_(output[:1], of_stored_output(op.noise, output[0], spread, dim), value=-1)
    return value


@computed("_log_softmax_backward_data")
def _log_softmax_backward(op: Op, grad: Tensor, output: Tensor, dim: int, *_: Any) -> Tensor:
    grad, output, dims = as_float(grad), as_float(output), dims_from_end(dim, rank(grad))
    share = op.relative(torch.exp(op.relative(output, 3)), 4)
    scaled = op.relative(share * total(op, grad, dims, True), 1)
    return op.relative(grad - scaled, 1)


@computed("native_layer_norm_backward")
def _layer_norm_backward(
    op: Op,
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    root: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    grad, x = as_float(grad), as_float(x)
    inner = list(range(-len(shape), 0))
    outer = list(range(-rank(x), -len(shape)))
    value = op.relative(op.relative(x - mean, 1) * root, 1)
    scaled = grad if weight is None else op.relative(grad * _trailing(weight, grad), 1)
    return (
        _normalised_backward(op, scaled, value, root, inner, centred=True, product=weight is not None)
        if mask[0]
        else None,
        total(op, grad * value, outer, False) if mask[1] else None,
        total(op, grad, outer, False) if mask[2] else None,
    )


@computed("_fused_rms_norm_backward")
def _rms_norm_backward(
    op: Op, grad: Tensor, x: Tensor, shape: Sequence[int], root: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    grad, x = as_float(grad), as_float(x)
    inner = list(range(-len(shape), 0))
    outer = list(range(-rank(x), -len(shape)))
    value = op.relative(x * root, 1)
    scaled = grad if weight is None else op.relative(grad * _trailing(weight, grad), 1)
    return (
        _normalised_backward(op, scaled, value, root, inner, centred=False) if mask[0] else None,
        total(op, grad * value, outer, False) if mask[1] else None,
    )


def _normalised_backward(
    op: Op, grad: Tensor, value: Tensor, root: Tensor, dims: list[int], *, centred: bool, product: bool = False
) -> Tensor:
    """``root * (g - mean(g) - value * mean(g * value))``, the mean of g only for centred normalisations.

    Where g is a ``product``, a GPU contracts it with the difference into one operation that does not round it, while
    the mean has rounded it: of a single element 4e-6 was left over where plain arithmetic has 0 (root is 316 there).
    """
    along = op.relative(value * average(op, grad * value, dims, True), 1)
    own = op.relative(grad, 1) if product else op.unrounded(grad)
    left = op.relative(own - average(op, grad, dims, True), 1) if centred else grad
    return op.relative(op.relative(left - along, 1) * root, 2)


@computed("_weight_norm_interface")
def _weight_norm(op: Op, v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    dims = [d for d in range(-rank(v), 0) if d != from_end(dim, rank(v))]
    length = op.relative(torch.sqrt(total(op, as_float(v).square(), dims, True)), 2)
    return op.relative(as_float(v) * op.relative(as_float(g) / length, 2), 1), length
