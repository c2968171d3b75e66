"""Bit patterns for memory that a kernel should not read: guard zones, gaps between elements, fresh allocations."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

FILLS: Final = ("nan", "huge")

WORD_DTYPE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# (bytes, NaN bits of variant 0, huge bits of variant 0, distance between two variants' huge bits, number of variants).
# NaNs are signalling: any arithmetic quiets them, so even an atomic add of zero out of bounds leaves a trace, and the
# NaN that hardware computes (0x7fc00000 on x86, 0x7fffffff on NVIDIA) is never ours. "huge" is finite, also in a sum:
# 57344 for float16 (largest 65504), about 1e30 elsewhere.
_WIDE_FLOATS: Final = {
    torch.float16: (2, 0x7C01, 0x7B00, 0x10, 16),
    torch.bfloat16: (2, 0x7F81, 0x714A, 1, 48),
    torch.float32: (4, 0x7F800001, 0x7149F2CA, 0x10000, 48),
    torch.float64: (8, 0x7FF0000000000001, 0x46293E5939A08CEA, 1 << 45, 48),
}

# One byte has too few NaNs to number, so this lists the patterns: two NaNs if the format has two. e4m3fnuz, e5m2fnuz
# and e8m0fnu have one, float4 none (0x77 is twice 6.0, its largest).
_BYTE_FLOATS: Final = {
    "float8_e4m3fn": ((0x7F, 0xFF), (0x7E, 0xFE, 0x7D, 0xFD)),
    "float8_e5m2": ((0x7F, 0xFF, 0x7E, 0xFE), (0x7B, 0xFB, 0x7A, 0xFA)),
    "float8_e4m3fnuz": ((0x80,), (0x7F, 0xFF, 0x7E, 0xFE)),
    "float8_e5m2fnuz": ((0x80,), (0x7F, 0xFF, 0x7E, 0xFE)),
    "float8_e8m0fnu": ((0xFF,), (0xFE, 0xFD, 0xFC, 0xFB)),
    "float4_e2m1fn_x2": ((0x77, 0x7F), (0xFF, 0xF7)),
}

_INTEGERS: Final = {
    torch.int8: 1, torch.uint8: 1, torch.int16: 2, torch.uint16: 2,
    torch.int32: 4, torch.uint32: 4, torch.int64: 8, torch.uint64: 8,
}  # fmt: skip


@lru_cache(maxsize=4096)
def pattern(dtype: torch.dtype, fill: str, variant: int = 0) -> bytes:
    """The bytes of one element of ``dtype`` under ``fill``, in memory order (docs/internals/two-fills.md). ``"nan"`` is
    large positive for integers, True for bool; ``"huge"`` negative for signed integers, False for bool. They differ for
    every dtype and variant, and neighbouring variants, except for NaN in one-byte formats with a single NaN. Raises
    ``ValueError`` for an unknown fill and for a dtype without plain elements (quantised)."""
    if fill not in FILLS:
        raise ValueError(f"fill {fill!r} is none of {', '.join(FILLS)}")
    nan = fill == "nan"
    if dtype is torch.bool:
        return bytes([int(nan == (variant % 2 == 0))])
    if dtype in _INTEGERS:
        size = _INTEGERS[dtype]
        step = variant % (16 if size == 1 else 64)
        low, rest = (0x7F - step, 0x7F) if nan else (0x8B + step, 0x8B)
        return bytes([low]) + bytes([rest]) * (size - 1)
    if dtype in _WIDE_FLOATS:
        size, nan_bits, huge_bits, stride, count = _WIDE_FLOATS[dtype]
        step = variant % count
        return (nan_bits + step if nan else huge_bits + step * stride).to_bytes(size, "little")
    if dtype.is_complex:
        return pattern(dtype.to_real(), fill, variant) * 2
    listed = _BYTE_FLOATS.get(str(dtype).removeprefix("torch."))
    if listed is None:
        raise ValueError(f"no fill pattern for {dtype}: its elements are not plain numbers")
    choices = listed[0] if nan else listed[1]
    return bytes([choices[variant % len(choices)]])


@lru_cache(maxsize=4096)
def word(dtype: torch.dtype, fill: str, variant: int = 0) -> tuple[torch.dtype, int]:
    """An integer dtype (1 to 8 bytes) and value that repeat as ``pattern``; complex128 elements are two equal words."""
    bits = pattern(dtype, fill, variant)[:8]
    size = len(bits)
    return WORD_DTYPE[size], int.from_bytes(bits, "little", signed=size > 1)


def supported(dtype: torch.dtype) -> bool:
    try:
        pattern(dtype, FILLS[0])
    except ValueError:
        return False
    return True
