"""Conversions between number types as an NVIDIA GPU of compute capability 9.0 makes them, without Triton.

Triton's PTX for sm_90 has ``cvt.rn`` between floats; ``cvt.rn.satfinite`` into float8, so that anything beyond the
largest finite value, infinity included, becomes that value and NaN stays NaN; ``cvt.rzi`` from float to integer, which
saturates, an 8-bit target going through 16 bits (``cvt.rzi.s16.f32`` and a one-byte store).

Also decodes operands of ``tl.dot_scaled``, microscaling (OCP MX v1.0), exactly to float32. The interpreters of Triton
3.6 and 3.7 lack it; 3.9's decodes float8 codes as integers.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import BFLOAT16, FLOAT8, Array, bits, is_float

_F32 = np.dtype(np.float32)
_F64 = np.dtype(np.float64)
_INT8_VIA = {np.dtype(np.int8): np.dtype(np.int16), np.dtype(np.uint8): np.dtype(np.uint16)}


def convert(source: Array, target: np.dtype[Any], *, toward_zero: bool = False) -> Array:
    """``source`` converted to ``target``, any shape; floats round to nearest even or, optionally, toward zero."""
    if source.dtype == target:
        return source
    if is_float(source.dtype):
        if is_float(target):
            return _float_to_float(source, target, toward_zero)
        if target == np.bool_:
            return np.asarray(source != source.dtype.type(0))
        return _float_to_int(source, target)
    if is_float(target):
        if target.itemsize <= 2 and source.dtype != np.bool_:
            # Through float32, numpy's way for float16, an int32 would be rounded twice.
            return _float_to_float(source.astype(_F64), target, False)
        return source.astype(target)
    if target == np.bool_:
        return np.asarray((source & source.dtype.type(1)).astype(np.bool_))
    return source.astype(target)


def round_to_odd(source: Array) -> Array:
    """float64 to float32, so that a second rounding, to fewer than 22 bits, equals one rounding from float64.

    An inexact result becomes the neighbour with an odd last bit (Boldo and Melquiond 2008).
    """
    near = source.astype(np.float32)
    back = near.astype(np.float64)
    even = (near.view(np.uint32) & np.uint32(1)) == 0
    move = (back != source) & even & ~np.isnan(source)
    toward = np.where(back < source, np.float32(np.inf), np.float32(-np.inf))
    return np.where(move, np.nextafter(near, toward), near)


def _float_to_float(source: Array, target: np.dtype[Any], toward_zero: bool) -> Array:
    if target in FLOAT8:
        limit = np.float32(ml_dtypes.finfo(target).max)  # type: ignore[no-untyped-call]
        wide = round_to_odd(source) if source.dtype == _F64 else source.astype(_F32)
        # np.clip preserves NaN, as satfinite does.
        bounded = np.clip(wide, -limit, limit)
        result = bounded.astype(target)
        return _step_toward_zero(result, bounded) if toward_zero else result
    if target == BFLOAT16 and source.dtype == _F64:
        narrow = round_to_odd(source).astype(target)
    else:
        narrow = source.astype(target)
    return _step_toward_zero(narrow, source) if toward_zero else narrow


def _step_toward_zero(rounded: Array, exact: Array) -> Array:
    """``rounded``, one step smaller in magnitude wherever rounding made ``exact`` larger."""
    beyond = np.abs(rounded.astype(_F64)) > np.abs(exact.astype(_F64))
    pattern = bits(rounded)
    return np.asarray((pattern - beyond.astype(pattern.dtype)).view(rounded.dtype))


def _float_to_int(source: Array, target: np.dtype[Any]) -> Array:
    """Truncate toward zero and saturate; NaN is 0, or 1 << (bits - 1) with 64 bits on a side (PTX ISA, ``cvt``)."""
    via = _INT8_VIA.get(target, target)
    limits = np.iinfo(via)
    wide = np.trunc(source.astype(_F64))
    nan = np.isnan(wide)
    # The largest float64 below 2**63 is not the limit: compare in floats, convert what is strictly inside.
    high = wide >= float(limits.max)
    low = wide <= float(limits.min)
    inside = np.where(nan | high | low, 0.0, wide).astype(via)
    result = np.where(high, via.type(limits.max), np.where(low, via.type(limits.min), inside))
    if source.dtype == _F64 or via.itemsize == 8:
        sentinel = limits.min if limits.min < 0 else 1 << (8 * via.itemsize - 1)
        result = np.where(nan, via.type(sentinel), result)
    return result.astype(target)


# The magnitudes of e2m1 (OCP MX v1.0, section 5.3.3); bit 3 is the sign.
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_E8M0_BIAS = 127
_E8M0_NAN = 255


def unpack_e2m1(packed: Array, axis: int) -> Array:
    """Two float4 values from each byte along ``axis``, the low nibble first, as float32."""
    nibbles = np.stack([packed & 0x0F, packed >> 4], axis=-1)
    values = np.where(nibbles & 8, -_E2M1[nibbles & 7], _E2M1[nibbles & 7])
    last = np.moveaxis(values, axis if axis >= 0 else axis + packed.ndim, -2)
    merged = last.reshape(*last.shape[:-2], 2 * last.shape[-2])
    return np.moveaxis(merged, -1, axis)


def scale_factors(scale: Array) -> Array:
    """Scales as float32: e8m0 bytes are powers of two, 255 is NaN; float8 scales are converted."""
    if scale.dtype.kind not in "iu":
        return scale.astype(np.float32)
    exponent = scale.view(np.uint8).astype(np.int32)
    factors = np.ldexp(np.float32(1), exponent - _E8M0_BIAS)
    return np.where(exponent == _E8M0_NAN, np.float32(np.nan), factors)


def scaled_operand(values: Array, scale: Array | None, *, packed: bool, along_k: bool, right: bool) -> Array:
    """One operand decoded to float32: ``(..., M, K)``, or ``(..., K, N)`` for the ``right`` one.

    ``packed`` values are e2m1 pairs along K, or along the other dimension if not ``along_k``. ``scale`` is ``(..., M or
    N, K / group)`` for either side; the group follows from the shapes.
    """
    k_axis, other_axis = (-2, -1) if right else (-1, -2)
    if packed:
        wide = unpack_e2m1(values, k_axis if along_k else other_axis)
    else:
        wide = values.astype(np.float32)
    if scale is None:
        return wide
    factors = scale_factors(scale)
    factors = np.repeat(factors, wide.shape[k_axis] // factors.shape[-1], axis=-1)
    return np.asarray(wide * (np.swapaxes(factors, -1, -2) if right else factors))
