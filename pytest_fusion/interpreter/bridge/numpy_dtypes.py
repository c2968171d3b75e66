"""The numpy dtype of each Triton type: ``ml_dtypes`` where Triton's own interpreter has bare bit patterns.

Triton stores bfloat16 as ``uint16`` and float8 as ``uint8`` and computes with those integers (triton#11585 and #10945
were closed without a fix). With true dtypes numpy's operators are right: an operation on two values of p bits rounded
first to float32 and then to p bits is rounded once if 2p + 2 <= 24 (Figueroa 1995), as for bfloat16 (p = 8) and float8.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pytest_fusion.errors import NotModelledError

Array = NDArray[Any]

UINT64 = np.dtype(np.uint64)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_FLOAT8 = {
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
}

BY_NAME: dict[str, np.dtype[Any]] = {
    "int1": np.dtype(np.bool_),
    **{name: np.dtype(name) for name in "int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()},
    "fp16": np.dtype(np.float16),
    "bf16": BFLOAT16,
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    **_FLOAT8,
}

FLOAT8 = frozenset(_FLOAT8.values())
EXTENSION = frozenset({BFLOAT16, *FLOAT8})
FLOATS = frozenset({*EXTENSION, *(np.dtype(t) for t in (np.float16, np.float32, np.float64))})

# 0x7F in every byte: positive, far outside any tensor as an index, and neither the smallest nor the largest value, so
# that a minimum or a maximum over it is wrong.
_POISON_BYTE = 0x7F


def numpy_dtype(triton_type: Any) -> np.dtype[Any]:
    """The dtype for a Triton scalar, pointer or block type; raises ``NotModelledError`` without one (``fp8e4b15``)."""
    scalar = triton_type.scalar
    found = BY_NAME.get(scalar.name)
    if found is not None:
        return found
    if scalar.is_ptr():
        return UINT64
    raise NotModelledError(
        f"the CPU lane has no model of Triton type {scalar.name}, only of {', '.join(BY_NAME)}. "
        "Test this dtype on a GPU (--fusion-device cuda)"
    )


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` is a floating type, those of ``ml_dtypes`` included (numpy calls them void)."""
    return dtype in FLOATS


def poison(dtype: np.dtype[Any]) -> Any:
    """The value of a masked-off lane without ``other``: NaN, ``True`` or a large positive integer."""
    if dtype == np.bool_:
        return np.True_
    if is_float(dtype):
        return np.array(np.nan, dtype=np.float32).astype(dtype)[()]
    return np.frombuffer(bytes([_POISON_BYTE]) * dtype.itemsize, dtype=dtype)[0]


def bits(array: Array) -> Array:
    """The bits of ``array``, as unsigned integers of its width."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
