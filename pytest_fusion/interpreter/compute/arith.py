"""Arithmetic in which numpy differs from a GPU, on plain arrays; callers hold ``numpy.errstate(all="ignore")``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import EXTENSION, Array, bits, is_float

# One step of mma.m16n8k16: with a float16 accumulator the sum is rounded to float16 after every 16 products.
_MMA_K = 16


def binary(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """``function``, wrapping on one-bit integers as on the device; in numpy ``True + True`` is true (triton#10919)."""

    def apply(lhs: Array, rhs: Array) -> Array:
        if lhs.dtype == np.bool_ and rhs.dtype == np.bool_:
            return (function(lhs.astype(np.int8), rhs.astype(np.int8)) & 1).astype(np.bool_)
        return function(lhs, rhs)

    return apply


def int_divide(lhs: Array, rhs: Array) -> Array:
    """Quotient rounded toward zero, as in C; division by zero gives all ones, as on NVIDIA."""
    zero = rhs == 0
    safe = np.where(zero, rhs.dtype.type(1), rhs) if zero.any() else rhs
    quotient = (lhs - np.fmod(lhs, safe)) // safe
    return np.where(zero, ~quotient.dtype.type(0), quotient) if zero.any() else quotient


def int_remainder(lhs: Array, rhs: Array) -> Array:
    """Remainder with the sign of ``lhs``; by zero it is ``lhs``."""
    zero = rhs == 0
    if not zero.any():
        return np.fmod(lhs, rhs)
    return np.where(zero, lhs, np.fmod(lhs, np.where(zero, rhs.dtype.type(1), rhs)))


def shift_right_arithmetic(lhs: Array, rhs: Array) -> Array:
    """Shift that preserves the sign, whatever the signedness of the array."""
    return np.asarray(_signed(lhs) >> _signed(rhs))


def _signed(array: Array) -> Array:
    return array.view(f"i{array.dtype.itemsize}") if array.dtype.kind == "u" else array


def multiply_high(lhs: Array, rhs: Array) -> Array:
    """Upper half of the product of the two bit patterns taken as unsigned; same dtype as ``lhs``."""
    width = 8 * lhs.dtype.itemsize
    unsigned = np.dtype(f"u{lhs.dtype.itemsize}")
    a, b = np.broadcast_arrays(lhs.view(unsigned), rhs.view(unsigned))
    if width < 64:
        wide = np.dtype(f"u{2 * lhs.dtype.itemsize}")
        return np.asarray(((a.astype(wide) * b.astype(wide)) >> wide.type(width)).astype(unsigned).view(lhs.dtype))
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    al, ah, bl, bh = a & low, a >> half, b & low, b >> half
    middle = ((al * bl) >> half) + ((ah * bl) & low) + ((al * bh) & low)
    return np.asarray((ah * bh + ((ah * bl) >> half) + ((al * bh) >> half) + (middle >> half)).view(lhs.dtype))


def fused_multiply_add(x: Array, y: Array, z: Array) -> Array:
    """``x * y + z`` rounded once, in the dtype of ``z``.

    The float64 product of two float32 is exact; the sum is rounded to odd, so only the last rounding counts (Boldo and
    Melquiond 2008). float64 itself uses error-free transformations (Dekker 1971).
    """
    dtype = z.dtype
    if not is_float(dtype):
        return np.asarray(x * y + z)
    if dtype == np.float64:
        return _fma64(x, y, z)
    product = x.astype(np.float64) * y.astype(np.float64)
    addend = z.astype(np.float64)
    total = product + addend
    error = _sum_error(product, addend, total)
    odd = (total.view(np.uint64) & np.uint64(1)) == 1
    step = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    sticky = np.where((error != 0) & ~odd & np.isfinite(total), step, total)
    return sticky.astype(dtype)


def _sum_error(a: Array, b: Array, total: Array) -> Array:
    """The rounding error of ``a + b`` (Knuth's TwoSum); NaN-free only where ``total`` is finite."""
    back = total - a
    return np.asarray((a - (total - back)) + (b - back))


def _fma64(x: Array, y: Array, z: Array) -> Array:
    product = x * y
    split = 134217729.0
    xh = x * split - (x * split - x)
    yh = y * split - (y * split - y)
    xl, yl = x - xh, y - yh
    low = ((xh * yh - product) + xh * yl + xl * yh) + xl * yl
    total = product + z
    exact = total + (_sum_error(product, z, total) + low)
    return np.where(np.isfinite(exact), exact, total)


def _extreme(function: np.ufunc, both_zero: np.ufunc) -> Callable[[Array, Array], Array]:
    """``function`` with +0.0 > -0.0: numpy returns either, depending on the place in a vector register."""

    def apply(lhs: Array, rhs: Array) -> Array:
        result = np.asarray(function(lhs, rhs))
        if not is_float(result.dtype):
            return result
        zeros = (lhs == 0) & (rhs == 0)
        if not zeros.any():
            return result
        return np.where(zeros, both_zero(bits(lhs), bits(rhs)), bits(result)).view(result.dtype)

    return apply


# PTX ISA, min and max: +0.0 > -0.0. The first two return the number beside a NaN, the others the NaN.
min_number = _extreme(np.fmin, np.bitwise_or)
max_number = _extreme(np.fmax, np.bitwise_and)
minimum = _extreme(np.minimum, np.bitwise_or)
maximum = _extreme(np.maximum, np.bitwise_and)


def clamp(value: Array, low: Array, high: Array, *, propagate_nan: bool) -> Array:
    """``min(max(value, low), high)``; without propagation a number wins against a NaN."""
    if propagate_nan:
        return minimum(maximum(value, low), high)
    return min_number(max_number(value, low), high)


def elementwise(function: Callable[[float], float]) -> Callable[[Array], Array]:
    """A function of Python's ``math``, over an array: computed in float64, rounded to the array's dtype."""

    def apply(x: Array) -> Array:
        values = map(function, x.astype(np.float64).ravel().tolist())
        return np.fromiter(values, np.float64, x.size).reshape(x.shape).astype(x.dtype)

    return apply


erf = elementwise(math.erf)


def rsqrt(x: Array) -> Array:
    """``1 / sqrt(x)`` rounded from float64: the device's is within 2 units, two float32 roundings within 1."""
    return (1.0 / np.sqrt(x.astype(np.float64))).astype(x.dtype)


def dot(a: Array, b: Array, accumulator: Array) -> Array:
    """``a @ b + accumulator`` over the last two dimensions, in the accumulator's dtype.

    As in tensor cores, 16-bit and 8-bit floats are multiplied exactly and accumulated in float32; a float16 accumulator
    is rounded after each 16 products. float64 is exact for 8-bit integers: sums of int8 products are below 2**53.
    """
    dtype = accumulator.dtype
    if dtype.kind in "iu":
        exact = np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64)
        return np.asarray(exact.astype(dtype) + accumulator)
    if dtype == np.float64:
        return _product(a.astype(np.float64), b.astype(np.float64)) + accumulator
    left, right = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    if dtype == np.float32:
        return _product(left, right) + accumulator
    total = accumulator
    for start in range(0, left.shape[-1], _MMA_K):
        part = _product(left[..., start : start + _MMA_K], right[..., start : start + _MMA_K, :])
        total = (total.astype(np.float32) + part).astype(dtype)
    return total


