"""Softmax and normalisation layers, expanded so that inner sums, exponentials and roots are rounded too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.cancellation import of_stored_output
from pytest_fusion.oracle.operand import Operand
from pytest_fusion.oracle.ops.reduction import average, moments, total
from pytest_fusion.oracle.ops.rule_registry import Op, as_float, computed, dims_from_end, from_end, rank
from pytest_fusion.oracle.rounding import D

# Of a log-sum-exp: its rounding is then more than what an exponential and a quotient round.
_LARGE = 16.0


def _exp(op: Op, below: Tensor) -> Tensor:
    """The exponential; 3 units of argument noise cover ``exp2(x * log2 e)`` and online rescaling."""
    return op.relative(torch.exp(op.relative(below, 3)), 4)


def _score(op: Op, x: Operand) -> Tensor:
    """Scores as kernels round them: scaled by log2 e before the largest is subtracted, ``exp2(y - max(y))``."""
    # A compiled fused multiply-add keeps all digits of the product; the interpreter and other compilers do not. The
    # largest is rounded alike, so that no score overflows that is finite in a kernel.
    noisy = op.relative(as_float(x.unrounded), 1)
    return calm(op, x.value, noisy) if x.loose else torch.where(x.value.abs() * op.unit > 1, x.value, noisy)


def calm(op: Op, x: Tensor, noisy: Tensor) -> Tensor:
    """``noisy``, with half of the lanes set to ``x`` where rounding errors could make an exponential overflow."""
    # One kernel may overflow there and another may not; the latter needs finite lanes.
    coarse = x.abs() * op.unit > 1
    if not bool(coarse.any()):
        return noisy
    return torch.where(coarse & op.noise.other_half(x), x, noisy)


@computed("_softmax _safe_softmax softmax", operands=True)
def _softmax(op: Op, x: Operand, dim: int, *_: Any, **__: Any) -> Tensor:
    dims = dims_from_end(dim, rank(x.value))
    value = softmax(op, x.value, dims, _score(op, x), x.again if x.loose else None)
    if op.name == "_safe_softmax":
        return torch.where(torch.isneginf(x.value).all(from_end(dim, rank(x.value)), True), 0.0, value)
    return value


def softmax(op: Op, x: Tensor, dims: list[int], score: Tensor, again: Tensor | None) -> Tensor:
    """Softmax of ``x``; ``score`` is ``x`` as the difference with its largest value may read it."""
    # The numerator may be computed ``again`` for a computed score: then a row's only element is not exactly 1.
    top = x.amax(dims, True) if x.numel() else x.sum(dims, True)
    grown = _exp(op, score - top)
    whole = total(op, grown, dims, True)
    if again is not None:
        grown = _exp(op, calm(op, x, op.relative(again, 1)) - top)
    # Kernels that go by blocks rescale a row with an overflow by 0 * inf.
    value = op.relative(torch.where(torch.isinf(whole), math.nan, grown / whole), 2)
    log = torch.log(whole)
    lse = torch.where(torch.isfinite(top + log), top + log, 0.0)
    # exp(x - lse), as in kernels that save the log-sum-exp: rounded at the size of the largest x, it keeps no more of a
    # row's sum than that (Liger's fused_ce_tvd). Of small ones the noise above is larger.
    large = lse.abs() > _LARGE
    if not bool(large.any()):
        return value
    missed = torch.where(large, lse - op.relative(lse, 1), 0.0)
    return value * torch.exp(torch.minimum(torch.maximum(missed, -log), log))


@computed("_log_softmax log_softmax", operands=True)
def _log_softmax(op: Op, operand: Operand, dim: int, *_: Any, **__: Any) -> Tensor:
    x, dims = operand.value, dims_from_end(dim, rank(operand.value))
    top = x.amax(dims, True) if x.numel() else x.sum(dims, True)
    whole = total(op, _exp(op, _score(op, operand) - top), dims, True)
    below = (op.relative(operand.again, 1) if operand.loose else x) - top
    log = _log(op, whole)
    # x - lse, as in kernels that need the log-sum-exp anyway: rounded at the size of the largest x.
    lse = torch.nan_to_num(top + log, 0.0, 0.0, 0.0)
    return op.relative(op.relative(below, 1) - log, 1) + (lse - op.relative(lse, 1))


def _log(op: Op, value: Tensor) -> Tensor:
    # log2(x) * ln 2: absolute error near one.
    return op.absolute(op.relative(torch.log(value), 4), 2)


@computed("logsumexp", operands=True)
def _logsumexp(op: Op, operand: Operand, dim: Any, keepdim: bool = False) -> Tensor:
    x, dims = as_float(operand.value), dims_from_end(dim, rank(operand.value))
    if not dims or not x.numel():
        return torch.logsumexp(x, dims, keepdim) if dims else x
    top = x.amax(dims, True)
    top = torch.where(torch.isinf(top), 0.0, top)
    whole = total(op, _exp(op, _score(op, operand) - top), dims, True)
    value = op.relative(_log(op, whole) + top, 1)
    return value if keepdim else value.reshape(value.shape[0], *op.outs[0].shape)


def _affine(op: Op, value: Tensor, weight: Operand | None, bias: Operand | None, dim: int = 0) -> Tensor:
    """``value`` times weight plus bias, which are at the last dims, or along ``dim`` of lanes (L, N, C, ...)."""

    def placed(parameter: Operand) -> Tensor:
        wide = as_float(parameter.value)
        if dim:
            return wide.reshape(wide.shape[0], *(1,) * (dim - 1), -1, *(1,) * (value.dim() - dim - 1))
        return wide.reshape(wide.shape[0], *(1,) * (value.dim() - wide.dim()), *wide.shape[1:])

    if weight is not None:
        value = op.relative(value * placed(weight), 1)
    return value if bias is None else op.relative(value + placed(bias), 1)


def _standard(op: Op, x: Tensor, dims: list[int], read: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` with mean 0 and variance 1 over ``dims``, its mean, and the reciprocal of its standard deviation."""
    mean, centred, variance = moments(op, x, dims, read)
    root = op.relative(torch.rsqrt(variance + eps), 3)
    return op.relative(centred * root, 1), mean, root


