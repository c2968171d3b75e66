"""Matrix products and convolutions with float accumulators, and the truncation of tensor cores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.drift import product_drift, steps
from pytest_fusion.oracle.lane_store import Lanes
from pytest_fusion.oracle.operand import Operand
from pytest_fusion.oracle.ops.rule_registry import Op, as_float, computed, each
from pytest_fusion.oracle.rounding import GRIDS, D, unit

# Tensor cores add products in groups, and truncate the accumulator and each product (Fasi et al. 2021, "Numerical
# behavior of NVIDIA tensor cores"): a drift towards zero, in units a term. Sums of K = 256 to 4096 positive terms were
# 0.074 to 0.096 K too small on an H200 in float16 (0.02 to 0.05 K in bfloat16), 0.16 K where one term is large and
# comes first, up to 0.19 K where all are equal. Sums of both signs scatter by 0.02 K of the root of their squares.
GROUP = 16
_LOST, _SCATTER = 0.1, 0.02
# Elsewhere a library adds in float32, possibly in groups.
_LOST_ON_CPU = 1 / (3 * GROUP)
# In an accumulator that begins with a bias each term costs up to 0.16 units of the bias: as much as K^2 times this
# constant roundings of its own (``Op.carried``).
_CARRIED = 0.14
# Float8 products that Hopper's tensor cores add before a kernel takes over the sum, and the cost (`added_coarsely`).
EIGHTHS = 128
_CUT, _SCATTERED = 6.2e-4, 4e-4


def product(op: Op, a: Operand | Tensor, b: Operand | Tensor) -> Tensor:
    """``a @ b`` over the last two dims of lanes (L, ..., M, K) and (L, ..., K, N)."""
    one, other = _operand(a), _operand(b)
    low_one, low_other = _low(one, other), _low(other, one)
    if low_one is None and low_other is None and one.source and other.source:
        # Queries and keys that were rotated or normed: both are computed, and stored in 16 bits before the product.
        left, right = _fed(op, one.value, None, other.source), _fed(op, other.value, None, one.source)
    else:
        left, right = _fed(op, one.value, low_one, low_other), _fed(op, other.value, low_other, low_one)
    coarse = op.noise.tf32 and not op.wide
    left, right = (op.noise.in_tf32(left), op.noise.in_tf32(right)) if coarse else (left, right)
    value = torch.matmul(left, right[0] if right.shape[0] == 1 and right.dim() == 3 else right)
    first, second = left[0], right[0]
    squares = torch.matmul(first.square(), second.square())
    terms = left.shape[-1]
    if low_one and low_other:
        op.spread = squares.sqrt() * max(unit(low_one), unit(low_other))
    if coarse or low_one or low_other:
        value = truncated(op, value, squares, terms)
    if one.eighth and other.eighth:
        value = added_coarsely(op, value, squares, terms)
    value = op.accumulated(value, squares, terms, lambda: torch.matmul(first.abs(), second.abs()))
    value = _without_zeros(op, value, first, second, terms, torch.matmul)
    chains = one.lanes.chain, other.lanes.chain
    if any(chain is not None for chain in chains):
        # With a factor that is a sum, ``x @ (q * s + m)`` is also ``s * (x @ q) + m * sum(x)``. Kernels for 4-bit
        # weights do this (llama.cpp's q4_1). The parts round when scaled and added.
        sizes = (f.abs() if c is None else c[0].sqrt() for f, c in zip((first, second), chains, strict=True))
        value = op.noise.scattered(value, torch.matmul(*sizes) * op.unit)
    return op.noise.off(value, product_drift(first, second, value[0], op.unit))


def _operand(value: Operand | Tensor) -> Operand:
    """An operand; of a tensor that the rule computed itself only the values are known."""
    return value if isinstance(value, Operand) else Operand(value, Lanes(value, value), value)


def _low(operand: Operand, other: Operand) -> torch.dtype | None:
    """The 16-bit dtype that holds an operand's values, if one does."""
    # Integers beside float32 have none: 8 bits fit bfloat16, and a kernel that rounded the float32 factor to bfloat16
    # passed. Beside a factor from 16 bits both go to tensor cores in 16 bits.
    if operand.low is None and operand.codes and (other.low or other.source) is None:
        return None
    return operand.low or _narrow(operand.value)


