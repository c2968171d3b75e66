"""``tl.dot_scaled``: microscaling operands (OCP MX v1.0), decoded exactly and multiplied in float32.

The interpreters of Triton 3.6 and 3.7 lack it; 3.9's decodes float8 codes as integers.
"""

from __future__ import annotations

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array

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

    ``packed`` values are e2m1 pairs along K, or along the other dimension if not ``along_k``. ``scale`` is
    ``(..., M or N, K / group)`` for either side; the group follows from the shapes.
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
