"""Floating-point grids, stochastic rounding onto them, and the random numbers of one shadow run."""

from __future__ import annotations

import functools
import math
import random
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from pytest_fusion.interpreter.scoped import holding
from pytest_fusion.oracle.lane_result import Kind

D = torch.float64
NARROW = frozenset({torch.float16, torch.bfloat16})
U32 = 2.0**-24
U64 = 2.0**-53
_TF32_BITS = 11

# The length of a pool that is drawn once per process and device; each request takes a window at a random offset.
# Drawing 57 000 numbers takes 0.3 ms on one CPU thread, and a window no time.
POOL = 1 << 19
# For Python's floats: ``1 - 0.999`` is 0.001 plus one unit in the last place of 1.
_SAME = 2.0**-50
# Odd numbers of 62 bits, which spread their factors over higher bits.
_ODD = 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x1B873593CC9E2D51


@dataclass(frozen=True, slots=True)
class Grid:
    """The values of a floating dtype: ``bits`` of significand, least ``step``, least normal ``tiny``, ``largest``.

    For float32 and bfloat16 the least step is the least *normal* value, as a GPU kernel may flush subnormals to zero
    (``-ftz=true``); hardware always keeps fp16 subnormals.
    """

    bits: int
    step: float
    tiny: float
    largest: float


GRIDS: dict[torch.dtype, Grid] = {
    torch.float16: Grid(11, 2.0**-24, 2.0**-14, torch.finfo(torch.float16).max),
    torch.bfloat16: Grid(8, 2.0**-126, 2.0**-126, torch.finfo(torch.bfloat16).max),
    torch.float32: Grid(24, 2.0**-126, 2.0**-126, torch.finfo(torch.float32).max),
    torch.float64: Grid(53, 2.0**-1022, 2.0**-1022, torch.finfo(torch.float64).max),
}
LARGEST32 = GRIDS[torch.float32].largest


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff of ``dtype``: half the distance from 1 to the next value."""
    return 2.0 ** -GRIDS[dtype].bits if dtype in GRIDS else U32


def quantum(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbours of ``dtype`` at each float64 ``value``; zero counts as the least step."""
    grid = GRIDS[dtype]
    _, exponent = torch.frexp(value)
    size = torch.ldexp(torch.ones_like(value), exponent - grid.bits).clamp_min(grid.step)
    # frexp(0) has exponent 0, which would grant an exact zero the slack of a value near 1.
    return torch.where(value == 0, grid.step, size)


def significand(t: Tensor, bits: int, generator: torch.Generator | None = None, *, step: float = 0.0) -> Tensor:
    """``t`` rounded to ``bits`` significant bits, and to multiples of ``step``, a power of two, in its dtype: to
    nearest, or at random with a ``generator``."""
    mantissa, exponent = torch.frexp(t.to(D))
    mantissa *= 2.0**bits
    if step:
        least = exponent.clamp_min(int(math.log2(step)) + bits)
        mantissa, exponent = torch.ldexp(mantissa, exponent - least), least
    if generator is not None:
        mantissa += torch.rand(mantissa.shape, dtype=D, device=t.device, generator=generator) - 0.5
    return torch.ldexp(torch.round(mantissa) / 2.0**bits, exponent).to(t.dtype)


def holds(target: torch.dtype, source: torch.dtype) -> bool:
    """True when every value of ``source`` is a value of ``target``."""
    if target == source:
        return True
    if target in GRIDS and source in GRIDS:
        wide, narrow = GRIDS[target], GRIDS[source]
        return wide.bits >= narrow.bits and wide.largest >= narrow.largest and wide.step <= narrow.step
    return target in GRIDS and source.is_floating_point and source.itemsize == 1


