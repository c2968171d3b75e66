"""Arithmetic, elementary functions and activations with their derivatives, element by element.

Noise is in units of the arithmetic's roundoff (2^-24 below float64). Stochastic rounding of the result covers a plain
rounding. The noise here covers what honest kernels do otherwise: a reciprocal and a product instead of a division (2
units), ``exp2(x * log2 e)`` for ``exp`` (the argument moves by a unit, so the result by |x| units), library functions
of a few units, and ``2 * sigmoid(2x) - 1`` for ``tanh`` (absolute, near zero).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.ops.rule_registry import Op, Rule, aligned, as_float, computed, pointwise
from pytest_fusion.oracle.python_numbers import held, mixed
from pytest_fusion.oracle.rounding import NARROW


@pointwise("square frac ldexp copysign", numbers=True)
@pointwise("leaky_relu leaky_relu_backward hardtanh_backward")
def _plain(op: Op, *args: Any, **kwargs: Any) -> Any:
    return getattr(torch.ops.aten, op.name)(*args, **kwargs)


@computed("lerp")
def _lerp(op: Op, a: Tensor, b: Tensor, weight: Any) -> Tensor:
    """``a + weight * (b - a)``, or in every other lane ``(1 - weight) * a + weight * b``."""
    a, b, weight = (as_float(v) for v in aligned(op, (a, b, op.number(weight, rest=True))))
    out = op.noise.spread(torch.lerp(a, b, weight if isinstance(weight, Tensor) else float(weight)))
    out[1::2] = op.noise.spread(a + op.relative(weight * op.relative(b - a, 1), 1))[1::2]
    out[2::2] = (op.relative(a * (1 - weight), 1) + op.relative(b * weight, 1))[2::2]
    return out


@computed("add")
def _add(op: Op, a: Any, b: Any, alpha: float = 1) -> Tensor:
    a, b, factor = (as_float(v) for v in aligned(op, [op.number(v) for v in (a, b, alpha)]))
    total: Tensor = a + (b if isinstance(factor, int) and factor == 1 else _scaled(op, b, factor))
    if isinstance(factor, Tensor) and op.outs[0].dtype in NARROW:
        # ATen's CPU code takes it in 16 bits.
        total = mixed(op.noise, [total], [a + b * held(alpha, op.outs[0].dtype)])[0]
    if op.terms > 1:
        sizes = (v[:1].abs() if isinstance(v, Tensor) else total.new_tensor(abs(v)) for v in (a, b))
        size = functools.reduce(torch.maximum, sizes, total[:1].abs())
        return op.carried(total, size[0], op.terms)
    return total


def _rounded(op: Op, value: Tensor) -> Tensor:
    """A product inside an operation, as a kernel that does not contract it rounds it."""
    return op.relative(value, 1) if op.wide else op.noise.rounded(value, torch.float32)


def _scaled(op: Op, term: Any, factor: Any) -> Any:
    """A term of a sum times a number."""
    product = term * factor
    exact = not isinstance(product, Tensor) or (not isinstance(factor, Tensor) and _power_of_two(factor))
    return product if exact else _rounded(op, product)


def _power_of_two(value: Any) -> Any:
    """Whether a number, or (bool) each element of a tensor, is a power of two: dividing by it is exact."""
    if isinstance(value, Tensor):
        return value.to(torch.float64).frexp().mantissa.abs() == 0.5
    return isinstance(value, (int, float)) and value != 0 and math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5


def _exact_where(op: Op, exact: Any, value: Tensor, noisy: Callable[[], Tensor]) -> Tensor:
    op.exact = exact
    if not isinstance(exact, Tensor):
        return value if exact else noisy()
    return torch.where(exact, value, noisy()) if bool(exact.any()) else noisy()


@pointwise("mul", numbers=True)
def _mul(op: Op, a: Any, b: Any) -> Tensor:
    if op.wide:
        op.exact = _power_of_two(a) | _power_of_two(b)
    value: Tensor = a * b
    return value


@pointwise("div")
def _div(op: Op, a: Tensor, b: Any) -> Tensor:
    value = a / b
    return _exact_where(op, _power_of_two(b), value, lambda: op.relative(value, 2))


@computed("addcdiv")
def _addcdiv(op: Op, c: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Tensor:
    c, a, b, factor = (as_float(v) for v in aligned(op, (c, a, b, op.number(value))))
    total: Tensor = c + _scaled(op, op.relative(a / b, 2), factor)
    return total


@computed("addcmul")
def _addcmul(op: Op, c: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Tensor:
    """``c + value * a * b``: both orders round twice, and both round ``value`` itself."""
    c, a, b, factor = (as_float(v) for v in aligned(op, (c, a, b, op.number(value))))
    total: Tensor = c + _scaled(op, _rounded(op, a * b), factor)
    return total


def _noisy(names: str, units: float, absolute: float = 0.0, argument: float = 0.0) -> None:
    """Enter functions with errors of ``units`` of the result, ``absolute`` ones, and of their ``argument``."""

    @pointwise(names)
    def rule(op: Op, *args: Tensor) -> Tensor:
        read = [op.relative(value, argument) if argument else value for value in args]
        value = op.relative(getattr(torch.ops.aten, op.name)(*read), units)
        return op.absolute(value, absolute) if absolute else value


_noisy("sqrt", 2)
_noisy("rsqrt hypot", 3)
# ``x * pi / 180`` has two roundings more, and one of the number.
_noisy("deg2rad rad2deg", 3)
_noisy("exp", 3, argument=2)
_noisy("expm1 log1p erf", 4)
_noisy("erfc", 6, absolute=1)
# log is log2(x) * ln 2 on a GPU: near one the error is absolute.
_noisy("log log2 log10", 4, absolute=2)
_noisy("sin cos", 4, absolute=1)
_noisy("tan asin acos atan sinh cosh asinh", 6, absolute=1)
_noisy("atan2", 6)
_noisy("acosh atanh lgamma digamma erfinv sinc", 8, absolute=2)
# ``m + log(e^(a - m) + e^(b - m))`` rounds a sum from 1 to 2: an absolute error, as in softplus of a - b.
_noisy("logaddexp", 4, absolute=2)


@pointwise("exp2")
def _exp2(op: Op, x: Tensor) -> Tensor:
    """2^x, exact for whole x, so that what it scales (microscaling formats) keeps its ties."""
    return _exact_where(op, x == x.round(), torch.exp2(x), lambda: op.relative(torch.exp2(op.relative(x, 1)), 3))


@pointwise("xlogy", numbers=True)
def _xlogy(op: Op, x: Any, y: Any) -> Tensor:
    """``x * log(y)`` with the error of the logarithm, and exactly 0 where ``x`` is."""
    exact = torch.xlogy(x, y)
    log = op.absolute(op.relative(torch.log(y if isinstance(y, Tensor) else torch.full_like(exact, y)), 4), 2)
    return torch.where(torch.isfinite(exact) & (exact != 0), x * log, exact)


@pointwise("tanh")
def tanh(op: Op, x: Tensor) -> Tensor:
    return op.absolute(op.relative(torch.tanh(x), 4), 2)


@pointwise("sigmoid")
def sigmoid(op: Op, x: Tensor) -> Tensor:
    """Sigmoid, below float64 with float32's range: a GPU flushes a smaller share, and ``x`` times that is zero."""
    grown = op.relative(torch.exp(-op.relative(x, 2)), 3)
    share = op.relative(1 / (1 + grown), 3)
    return share if op.wide else op.noise.rounded(share, torch.float32)