def _product(a: Array, b: Array) -> Array:
    """``a @ b`` with bits that do not depend on the position of a row or column in the tile, as on tensor cores.

    BLAS has other code for a product's last rows and columns: with OpenBLAS 0.3 on an AMD EPYC every fourth element of
    equal rows had other bits, so a kernel that moves rows seemed nondeterministic. ``einsum`` has one order. It adds in
    steps, as the instruction does: 256 products added one by one have 2.6 times the error.
    """
    steps = range(0, a.shape[-1], _MMA_K)
    parts = (
        np.einsum(
            "...mk,...kn->...mn",
            np.ascontiguousarray(a[..., start : start + _MMA_K]),
            np.ascontiguousarray(b[..., start : start + _MMA_K, :]),
        )
        for start in steps
    )
    return np.asarray(functools.reduce(np.add, parts))


def histogram(data: Array, mask: Array | None, bins: int) -> Array:
    """How many unmasked values equal each of ``0 .. bins - 1``, per row of the first axis: int32 (rows, bins)."""
    rows = data.shape[0]
    flat = data.reshape(rows, -1).astype(np.int64)
    valid = (flat >= 0) & (flat < bins)
    if mask is not None:
        valid &= mask.reshape(rows, -1)
    flat = flat + np.arange(rows, dtype=np.int64)[:, None] * bins
    return np.bincount(flat[valid], minlength=rows * bins).reshape(rows, bins).astype(np.int32)


def all_ones(dtype: np.dtype[Any]) -> Array:
    """A one-element array of ``dtype`` with every bit set; raises ``TypeError`` for floats."""
    if dtype == np.bool_:
        return np.ones(1, np.bool_)
    if dtype.kind not in "iu" or dtype in EXTENSION:
        raise TypeError(f"all bits set is defined for integers, got {dtype}")
    return np.array([-1]).astype(dtype)