def _numbers(what: str, drop: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Bits below 2^drop, normal numbers, or uniform ones in [-1, 1)."""
    device = generator.device
    if what == "bits":
        return torch.randint(0, 1 << drop, shape, generator=generator, device=device)
    if what == "normal":
        return torch.randn(shape, generator=generator, device=device, dtype=D)
    return torch.rand(shape, generator=generator, device=device, dtype=D).mul_(2).sub_(1)


@functools.lru_cache(maxsize=32)
def _pool(what: str, drop: int, device: str) -> Tensor:
    return _numbers(what, drop, (POOL,), torch.Generator(device=device).manual_seed(0x5EED + drop))


_products = SimpleNamespace(tf32=False)


def tf32_factors() -> AbstractContextManager[None]:
    """Within this block, new runs round the factors of products to TF32, as `tl.dot` does by default."""
    return holding(_products, tf32=True)


def factors_in_tf32() -> bool:
    """Whether a new run rounds factors to TF32."""
    return bool(_products.tf32)


class Noise:
    """The random roundings of one shadow run: lane 0 is the oracle and stays exact, lanes 1..K are perturbed.

    All values are float64 tensors ``(L, *shape)`` with ``L`` = 1 (the same in every lane) or 1 + K.
    """

    def __init__(self, lanes: int, kind: Kind, seed: int, numbers: frozenset[float] = frozenset()) -> None:
        self.lanes = lanes
        self.kind = kind
        self.tf32 = _products.tf32
        self._random = random.Random(seed)
        self._generators: dict[str, torch.Generator] = {}
        self.numbers = set(numbers)

    def _draw(self, what: str, shape: tuple[int, ...], device: torch.device, drop: int = 0) -> Tensor:
        count = math.prod(shape)
        name = str(device)
        if count <= POOL // 2:
            start = self._random.randrange(POOL - count)
            return _pool(what, drop, name)[start : start + count].view(shape)
        if (of_lane := count // shape[0]) <= POOL // 2:
            # A window for each lane: 60,000 numbers for six are copied in 0.4 ms and drawn in 7.6.
            pool, starts = _pool(what, drop, name), [self._random.randrange(POOL - of_lane) for _ in range(shape[0])]
            return torch.stack([pool[start : start + of_lane] for start in starts]).view(shape)
        generator = self._generators.get(name)
        if generator is None:
            generator = torch.Generator(device=device).manual_seed(self._random.getrandbits(62))
            self._generators[name] = generator
        return _numbers(what, drop, shape, generator)

    def normal(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return self._draw("normal", (self.lanes, *shape), device)

    def normal_of(self, first: Tensor, second: Tensor) -> Tensor:
        """Normal numbers (K, *shape), equal wherever ``first`` and ``second`` (*shape) are equal in float32."""
        # A kernel makes the same error in equal columns, and a sum over them does not average it: for 30 equal columns
        # of 500 products each, summed, honest float32 was refused in 15 of 25 runs.
        # Float64 sums of equal columns differ in their last bits, by the column's place in a vector.
        bits = [part.float().contiguous().view(torch.int32).to(torch.int64) for part in (first, second)]
        mixed = bits[0] * _ODD[0] + bits[1] * _ODD[1]
        mixed = (mixed ^ (mixed >> 32)) * _ODD[2] >> 40
        pool = _pool("normal", 0, str(first.device))
        lanes = [(mixed + self._random.randrange(POOL)) & (POOL - 1) for _ in range(self.lanes)]
        return pool[torch.stack(lanes)] if lanes else pool.new_empty((0, *first.shape))

    def uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Uniform in [-1, 1)."""
        return self._draw("uniform", (self.lanes, *shape), device)

    def leaves(self, value: float) -> bool:
        """Whether ``value`` is 1 minus a number passed before, in this run or an earlier one."""
        self.numbers.add(value)
        return any(abs(1 - other - value) < _SAME for other in self.numbers)

    def spread(self, value: Tensor) -> Tensor:
        """A fresh ``(1 + K, *shape)`` copy of ``value``."""
        return value.expand(1 + self.lanes, *value.shape[1:]).clone(memory_format=torch.contiguous_format)

    def relative(self, value: Tensor, size: float) -> Tensor:
        """Each lane's ``value * (1 + size * U(-1, 1))``."""
        factor = torch.empty((1 + self.lanes, *value.shape[1:]), dtype=D, device=value.device)
        factor[0] = 1
        # A factor, not an addend: an infinite value stays infinite.
        torch.mul(self.uniform(tuple(value.shape[1:]), value.device), size, out=factor[1:]).add_(1)
        return factor.mul_(value)

    def absolute(self, value: Tensor, size: float) -> Tensor:
        """Each lane's ``value + size * U(-1, 1)``."""
        out = self.spread(value)
        out[1:].add_(self.uniform(tuple(value.shape[1:]), value.device), alpha=size)
        return out

    def off(self, value: Tensor, size: Tensor | None, where: Tensor | None = None) -> Tensor:
        """Each lane's ``value + size * U(-1, 1)`` ``where`` it counts; ``size`` (*shape) None adds nothing."""
        if size is None or (where is not None and not bool(where.any())):
            return value
        out = self.spread(value)
        size = size if where is None else torch.where(where, size, 0.0)
        out[1:].add_(size * self.uniform(tuple(out.shape[1:]), out.device))
        return out

    def scattered(self, value: Tensor, deviation: Tensor) -> Tensor:
        """Each lane's ``value + deviation * N(0, 1)``, where the ``deviation`` (*shape) is finite."""
        out = self.spread(value)
        deviation = torch.where(torch.isfinite(deviation), deviation, 0.0)
        out[1:].addcmul_(deviation, self.normal(tuple(out.shape[1:]), out.device))
        return out

    def rounded(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Stochastic rounding of lanes 1..K to the grid of ``dtype``; what the grid holds stays exact.

        A random integer is added below the grid's bits of the float64 pattern, and the rest is masked: the result is
        one of the two neighbours, with the value as its mean (Parker's Monte Carlo arithmetic). Infinities and NaN are
        unchanged. float64 has no finer grid, so its last bit is perturbed.
        """
        grid = GRIDS[dtype]
        drop = 53 - grid.bits
        if drop == 0:
            return self.relative(value, U64)
        if value.numel() == 0:
            return value
        source = value if value.shape[0] == 1 else value[1:]
        noise = self._draw("bits", (self.lanes, *value.shape[1:]), value.device, drop)
        out = torch.empty((1 + self.lanes, *value.shape[1:]), dtype=D, device=value.device)
        out[0] = value[0]
        lanes = out[1:]
        bits = lanes.view(torch.int64)
        torch.add(source.view(torch.int64), noise, out=bits)
        bits &= -(1 << drop)
        size = source.abs()
        # One pass where nothing is near an end of the range; NaN fails both comparisons.
        least, most = (float(end) for end in torch.aminmax(size))
        if not least >= grid.tiny:
            small = (size < grid.tiny) & (size > 0)
            if bool(small.any()):
                lanes.copy_(torch.where(small, self._subnormal(source, noise, grid, drop), lanes))
        if not most <= grid.largest * (1 - 2.0**-9):
            over = lanes.abs() > grid.largest
            # Some lanes keep the digits beyond the range: where the reference overflows on the way (float16 scores of
            # attention), only these show how an honest kernel rounds in float32.
            over &= self.other_half(source)[1:]
            lanes.copy_(torch.where(over, torch.copysign(torch.full_like(lanes, math.inf), lanes), lanes))
        return out

    def in_tf32(self, value: Tensor) -> Tensor:
        """A factor as tensor cores take it, with 11 significant bits: rounded at random in half of the lanes."""
        # The others truncate, as hardware does with float32.
        out, drop = self.spread(value), GRIDS[D].bits - _TF32_BITS
        bits = out[1:].view(torch.int64)
        noise = self._draw("bits", tuple(bits.shape), value.device, drop)
        bits.add_(torch.where(self._numbers(value) % 2 == 0, 0, noise)).bitwise_and_(-(1 << drop))
        return out

    def other_half(self, source: Tensor) -> Tensor:
        """The half of the lanes that may act as another honest kernel, bool (1 + K, 1, ...); never the oracle."""
        # Every other lane flushes (``_subnormal``), so pairs of lanes take turns: each half has both kinds.
        numbers = self._numbers(source, first=-1)
        return (numbers >= 0) & (numbers // 2 % 2 == 1)

    def _numbers(self, source: Tensor, first: int = 0) -> Tensor:
        """``first``..K-1 (-1 is the oracle), one for each lane, (K - first, 1, ...) beside ``source`` (L, *shape)."""
        return torch.arange(first, self.lanes, device=source.device).reshape(-1, *(1,) * (source.dim() - 1))

    def _subnormal(self, source: Tensor, noise: Tensor, grid: Grid, drop: int) -> Tensor:
        """Lanes 1..K of values below the least normal; every other lane flushes those below the least step to zero."""
        # A random choice per element would be rare for tiny values, and rare outliers in single lanes blind every
        # statistic that takes a maximum over the lanes.
        flushed = self._numbers(source) % 2 == 0
        if grid.step == grid.tiny:
            return torch.where(flushed, 0.0, source)
        share = noise.to(D).mul_(2.0**-drop)
        stepped = torch.floor(source / grid.step + share).mul_(grid.step)
        nearest = torch.where(flushed, 0.0, torch.round(source / grid.step).mul_(grid.step))
        return torch.where(source.abs() < grid.step, nearest, stepped)

    def accumulated(
        self,
        total: Tensor,
        squares: Tensor,
        terms: float | Tensor,
        unit_roundoff: float,
        magnitude: Tensor | None = None,
    ) -> Tensor:
        """``total`` (L, *shape) as a floating-point accumulator would have it after adding ``terms`` terms.

        ``squares`` (*shape) is the sum of the squared terms. The spread is that of a *sequential* sum in random order,
        ``E[S_k^2] = (k/n)^2 S^2 + k(n-k)/(n(n-1)) (Q - S^2/n)``, with one rounding error of variance ``u^2 S_k^2 / 3``
        per step: ``u^2/3 (n S^2 / 3 + n Q / 6)``. It is an upper bound for every tree, split and blocked order, and
        accounts for cancellation. A common part of ``u sqrt(n) / 24`` covers the drift that sequential sums of equal
        signs show in all rows alike. ``magnitude`` (*shape), the sum of the terms' sizes, shows where a partial sum may
        overflow although the whole does not: some lanes then have the infinity or NaN that an order reaches.
        """
        first = total[0]
        size = (terms / 3) * first * first + (terms / 6) * squares
        deviation = torch.sqrt(size).mul_(unit_roundoff / math.sqrt(3))
        deviation = torch.where(torch.isfinite(deviation), deviation, 0.0)
        out = self.spread(total)
        lanes = out[1:]
        shape = tuple(total.shape[1:])
        lanes.add_(deviation * self.normal_of(first, squares))
        common = self._draw("normal", (self.lanes, *(1 for _ in shape)), total.device)
        root = terms.sqrt() if isinstance(terms, Tensor) else math.sqrt(terms)
        lanes.add_(torch.where(torch.isfinite(first), first, 0.0) * common * (root * (unit_roundoff / 24)))
        if magnitude is not None:
            self._overflow(out, magnitude)
        return out

    def _overflow(self, out: Tensor, magnitude: Tensor) -> None:
        first = out[0]
        positive, negative = (magnitude + first) / 2, (magnitude - first) / 2
        finite = torch.isfinite(first)
        up, down = finite & (positive > LARGEST32), finite & (negative > LARGEST32)
        for lane in range(1, 1 + self.lanes):
            which, value = [(up, math.inf), (down, -math.inf), (up & down, math.nan), (None, 0.0)][(lane - 1) % 4]
            if which is not None:
                out[lane].masked_fill_(which, value)