@pointwise("gelu")
def gelu(op: Op, x: Tensor, approximate: str = "none") -> Tensor:
    """GELU; in the negative tail 1 + erf (1 + tanh) has only the absolute error of erf."""
    if approximate == "tanh":
        inner = op.relative(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x), 4)
        share = tanh(op, inner)
    else:
        share = op.relative(torch.erf(op.relative(x * math.sqrt(0.5), 2)), 4)
    return op.relative(0.5 * x * (1 + share), 2)


@pointwise("softplus")
def softplus(op: Op, x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    # log(1 + e^x) rounds 1 + e^x: an absolute error in units of 1 / beta.
    smooth = op.absolute(op.relative(torch.nn.functional.softplus(x * beta, 1, 1e9), 4), 2) / beta
    return torch.where(x * beta > threshold, x, smooth)


@pointwise("elu")
def _elu(op: Op, x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    below = op.absolute(op.relative(torch.expm1((x * input_scale).clamp_max(0)), 4), 2)
    return torch.where(x > 0, x * scale, below * (alpha * scale))


@pointwise("hardsigmoid")
def _hardsigmoid(op: Op, x: Tensor) -> Tensor:
    """``x / 6 + 0.5``, whose error is absolute near its zero."""
    return op.absolute(op.relative((x + 3) / 6, 2), 1).clamp(0, 1)


@pointwise("pow")
def _pow(op: Op, base: Any, exponent: Any) -> Tensor:
    value = torch.pow(base, exponent)
    if isinstance(exponent, (int, float)):
        if exponent in (0, 1, 2):
            return value
        if exponent in (3, 4, 0.5, -0.5, -1, -2, 1.5):
            return op.relative(value, 3)
    # exp2(y log2 x): rounding the exponent moves the result by |y log x| units.
    scale = (exponent * torch.log(base.abs() if isinstance(base, Tensor) else value.new_tensor(abs(base)))).abs()
    scale = torch.where(torch.isfinite(scale), scale, 0.0)
    out = op.noise.spread(value)
    units = (4 + 2 * scale) * op.unit
    units = units[1:] if units.shape[0] > 1 else units
    out[1:].mul_(1 + units * op.noise.uniform(tuple(out.shape[1:]), out.device))
    whole = exponent == exponent.round() if isinstance(exponent, Tensor) else float(exponent).is_integer()
    return _exact_where(op, _power_of_two(base) & whole, value, lambda: out)


@pointwise("silu_backward")
def _silu_backward(op: Op, grad: Tensor, x: Tensor) -> Tensor:
    gate = sigmoid(op, x)
    return op.relative(grad * op.absolute(gate * (1 + x * (1 - gate)), 1), 3)


@pointwise("gelu_backward")
def _gelu_backward(op: Op, grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        scale = math.sqrt(2 / math.pi)
        share = tanh(op, op.relative(scale * (x + 0.044715 * x**3), 4))
        slope = op.absolute(1 - share * share, 2) * scale * (1 + 3 * 0.044715 * x * x)
        return op.relative(grad * (op.absolute(0.5 * (1 + share), 1) + 0.5 * x * slope), 3)
    share = op.relative(torch.erf(op.relative(x * math.sqrt(0.5), 2)), 4)
    density = op.relative(torch.exp(-0.5 * op.relative(x * x, 2)), 4) / math.sqrt(2 * math.pi)
    return op.relative(grad * (op.absolute(0.5 * (1 + share), 1) + x * density), 3)


_FORMULAS: dict[str, Rule] = {
    "reciprocal": lambda op, x: _div(op, torch.ones_like(x[:1]), x),
    "log_sigmoid_forward": lambda op, x: (op.absolute(op.relative(torch.nn.functional.logsigmoid(x), 4), 2), None),
    "silu": lambda op, x: op.relative(x * sigmoid(op, x), 1),
    "mish": lambda op, x: op.relative(x * tanh(op, softplus(op, x)), 2),
    "hardswish": lambda op, x: op.relative(x * _hardsigmoid(op, x), 1),
    "sigmoid_backward": lambda op, grad, output: op.relative(grad * output * (1 - output), 3),
    # 1 - y * y cancels where tanh saturates; the rounding of the square remains.
    "tanh_backward": lambda op, grad, output: op.relative(grad * op.absolute(1 - output * output, 1), 2),
    "softplus_backward": lambda op, grad, x, beta, threshold: torch.where(
        x * beta > threshold, grad, op.relative(grad * sigmoid(op, x * beta), 2)
    ),
    # 1 - sigmoid(x) is equal, and rounds at the size of 1.
    "log_sigmoid_backward": lambda op, grad, x, *_: op.relative(grad * op.absolute(sigmoid(op, -x), 1), 2),
}
for _name, _formula in _FORMULAS.items():
    pointwise(_name)(_formula)
computed("sub")(lambda op, a, b, alpha=1: _add(op, a, b, -alpha))
computed("rsub")(lambda op, a, b, alpha=1: _add(op, b, a, -alpha))


def over(lanes: Tensor, shape: Sequence[int]) -> Tensor:
    """Lanes ``(K, ...)`` broadcast to ``(K, *shape)``; torch alone would align the lanes' axis with a dimension."""
    missing = (1,) * (len(shape) + 1 - lanes.ndim)
    return lanes.reshape(lanes.shape[0], *missing, *lanes.shape[1:]).expand(-1, *shape)


@computed("_to_copy copy")
def _cast(op: Op, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A cast: readers of the raw value get it before rounding to the new dtype. ``copy`` has the old value first."""
    out = op.outs[0]
    if op.name == "copy":
        x = over(args[0], out.shape)
    x = x.to(out.device)
    if out.dtype.is_floating_point:
        return as_float(x)
    if x.dtype.is_floating_point:
        # Converting what an integer dtype cannot hold is undefined: those elements follow the native result.
        if out.dtype == torch.bool:
            return x != 0
        fits = torch.isfinite(x) & (x.abs() < 2.0**62)
        return torch.where(fits, torch.where(fits, x, 0.0).to(out.dtype), out.unsqueeze(0))
    return x.to(out.dtype)