@computed("native_layer_norm", operands=True)
def _layer_norm(
    op: Op, x: Operand, shape: Sequence[int], weight: Operand | None, bias: Operand | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    value, mean, root = _standard(op, x.value, list(range(-len(shape), 0)), x.unrounded, eps)
    return _affine(op, value, weight, bias), mean, root


@computed("_fused_rms_norm rms_norm", operands=True)
def _rms_norm(op: Op, operand: Operand, shape: Sequence[int], weight: Operand | None, eps: float | None) -> Any:
    x = operand.value
    eps = torch.finfo(D if op.wide else torch.float32).eps if eps is None else eps
    root = op.relative(torch.rsqrt(average(op, x.square(), list(range(-len(shape), 0)), True) + eps), 3)
    value = _affine(op, op.relative(x * root, 1), weight, None)
    return (value, root) if len(op.outs) > 1 else value


@computed("native_group_norm", operands=True)
def _group_norm(
    op: Op, x: Operand, weight: Operand | None, bias: Operand | None, batch: int, *sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    channels, inner, groups, eps = sizes
    grouped, read = (
        value.reshape(value.shape[0], batch, groups, channels // groups * inner) for value in (x.value, x.unrounded)
    )
    value, mean, root = _standard(op, grouped, [-1], read, eps)
    value = _affine(op, value.reshape(value.shape[0], *x.value.shape[1:]), weight, bias, dim=2)
    return value, mean.squeeze(-1), root.squeeze(-1)


@computed("_softmax_backward_data", operands=True)
def _softmax_backward(op: Op, grad: Operand, given: Operand, dim: int, *_: Any) -> Tensor:
    output, spread, dims = given.value, grad.lanes.spread, dims_from_end(dim, rank(grad.value))
    whole = total(op, grad.value * output, dims, True)
    # Kernels take the sum from the forward pass's output (delta), so a value computed twice is subtracted.
    value = op.relative(output * op.relative(grad.again - whole, 1), 2)
    if spread is None or op.noise.kind != "E":
        return value
    value = op.noise.spread(value)
    value[1:].addcmul_(output[:1], of_stored_output(op.noise, output[0], spread[0], dim), value=-1)
    return value


@computed("_log_softmax_backward_data")
def _log_softmax_backward(op: Op, grad: Tensor, output: Tensor, dim: int, *_: Any) -> Tensor:
    grad, output, dims = as_float(grad), as_float(output), dims_from_end(dim, rank(grad))
    share = op.relative(torch.exp(op.relative(output, 3)), 4)
    scaled = op.relative(share * total(op, grad, dims, True), 1)
    return op.relative(grad - scaled, 1)


@computed("native_layer_norm_backward _fused_rms_norm_backward", operands=True)
def _norm_backward(op: Op, grad: Operand, x: Operand, shape: Sequence[int], *rest: Any) -> tuple[Tensor | None, ...]:
    """``root * (g - mean(g) - value * mean(g * value))`` and the gradients of weight and bias that the mask wants."""
    # Only a layer norm has the mean and a bias. Where g is a product, a GPU contracts it with the difference and leaves
    # it unrounded, but the mean has rounded it: a single element gave 4e-6 instead of 0 (root is 316 there).
    *mean, root, weight = rest[: 3 if op.name.startswith("native") else 2]
    value = op.relative(x.value - mean[0].value, 1) if mean else x.value
    value = op.relative(value * root.value, 1)
    dims, outer = list(range(-len(shape), 0)), list(range(-rank(value), -len(shape)))
    scaled, wanted = _affine(op, grad.value, weight, None), rest[-1]
    found: list[Tensor | None] = [None] * len(wanted)
    if wanted[0]:
        along = op.relative(value * average(op, scaled * value, dims, True), 1)
        left = scaled
        if mean:
            own = grad.unrounded if weight is None else op.relative(scaled, 1)
            left = op.relative(own - average(op, scaled, dims, True), 1)
        found[0] = op.relative(op.relative(left - along, 1) * root.value, 2)
    if wanted[1]:
        found[1] = total(op, grad.value * value, outer, False)
    if mean and wanted[2]:
        found[2] = total(op, grad.value, outer, False)
    return tuple(found)


@computed("_weight_norm_interface")
def _weight_norm(op: Op, v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    dims = [d for d in range(-rank(v), 0) if d != from_end(dim, rank(v))]
    length = op.relative(torch.sqrt(total(op, as_float(v).square(), dims, True)), 2)
    return op.relative(as_float(v) * op.relative(as_float(g) / length, 2), 1), length
