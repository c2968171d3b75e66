"""Value regimes: what the floating tensors of a case hold, from plain to hostile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from pytest_fusion.case import counter_random, patterns, recorded_values


class Field(NamedTuple):
    """What a regime is made from: a shape, the target dtype, a stream seed and a device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    device: torch.device

    @property
    def info(self) -> torch.finfo:
        return torch.finfo(self.dtype)

    def normal(self, salt: int = 0) -> torch.Tensor:
        return counter_random.normal(self.shape, counter_random.mix(self.seed, salt), self.device)

    def uniform(self, salt: int = 0) -> torch.Tensor:
        return counter_random.uniform(self.shape, counter_random.mix(self.seed, salt), self.device)

    def column(self) -> torch.Tensor:
        """The index along the last axis."""
        if not self.shape:
            return torch.zeros((), device=self.device)
        return torch.arange(self.shape[-1], device=self.device).expand(self.shape)

    def row(self) -> torch.Tensor:
        """The index of each element's row (last axis)."""
        width = self.shape[-1] if self.shape else 1
        return (torch.arange(math.prod(self.shape), device=self.device) // max(width, 1)).reshape(self.shape)


def _hundred(f: Field) -> torch.Tensor:
    """Hundreds; for every other seed half are powers of two and their neighbours in the dtype."""
    # log2 of the float32 below 2^7 is 7, so an exponent computed as its floor is one too large.
    v = f.normal() * 100
    if counter_random.mix(f.seed, 18) % 2:
        return v
    which, eps = f.uniform(1), float(f.info.eps)
    above = torch.where(f.uniform(2) < 0.5, 1.0, 2.0)
    # Below a power of two the step is half an epsilon.
    beside = torch.where(which < 0.2, 1 - eps / 2, torch.where(which < 0.35, 1 + eps, 1.0))
    power = torch.exp2(torch.frexp(v).exponent.to(torch.float64) - 1) * above
    return torch.where((which < 0.5) & (v != 0), torch.copysign(power * beside, v), v)


def _offset(f: Field) -> torch.Tensor:
    # 24 standard deviations: a variance computed as E[x^2]-E[x]^2, or with padded lanes, loses its digits. Every other
    # seed is negative, so that padding that became finite (a soft cap turns -inf into -cap) shows.
    return f.normal() + (24.0 if counter_random.mix(f.seed, 15) % 2 else -24.0)


# This many seeds of nine have only numbers far below zero.
_FAR_BELOW = 3


def _negative(f: Field) -> torch.Tensor:
    """-5 to -1; for one seed in three far below, where every exponential beside a 0 underflows."""
    # One in three of those is below -10000, which many masks use as minus infinity, unless it is near the dtype's
    # limit.
    v, turn = f.uniform(), counter_random.mix(f.seed, 20) % 9
    if turn == 0 and float(f.info.max) > 1e6:
        return -(v * 20_000 + 20_000)
    return -(v * 800 + 200) if turn < _FAR_BELOW else -(v * 4 + 1)


def _cancelling(f: Field) -> torch.Tensor:
    """Pairs v, -v along the last axis, plus a small rest that remains of the sum."""
    v = f.normal()
    if not f.shape or f.shape[-1] < 2:
        return v
    pairs = f.shape[-1] // 2 * 2
    v[..., 1:pairs:2] = -v[..., 0:pairs:2]
    return v * 8 + f.uniform(1) * 2.0**-6


def _constant_rows(f: Field) -> torch.Tensor:
    v = f.normal()
    return v[..., :1].expand(f.shape).clone() if f.shape and f.shape[-1] else v


def _zero_rows(f: Field) -> torch.Tensor:
    """Every other row zero, beginning with the first; the rest small, so that an epsilon matters there.

    Half of those are at 2^-8, a quarter has a norm of about 2^-40, just below an epsilon of 1e-12, and a quarter is at
    a power of two between, by the seed.
    """
    row, width = f.row(), f.shape[-1] if f.shape else 1
    small = f.normal() * 2.0**-8
    if f.dtype.itemsize > 1:
        # All are of one magnitude: the cube of the row's reciprocal norm stays finite in float32.
        even = torch.where(f.normal() < 0, -1.0, 1.0) * (f.uniform(1) * 0.5 + 0.5)
        least = math.log2(float(f.info.smallest_normal)) + 2
        lowest = max(-40 - math.ceil(math.log2(max(width, 1)) / 2), least)
        between = max(-9 - counter_random.mix(f.seed, 10) % 31, least)
        turn = (row // 2 + counter_random.mix(f.seed, 11) % 4) % 4
        small = torch.where(turn == 1, even * 2.0**lowest, torch.where(turn == 3, even * 2.0**between, small))
    return torch.where(row % 2 == 0, 0.0, small)


def _outlier(f: Field) -> torch.Tensor:
    """One element a row a thousand times larger than the rest; in every third row it is the last."""
    v = f.normal()
    if not f.shape or not f.shape[-1]:
        return v
    place = (f.row() * 7 + counter_random.mix(f.seed, 9) % f.shape[-1]) % f.shape[-1]
    # A running maximum that only the last block raises is rare otherwise.
    place = torch.where((f.row() + counter_random.mix(f.seed, 10) % 3) % 3 == 0, f.shape[-1] - 1, place)
    big = min(1000.0, float(f.info.max) / 8)
    return torch.where(f.column() == place, torch.where(v < 0, -big, big), v)


def _wide(f: Field) -> torch.Tensor:
    """Rows of very different magnitude, 2^-10 to 2^5."""
    return f.normal() * torch.exp2((f.row() % 6 * 3 - 10).to(torch.float64))


def _ties(f: Field) -> torch.Tensor:
    """Five different values, and zeros of both signs, which are equal but differ in their bits.

    For every other seed 13 values, the whole numbers up to 6: bounds of clamps, ends of bins.
    """
    most, step = (6, 1.0) if counter_random.mix(f.seed, 19) % 2 else (2, 0.5)
    v = counter_random.integers(f.shape, -most, most, f.seed, f.device).to(torch.float64) * step
    return torch.where((v == 0) & (f.uniform(1) < 0.5), -0.0, v)


def _signed_zeros(f: Field) -> torch.Tensor:
    u = f.uniform()
    return torch.where(u < 0.4, -0.0, torch.where(u < 0.8, 0.0, f.normal(1)))


def _huge(f: Field) -> torch.Tensor:
    """Half to nine tenths of the largest value where the exponent is narrow (float16, float8): float32 inside holds it.

    In float32 and bfloat16 about 2^60, whose squares and their sums are finite: above, correct kernels that square
    first or normalise last (Welford, online softmax) overflow where their reference does not. For one seed in three all
    are negative, which shows a maximum that starts at, or is padded with, a finite number.
    """
    limit = float(f.info.max)
    top = limit if limit < 2.0**64 else 2.0**60
    negative = f.normal() < (math.inf if counter_random.mix(f.seed, 12) % 3 == 0 else 0)
    return torch.where(negative, -1.0, 1.0) * (f.uniform(1) * 0.4 + 0.5) * top


def _special(*values: float) -> Callable[[Field], torch.Tensor]:
    """Ordinary values with special ones, by the seed in one of two patterns."""
    # In the first, last and last-but-one lane of three rows in four; or each once in the tensor, so that a value that a
    # mask should hide is special while the rest is clean.

    def make(f: Field) -> torch.Tensor:
        v = f.normal()
        if counter_random.mix(f.seed, 6) % 2 and v.numel() > 1:
            flat = v.reshape(-1)
            for position, value in enumerate(values):
                flat[counter_random.mix(f.seed, 7, position) % flat.numel()] = value
            return flat.reshape(f.shape)
        width = f.shape[-1] if f.shape else 1
        column, row = f.column(), f.row() + counter_random.mix(f.seed, 5) % 4
        for lane, place in ((0, 0), (1, width - 1), (2, max(width - 2, 0))):
            chosen = values[lane % len(values)]
            v = torch.where((row % 4 == lane) & (column == place), chosen, v)
        return v

    return make


# Up to this size torch.sort on CUDA uses no radix sort, which puts NaN with a sign bit first: 32 in torch 2.10, 0 if
# stable. The lanes know sort itself, but not what is built on it.
_SORTED, _SORTED_FLAT = 32, 128


def _signed(v: torch.Tensor, f: Field) -> torch.Tensor:
    """Half of the NaN with all bits set, as NVIDIA's arithmetic makes them: rounding those as integers leaves NaN.

    In a small tensor half have their sign bit set: a key made of bits sorts those below all numbers. In longer ones
    none have, because torch.sort is wrong about them on CUDA (pytorch#190781). Bits are set directly, as vectorised
    conversion to bfloat16 sets all. float8 is unchanged: some formats have one NaN.
    """
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(v.itemsize)
    if word is None:
        return v
    bits, sign = v.view(word), torch.iinfo(word).min
    small = v.numel() <= _SORTED_FLAT and max(f.shape, default=1) <= _SORTED
    negative = (f.uniform(16) < 0.5) & small
    one = torch.tensor(_NAN, dtype=v.dtype, device=v.device).view(word)
    nan = torch.where(f.uniform(17) < 0.5, torch.iinfo(word).max, one)
    return torch.where(v.isnan(), torch.where(negative, nan | sign, nan & ~sign), bits).view(v.dtype)


def _infinite(f: Field) -> torch.Tensor:
    """Both infinities in single places; for one seed in three runs of -inf, as a mask leaves in logits."""
    # The maximum of a first tile may then be -inf. Each row keeps something finite, and one row in four is clean.
    if not f.shape or f.shape[-1] < 2 or counter_random.mix(f.seed, 13) % 3:
        return _special(_INF, -_INF)(f)
    run = patterns.runs(f.shape, f.seed, f.device, f.shape[-1] - 1)
    return torch.where(run & ((f.row() + counter_random.mix(f.seed, 5)) % 4 > 0), -_INF, f.normal())


def _masked(f: Field) -> torch.Tensor:
    """-inf in the first half of each row and one more, as left by a causal mask or left padding in logits."""
    # The first tile of a row of several tiles then has no finite maximum, whatever its size.
    if not f.shape or f.shape[-1] < 2:
        return f.normal()
    return torch.where(f.column() < (f.shape[-1] + 1) // 2, -_INF, f.normal())


_INF = float("inf")
_NAN = float("nan")

# The simplest first: shrinking goes to the left; the second field marks special values.
REGIMES: dict[str, tuple[Callable[[Field], torch.Tensor], bool]] = {
    "unit": (Field.normal, False),
    "small": (lambda f: f.normal() * 1e-3, False),
    "large": (lambda f: f.normal() * 30.0, False),
    "hundred": (_hundred, False),
    "offset": (_offset, False),
    "negative": (_negative, False),
    "ties": (_ties, False),
    "constant-rows": (_constant_rows, False),
    "zero-rows": (_zero_rows, False),
    "cancelling": (_cancelling, False),
    "outlier": (_outlier, False),
    "wide": (_wide, False),
    "signed-zeros": (_signed_zeros, False),
    "subnormal": (lambda f: f.normal() * float(f.info.smallest_normal) * 0.25, True),
    "huge": (_huge, True),
    "nan": (_special(_NAN), True),
    "inf": (_infinite, True),
    "masked": (_masked, True),
}

# Those that the covering phase pairs with every size, layout and dtype; random search uses the others too.
COVERED = tuple("unit small hundred offset negative zero-rows cancelling outlier ties huge nan inf".split())


def drawn(regime: str) -> str:
    """The regime inside a choice of ``values.one_of``: ``huge`` for ``0/huge``."""
    return regime.rpartition("/")[2] if regime[:1].isdigit() else regime


def is_special(regime: str) -> bool:
    own = drawn(regime)
    return REGIMES[own][1] if own in REGIMES else recorded_values.special(regime)


def names(*, finite: bool) -> tuple[str, ...]:
    return tuple(name for name, (_, special) in REGIMES.items() if not (finite and special))


def make(regime: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    """The elements of a regime in ``dtype``, contiguous. Finite regimes stay inside the dtype's range."""
    f = Field(shape, dtype, seed, device)
    v = counter_random.to_dtype(REGIMES[regime][0](f), dtype)
    return _signed(v, f) if regime == "nan" else v