def _fed(op: Op, value: Tensor, low: torch.dtype | None, other: torch.dtype | None) -> Tensor:
    """A computed float32 operand as tensor cores get it beside a low-precision one: in the other's dtype."""
    # Fused attention and MLP kernels store probabilities and activations like this between two products; a reference
    # that upcasts its inputs keeps them in float32. Inputs that are float32 themselves stay unchanged.
    if op.noise.kind != "E" or op.wide or value.shape[0] == 1 or low is not None or other is None:
        return value
    # Rounded before or after the division by its sum, so at a random scale: values on the grid one way are not on it
    # the other way. Equal values, as weights of equal scores, share their error. Others have the error of one rounding,
    # or an accumulator of 16 bits hides in it (33 roundings of a weight gradient passed).
    scale = torch.exp2(op.noise.uniform((1,) * (value.dim() - 1), value.device) / 2 - 0.5)
    fed = op.noise.spread(value)
    lanes = fed[1:]
    near = (lanes * scale).to(other).to(fed.dtype) / scale
    # What exceeds the other's range is infinity in a kernel, or is at a scale where it fits.
    near[1::2] = torch.where(torch.isfinite(near[1::2]), near[1::2], lanes[1::2])
    near[::2] = torch.where(lanes[::2].abs() > torch.finfo(other).max, lanes[::2].sign() * math.inf, near[::2])
    lanes.copy_(near)
    return fed


def truncated(op: Op, value: Tensor, squares: Tensor, terms: int) -> Tensor:
    """``value`` with lanes drifting towards zero, as on tensor cores; ``squares`` (*shape) sums the squared terms."""
    if op.wide or terms <= GROUP:
        return value
    if not value.is_cuda:
        return _lossy(op, value, op.unit * terms * _LOST_ON_CPU)
    op.made = max(terms, int(_CARRIED * terms * terms))
    return _lossy(op, value, op.unit * terms * _LOST, squares.sqrt() * (op.unit * terms * _SCATTER))


def added_coarsely(op: Op, value: Tensor, squares: Tensor, terms: int) -> Tensor:
    """Products of float8 on Hopper, whose tensor cores keep some 14 bits of a sum and cut off the rest.

    Accurate kernels add each ``EIGHTHS`` of them to a float32 accumulator (DeepSeek-V3, section 3.3.2;
    ``use_fast_accum=False``; Triton's ``max_num_imprecise_acc``). On an H200 these sums of positive terms were 6.2e-4
    too small, and sums of both signs scattered by 1.3e-4 of the root of their squares, by 3e-4 where factors differ by
    2^12. Without that accumulator 4096 positive terms lose 7 %, which must not pass.
    """
    return value if op.wide else _lossy(op, value, _CUT * min(1.0, terms / EIGHTHS), squares.sqrt() * _SCATTERED)


def _lossy(op: Op, value: Tensor, lost: float, deviation: Tensor | None = None) -> Tensor:
    """``value`` with lanes up to twice the share ``lost`` closer to zero, all alike, and scattered."""
    out = op.noise.spread(value)
    share = op.noise.uniform((1,) * (value.dim() - 1), value.device).add(1)
    out[1:].sub_(torch.where(torch.isfinite(out[1:]), out[1:], 0.0) * share * lost)
    return out if deviation is None else op.noise.scattered(out, deviation)


def _narrow(value: Tensor) -> torch.dtype | None:
    """The 16-bit dtype whose values these are, by significant bits; None where some have more, or all at most four."""
    # Masks, one-hot rows and small integers indicate no low-precision input.
    bits = (value[1] if value.shape[0] > 1 else value[0]).contiguous().view(torch.int64)
    if not bool((bits & ((1 << 49) - 1)).any()):
        return None
    for dtype in (torch.bfloat16, torch.float16):
        if not bool((bits & ((1 << (53 - GRIDS[dtype].bits)) - 1)).any()):
            return dtype
    return None


computed("mm bmm", operands=True)(lambda op, a, b, *_, **__: product(op, a, b))


