"""NVIDIA's libdevice in numpy, by symbol: what ``triton.language.extra.libdevice`` calls on a GPU.

Transcendental functions are computed in float64 and rounded once, so a float32 result is within one unit of the true
value; the device's are documented to 1-4 units (CUDA C++ Programming Guide, "Mathematical Functions"). The ``fast_``
forms compute the same function here. Symbols: https://docs.nvidia.com/cuda/libdevice-users-guide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from pytest_fusion.errors import NotModelledError
from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.compute.arith import elementwise, fused_multiply_add, multiply_high
from pytest_fusion.interpreter.compute.casts import convert

Function = Callable[..., Any]

_F64 = np.float64
_NORMAL = NormalDist()
_ROOT_2 = math.sqrt(2.0)


def _round_half_away(x: Array) -> Array:
    whole = np.trunc(x)
    return np.asarray(whole + np.copysign((np.abs(x - whole) >= 0.5).astype(x.dtype), x))


def _ieee_remainder(x: Array, y: Array) -> Array:
    def one(a: float, b: float) -> float:
        try:
            return math.remainder(a, b)
        except ValueError:
            return math.nan

    return np.asarray(np.vectorize(one, otypes=[_F64])(x, y))


def _turns(function: Function) -> Function:
    """``function(pi * x)`` with the argument reduced exactly first."""
    return lambda x: function(np.pi * np.fmod(x, 2.0))


def _norm(*parts: Array) -> Array:
    return np.asarray(np.sqrt(sum(p * p for p in parts)))


def _gamma(x: float) -> float:
    """Gamma; NaN at negative integers and minus infinity, signed infinity at zero and beyond float64."""
    if x == 0.0:
        return math.copysign(math.inf, x)
    try:
        return math.gamma(x)
    except ValueError:
        return math.nan
    except OverflowError:
        return math.inf


def _log_gamma(x: float) -> float:
    """log|Gamma|; infinity at zero and the negative integers."""
    try:
        return math.lgamma(x)
    except (ValueError, OverflowError):
        return math.inf


# torch's operators would count among the launches and writes of the call whose kernel is interpreted.
def _normal_quantile(p: float) -> float:
    """The z that a standard normal stays below with probability ``p``."""
    if not 0.0 < p < 1.0:
        return math.copysign(math.inf, p - 0.5) if p in (0.0, 1.0) else math.nan
    return _NORMAL.inv_cdf(p)


def _erf_inverse(x: float) -> float:
    """Inverse of ``erf``, by the quantile and near 0 by two terms of its series: within 1e-12 of itself."""
    if abs(x) < 1e-3:
        return math.sqrt(math.pi) / 2.0 * x * (1.0 + math.pi / 12.0 * x * x)
    return math.copysign(_normal_quantile((1.0 - abs(x)) / 2.0) / _ROOT_2, x)


def _erfc_scaled(x: float) -> float:
    """``exp(x * x) * erfc(x)``; beyond 20 its asymptotic series, whose first omitted term is below 2e-13."""
    if x < 20.0:
        try:
            return math.exp(x * x) * math.erfc(x)
        except OverflowError:
            return math.inf
    square = 2.0 * x * x
    return (1.0 - 1.0 / square + 3.0 / square**2 - 15.0 / square**3) / (x * math.sqrt(math.pi))


# Computed on float64 copies of the arguments and rounded to the result type once.
_IN_FLOAT64: dict[str, Function] = {
    **{name: getattr(np, name) for name in "exp exp2 expm1 log log2 log10 log1p sqrt cbrt hypot fmod".split()},
    **{name: getattr(np, name) for name in "floor ceil trunc rint sin cos tan sinh cosh tanh".split()},
    **{name: getattr(np, "arc" + name[1:]) for name in "acos asin atan acosh asinh atanh atan2".split()},
    **dict.fromkeys(("pow", "powi"), np.power),
    "exp10": lambda x: np.power(10.0, x),
    "nearbyint": np.rint,
    "round": _round_half_away,
    "fabs": np.abs,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "rcbrt": lambda x: 1.0 / np.cbrt(x),
    "rhypot": lambda x, y: 1.0 / np.hypot(x, y),
    **dict.fromkeys(("norm3d", "norm4d"), _norm),
    **dict.fromkeys(("rnorm3d", "rnorm4d"), lambda *x: 1.0 / _norm(*x)),
    "fdim": lambda x, y: np.where(x > y, x - y, np.where(np.isnan(x) | np.isnan(y), np.nan, 0.0)),
    "remainder": _ieee_remainder,
    "sinpi": _turns(np.sin),
    "cospi": _turns(np.cos),
    "erf": elementwise(math.erf),
    "erfc": elementwise(math.erfc),
    "erfinv": elementwise(_erf_inverse),
    "erfcinv": elementwise(lambda x: -_normal_quantile(x / 2.0) / _ROOT_2),
    "erfcx": elementwise(_erfc_scaled),
    "normcdf": elementwise(lambda x: 0.5 * math.erfc(-x / _ROOT_2)),
    "normcdfinv": elementwise(_normal_quantile),
    "tgamma": elementwise(_gamma),
    "lgamma": elementwise(_log_gamma),
    "cyl_bessel_i0": np.i0,
    "logb": lambda x: np.where(np.isfinite(x) & (x != 0), np.frexp(x)[1] - 1.0, np.where(x == 0, -np.inf, np.abs(x))),
    "saturate": lambda x: np.where(np.isnan(x), 0.0, np.clip(x, 0.0, 1.0)),
    "fdivide": np.divide,
    **dict.fromkeys(("ldexp", "scalbn"), lambda x, n: np.ldexp(x, n.astype(np.int64))),
}


def _bits(target: Any) -> Function:
    return lambda x: np.ascontiguousarray(x).view(target)


def _bitwise(function: Callable[[int, int], int], *, counts: bool = True) -> Function:
    """``function(bits, width)`` of each integer, its bits as an unsigned number: a count, or bits of the same width."""

    def apply(x: Array) -> Array:
        unsigned, width = x.view(f"u{x.dtype.itemsize}"), 8 * x.dtype.itemsize
        found = np.vectorize(lambda v: function(int(v), width), otypes=[np.int32 if counts else unsigned.dtype])
        return np.asarray(found(unsigned)).view(np.int32 if counts else x.dtype)

    return apply


def _multiply_24(x: Array, y: Array) -> Array:
    eight = x.dtype.type(8)
    return np.asarray(((x << eight) >> eight) * ((y << eight) >> eight))


def _multiply_high_signed(x: Array, y: Array) -> Array:
    high = multiply_high(x, y)
    return np.asarray(high - np.where(x < 0, y, 0).astype(x.dtype) - np.where(y < 0, x, 0).astype(x.dtype))


def _permute_bytes(x: Array, y: Array, selector: Array) -> Array:
    pool = x.view(np.uint32).astype(np.uint64) | (y.view(np.uint32).astype(np.uint64) << np.uint64(32))
    chosen = np.zeros(pool.shape, np.uint64)
    for byte in range(4):
        which = (selector.view(np.uint32).astype(np.uint64) >> np.uint64(4 * byte)) & np.uint64(7)
        chosen |= ((pool >> (which * np.uint64(8))) & np.uint64(255)) << np.uint64(8 * byte)
    return chosen.astype(np.uint32).view(x.dtype)


def _average(extra: int) -> Function:
    return lambda x, y: ((x.astype(np.int64) + y.astype(np.int64) + extra) >> 1).astype(x.dtype)


def _hi_lo_to_double(high: Array, low: Array) -> Array:
    bits = (high.view(np.uint32).astype(np.uint64) << np.uint64(32)) | low.view(np.uint32).astype(np.uint64)
    return bits.view(_F64)


def _exponent(x: Array) -> Array:
    """The exponent, as in libdevice: the least int32 for 0 and NaN, the greatest for infinities."""
    ends = np.iinfo(np.int32)
    exponent = (np.frexp(x)[1] - 1).astype(np.int32)
    return np.where(np.isinf(x), ends.max, np.where((x == 0) | np.isnan(x), ends.min, exponent)).astype(np.int32)


# Computed on the arguments as they are.
_EXACT: dict[str, Function] = {
    "fma": fused_multiply_add,
    "copysign": np.copysign,
    "nextafter": np.nextafter,
    **dict.fromkeys(("abs", "llabs"), np.abs),
    **dict.fromkeys(("isnanf", "isnand"), np.isnan),
    **dict.fromkeys(("isinff", "isinfd"), np.isinf),
    **dict.fromkeys(("finitef", "isfinited"), np.isfinite),
    **dict.fromkeys(("signbitf", "signbitd"), np.signbit),
    "ilogb": _exponent,
    "llrint": np.rint,
    "llround": _round_half_away,
    "float_as_int": _bits(np.int32),
    "float_as_uint": _bits(np.uint32),
    **dict.fromkeys(("int_as_float", "uint_as_float"), _bits(np.float32)),
    "double_as_longlong": _bits(np.int64),
    "longlong_as_double": _bits(_F64),
    "double2hiint": lambda x: (x.view(np.int64) >> 32).astype(np.int32),
    "double2loint": lambda x: x.view(np.int64).astype(np.int32),
    "hiloint2double": _hi_lo_to_double,
    **dict.fromkeys(("clz", "clzll"), _bitwise(lambda bits, width: width - bits.bit_length())),
    **dict.fromkeys(("popc", "popcll"), _bitwise(lambda bits, _: bits.bit_count())),
    **dict.fromkeys(("ffs", "ffsll"), _bitwise(lambda bits, _: (bits & -bits).bit_length())),
    **dict.fromkeys(("brev", "brevll"), _bitwise(lambda bits, width: int(f"{bits:0{width}b}"[::-1], 2), counts=False)),
    **dict.fromkeys(("umulhi", "umul64hi"), multiply_high),
    **dict.fromkeys(("mulhi", "mul64hi"), _multiply_high_signed),
    **dict.fromkeys(("mul24", "umul24"), _multiply_24),
    **dict.fromkeys(("sad", "usad"), lambda x, y, z: np.where(x > y, x - y, y - x) + z),
    **dict.fromkeys(("hadd", "uhadd"), _average(0)),
    **dict.fromkeys(("rhadd", "urhadd"), _average(1)),
    "byte_perm": _permute_bytes,
}

_OPERATIONS: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
}
_TO_INTEGER: dict[str, Function] = {"n": np.rint, "z": np.trunc, "d": np.floor, "u": np.ceil}

_DIRECTED = re.compile(r"([fd])(add|sub|mul|div|rcp|sqrt|rsqrt)_r([nzdu])")
_FMA = re.compile(r"fma(f?)_r([nzdu])")
_CONVERSION = re.compile(r"(float|double|int|uint|ll|ull)2(float|double|int|uint|ll|ull)_r([nzdu])")


def _directed(value: Array, mode: str, dtype: np.dtype[Any]) -> Array:
    """A float64 value rounded to ``dtype`` to nearest, toward zero, down or up."""
    near = value.astype(dtype)
    if mode == "n" or dtype == _F64:
        return near
    back = near.astype(_F64)
    down = {"d": back > value, "u": np.zeros(back.shape, bool), "z": (back > value) & (value > 0)}[mode]
    up = {"d": np.zeros(back.shape, bool), "u": back < value, "z": (back < value) & (value < 0)}[mode]
    below, above = np.nextafter(near, dtype.type(-np.inf)), np.nextafter(near, dtype.type(np.inf))
    return np.where(down, below, np.where(up, above, near))


def _rounded(name: str, arguments: Sequence[Array], dtype: np.dtype[Any]) -> Array | None:
    """The result of a function whose name contains a rounding mode; ``None`` for other names."""
    if found := _DIRECTED.fullmatch(name):
        width, operation, mode = found.groups()
        if width == "d" and mode != "n":
            return None
        return _directed(_OPERATIONS[operation](*(a.astype(_F64) for a in arguments)), mode, dtype)
    if found := _FMA.fullmatch(name):
        if found[2] == "n":
            return fused_multiply_add(arguments[0], arguments[1], arguments[2])
        if not found[1]:
            return None
        x, y, z = (a.astype(_F64) for a in arguments)
        return _directed(x * y + z, found[2], dtype)
    if found := _CONVERSION.fullmatch(name):
        source = arguments[0]
        if dtype.kind in "iu":
            return convert(np.asarray(_TO_INTEGER[found[3]](source)), dtype)
        return source.astype(dtype) if found[3] == "n" else _directed(source.astype(_F64), found[3], dtype)
    return None


def call(symbol: str, arguments: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """The value of libdevice's ``symbol`` (``"__nv_tanhf"``) in ``dtype``; raises ``NotModelledError`` if unknown."""
    name = symbol.removeprefix("__nv_")
    if name != symbol:
        rounded = _rounded(name, arguments, dtype)
        if rounded is not None:
            return rounded
        for candidate in (name, name.removesuffix("f"), name.removeprefix("fast_").removesuffix("f")):
            exact = _EXACT.get(candidate)
            if exact is not None:
                return convert(np.asarray(exact(*arguments)), dtype)
            wide = _IN_FLOAT64.get(candidate)
            if wide is not None:
                return np.asarray(wide(*(a.astype(_F64) for a in arguments))).astype(dtype)
    raise NotModelledError(
        f"external function {symbol!r} has no model on the CPU lane, which knows NVIDIA's libdevice (__nv_*) only, and "
        "of that everything but a few rarely used functions (Bessel, float64 directed rounding). "
        "Test this kernel on a GPU (--fusion-device cuda)"
    )
