"""Counter-based random numbers: element ``i`` of stream ``seed`` is the same on every device and in every batch.

Only integer arithmetic and separate float64 additions and multiplications are used: no device can contract or
approximate them, so CPU and GPU give the same bits.
"""

from __future__ import annotations

import math

import torch

# The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014),
# as signed 64-bit constants because torch multiplies int64 with wrap-around.
GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX2 = 0x94D049BB133111EB - (1 << 64)
MASK = (1 << 64) - 1


def mix(*parts: int | str) -> int:
    """A 64-bit seed from several parts, stable across processes (unlike ``hash``)."""
    state = 0
    for part in parts:
        for word in part.encode() if isinstance(part, str) else (part & MASK, 0x100):
            state = _finalised((state ^ word) + GOLDEN & MASK)
    return state


def element(seed: int, number: int) -> int:
    """Element ``number - 1`` of ``bits``, as 0 to 2^64-1, without a tensor."""
    return _finalised(seed + number * GOLDEN & MASK)


def _finalised(state: int) -> int:
    state = (state ^ state >> 30) * (MIX1 & MASK) & MASK
    state = (state ^ state >> 27) * (MIX2 & MASK) & MASK
    return state ^ state >> 31


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)


def bits(count: int, seed: int, device: torch.device | str) -> torch.Tensor:
    """``count`` random int64 of stream ``seed``."""
    z = torch.arange(1, count + 1, dtype=torch.int64, device=device) * (GOLDEN - (1 << 64)) + wrapped(seed)
    z = (z ^ _shift(z, 30)) * MIX1
    z = (z ^ _shift(z, 27)) * MIX2
    return z ^ _shift(z, 31)


def wrapped(number: int) -> int:
    """The signed 64-bit number that equals ``number`` modulo 2^64."""
    return (number + (1 << 63) & MASK) - (1 << 63)


def uniform(shape: tuple[int, ...], seed: int, device: torch.device | str) -> torch.Tensor:
    """float64 in ``[0, 1)``, 53 random bits each."""
    return _shift(bits(math.prod(shape), seed, device), 11).to(torch.float64).mul(2.0**-53).reshape(shape)


def normal(shape: tuple[int, ...], seed: int, device: torch.device | str) -> torch.Tensor:
    """float64, mean 0, variance 1, at most 4.9 in magnitude: the sum of eight 16-bit uniforms (Irwin-Hall)."""
    # Logarithm and cosine would differ between devices in the last bit.
    total = torch.zeros(math.prod(shape), dtype=torch.int64, device=device)
    for half in (0, 1):
        word = bits(total.numel(), mix(seed, half), device)
        for field in range(4):
            total += _shift(word, 16 * field) & 0xFFFF if field else word & 0xFFFF
    spread = math.sqrt(8 * (65536.0**2 - 1) / 12)
    return (total - 4 * 65535).to(torch.float64).mul(1 / spread).reshape(shape)


def to_dtype(v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``v``, float64, in a floating dtype; finite elements are clamped to its range."""
    limit = float(torch.finfo(dtype).max)
    v = torch.where(torch.isfinite(v), v.clamp(-limit, limit), v)
    return v.to(torch.float32).to(dtype) if dtype.itemsize == 1 else v.to(dtype)


def integers(shape: tuple[int, ...], low: int, high: int, seed: int, device: torch.device | str) -> torch.Tensor:
    """int64 from ``low`` to ``high``, both included; a range beyond 2^63 is the same 64 bits, unsigned."""
    span, word = high - low + 1, bits(math.prod(shape), seed, device)
    if span <= 1 << 62:
        return _shift(word, 2).remainder(span).add(wrapped(low)).reshape(shape)
    # Too many for a remainder of 62 bits: draw as many bits as the range has, and move what exceeds it into it.
    if span <= 1 << 63:
        word = _shift(word, 1)
    if span < 1 << 64:
        # Subtracting 2^63 compares as unsigned.
        least = torch.iinfo(torch.int64).min
        word = torch.where(word + least >= span + least, word - wrapped(span), word)
    return word.add(wrapped(low)).reshape(shape)