@computed("addmm baddbmm", operands=True)
def _addmm(op: Op, bias: Operand, a: Operand, b: Operand, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _biased(op, product(op, a, b), bias.value, beta, alpha, op.made or steps(a.value[0], b.value[0]))


def _biased(op: Op, value: Tensor, bias: Tensor, beta: float, alpha: float, terms: int) -> Tensor:
    bias, missing = as_float(bias), value.dim() - bias.dim()
    bias = bias.reshape(bias.shape[0], *(1,) * missing, *bias.shape[1:]) * beta
    value = value * alpha
    total = value + bias if beta else value
    size = torch.maximum(bias[0].abs().expand(total.shape[1:]), total[0].abs())
    return op.relative(op.carried(total, size, terms), 1)


@computed("mv")
def _mv(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return product(op, a, b.unsqueeze(-1)).squeeze(-1)


@computed("addmv")
def _addmv(op: Op, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _biased(op, _mv(op, a, b), bias, beta, alpha, op.made or a.shape[-1])


computed("dot vdot")(lambda op, a, b: product(op, a.unsqueeze(-2), b.unsqueeze(-1)).squeeze(-1).squeeze(-1))


@computed("addr")
def _addr(op: Op, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    outer = as_float(a).unsqueeze(-1) * as_float(b).unsqueeze(-2)
    return _biased(op, op.relative(outer, 1), bias, beta, alpha, 1)


@computed("addbmm")
def _addbmm(op: Op, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    joined_a = a.transpose(-3, -2).flatten(-2)
    joined_b = b.flatten(-3, -2)
    return _biased(op, product(op, joined_a, joined_b), bias, beta, alpha, op.made or joined_a.shape[-1])


@computed("convolution _convolution cudnn_convolution mkldnn_convolution")
def _convolution(op: Op, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    x, weight = as_float(x), as_float(weight)
    low_x, low_weight = _narrow(x), _narrow(weight)
    x, weight = _fed(op, x, low_x, low_weight), _fed(op, weight, low_weight, low_x)
    if op.noise.tf32 and not op.wide:
        x, weight = op.noise.in_tf32(x), op.noise.in_tf32(weight)
    stride, padding, dilation, transposed, output_padding, groups = rest[:6]

    def convolve(a: Tensor, w: Tensor) -> Tensor:
        return torch.convolution(a, w, None, stride, padding, dilation, transposed, output_padding, groups)

    value = each(convolve, x, weight)
    squares = convolve(x[0].square(), weight[0].square())
    channels = weight.shape[1] // groups if transposed else weight.shape[2]
    terms = channels * math.prod(weight.shape[3:])
    if low_x is not None and low_weight is not None:
        value = truncated(op, value, squares, terms)
    value = op.accumulated(value, squares, terms, lambda: convolve(x[0].abs(), weight[0].abs()))
    value = _without_zeros(op, value, x[0], weight[0], terms, convolve)
    if bias is None:
        return value
    wide = as_float(bias).reshape(bias.shape[0], 1, -1, *(1,) * (x.dim() - 3))
    return _biased(op, value, wide, 1, 1, terms)


def _without_zeros(
    op: Op, value: Tensor, x: Tensor, w: Tensor, terms: int, multiply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """``value`` with half of the lanes from a kernel that skips products with 0, where others add 0 * NaN.

    Attention skips masked keys, a sum over one group's rows the other groups, and torch itself some padding of a
    convolution: on a CPU a NaN weight reaches past the edge in float16, but not in float32. ``x`` and ``w`` (*shape)
    are the oracle's factors.
    """
    if bool(torch.isfinite(value[0]).all()):
        return value

    def reached(*pairs: tuple[Tensor, Tensor]) -> Tensor:
        return torch.stack([multiply(one.to(D), other.to(D)) > 0 for one, other in pairs]).any(0)

    inf = math.inf
    above, below = (
        reached((f > 0, w == inf), (f < 0, w == -inf), (f == inf, w > 0), (f == -inf, w < 0)) for f in (x, -x)
    )
    neither = reached((x.isnan(), w != 0), (x != 0, w.isnan()))
    even_x, even_w = (torch.where(torch.isfinite(factor), factor, 0.0) for factor in (x, w))
    left_out = op.accumulated(multiply(even_x, even_w)[None], multiply(even_x.square(), even_w.square()), terms)
    for there, what in ((above, inf), (below, -inf), (neither, math.nan)):
        left_out = torch.where(there, left_out + what, left_out)
    out, other = op.noise.spread(value), op.noise.spread(left_out)
    out[1::2] = torch.where(torch.isfinite(out[1::2]), out[1::2], other[1::2])
    return out


@computed("convolution_backward")
def _convolution_backward(op: Op, grad: Tensor, x: Tensor, weight: Tensor, sizes: Any, *rest: Any) -> tuple[Any, ...]:
    low, low_x, low_weight = (_narrow(value) for value in (grad, x, weight))
    grad = _fed(op, grad, low, low_x or low_weight)
    x, weight = _fed(op, x, low_x, low), _fed(op, weight, low_weight, low)
    if op.noise.tf32 and not op.wide:
        grad, x, weight = (op.noise.in_tf32(factor) for factor in (grad, x, weight))
    wanted = rest[-1]

    def backward(g: Tensor, a: Tensor, w: Tensor) -> Any:
        return torch.ops.aten.convolution_backward(g, a, w, sizes, *rest)

    values = each(backward, grad, x, weight)
    squares = backward(grad[0].square(), x[0].square(), weight[0].square())
    positions = grad.shape[1] * math.prod(grad.shape[3:])
    terms = (weight.shape[1] * math.prod(weight.shape[3:]), positions, positions)
    return tuple(op.accumulated(values[i], squares[i], terms[i]) if wanted[i] else None for i in range(3))
