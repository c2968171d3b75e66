"""Values recorded where a kernel is used: a summary to draw from, or a file of tensors.

Their regimes are texts: ``like(low=-4,high=4,mean=0,std=1)`` and ``stored(/a/file.safetensors#x)``, or ``stored!(...)``
for tensors with special values.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import re
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.errors import ReplayError

_CALL = re.compile(r"(like|stored!?)\((.*)\)", re.DOTALL)
# Hexadecimal digits of a hash in a file name: 128 bits.
_DIGITS = 32
# mean(|x|) / rms(x) of a normal distribution.
_NORMAL = math.sqrt(2 / math.pi)
Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Like:
    """A distribution with the summary of a recorded tensor.

    Ordinary elements are normal with ``mean`` and ``std``, clamped to ``low`` and ``high``; a share ``tails`` is at
    those ends. ``zeros``, ``nan``, ``inf`` and ``ninf`` are shares of all elements, 0 to 1. ``extreme`` is 1 where
    finite elements are near the dtype's largest, or mostly below its smallest normal number.
    """

    low: float
    high: float
    mean: float
    std: float
    tails: float = 0.0
    zeros: float = 0.0
    nan: float = 0.0
    inf: float = 0.0
    ninf: float = 0.0
    extreme: float = 0.0

    def __str__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return f"like({','.join(f'{k}={v:.9g}' for k, v in given if v or k in ('low', 'high', 'mean', 'std'))})"

    @property
    def ordinary(self) -> bool:
        return not (self.nan or self.inf or self.ninf or self.extreme)


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensor ``key`` of a safetensors file, whose name is the start of its content's SHA-256."""

    path: str
    key: str
    ordinary: bool = True

    def __str__(self) -> str:
        return f"stored{'' if self.ordinary else '!'}({self.path}#{self.key})"


def parse(regime: str) -> Like | Stored | None:
    """A recorded regime as an object; ``None`` for any other, or a damaged one."""
    found = _CALL.fullmatch(regime)
    if found is None:
        return None
    if found[1] != "like":
        path, _, key = found[2].rpartition("#")
        return Stored(path, key, ordinary=found[1] == "stored") if path and key else None
    try:
        like = Like(**{name: float(value) for name, value in (part.split("=") for part in found[2].split(","))})
    except (TypeError, ValueError):
        return None
    return like if all(math.isfinite(getattr(like, f.name)) for f in fields(like)) and like.low <= like.high else None


def special(regime: str) -> bool:
    """Whether a recorded regime holds NaN, infinities, or values at the ends of its dtype's range."""
    own = parse(regime)
    return own is not None and not own.ordinary


def extreme(dtype: torch.dtype, *, low: float, high: float, absolute: float) -> bool:
    """Whether finite values have the magnitude of the regimes ``huge`` or ``subnormal``."""
    if not dtype.is_floating_point:
        return False
    info = torch.finfo(dtype)
    top = info.max if info.max < 2.0**64 else 2.0**60
    return max(-low, high) >= 0.25 * top or 0 < absolute < info.smallest_normal


def fitted(
    *, low: float, high: float, mean: float, rms: float, absolute: float, zeros: float, nan: float = 0.0,
    inf: float = 0.0, ninf: float = 0.0, extreme: float = 0.0,
) -> Like:  # fmt: skip
    """The distribution with these sums over the finite elements of a tensor; ``absolute`` is the mean magnitude."""
    # A mean magnitude far below the root mean square comes from few large elements, which become ``tails``.
    share = 1 - min(zeros / max(1 - nan - inf - ninf, 1e-12), 1.0)
    if share <= 0:
        return Like(0.0, 0.0, 0.0, 0.0, 0.0, zeros, nan, inf, ninf, extreme)
    mean, absolute, square = mean / share, absolute / share, rms * rms / share
    largest = max(-low, high)
    tails = 0.0
    std = math.sqrt(max(square - mean * mean, 0.0))
    if largest > 0 and abs(mean) < 0.25 * math.sqrt(square) and absolute < 0.9 * _NORMAL * math.sqrt(square):
        tails, std = _with_tails(absolute, square, largest)
    return Like(low, high, 0.0 if tails else mean, std, tails, zeros, nan, inf, ninf, extreme)


def _with_tails(absolute: float, square: float, largest: float) -> tuple[float, float]:
    """The share at the largest magnitude, and the deviation of the rest, that give both moments, by bisection."""

    def rest(share: float) -> float:
        return max(absolute - share * largest, 0.0) / (_NORMAL * (1 - share))

    few, many = 0.0, min(absolute / largest, 0.5)
    for _ in range(60):
        middle = (few + many) / 2
        if middle * largest**2 + (1 - middle) * rest(middle) ** 2 < square:
            few = middle
        else:
            many = middle
    return few, rest(few)


def make(
    own: Like | Stored,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
    bounds: Bounds | None = None,
    *,
    whole: bool = False,
) -> torch.Tensor | None:
    """The elements in ``dtype``, within ``bounds``; ``None`` where a stored tensor is too small for ``shape``.

    ``whole``: also where it is larger. Raises ``ReplayError`` where its file is gone, damaged, or cannot be read
    without safetensors.
    """
    if isinstance(own, Stored):
        file = _file(own.path)
        if own.key not in file:
            raise ReplayError(f"the file of recorded tensors {own.path} has no {own.key!r}; it holds {', '.join(file)}")
        stored = file[own.key]
        fits = stored.dim() == len(shape) and all(map(operator.le, shape, stored.shape))
        if not fits or (whole and stored.shape != shape):
            return None
        found = stored[tuple(map(slice, shape))].to(device)
        if bounds is not None and not dtype.is_complex and dtype is not torch.bool:
            wide = found.to(torch.float64 if dtype.is_floating_point else torch.int64)
            # NaN stays; numbers outside of the bounds at these sizes would be a bug of the caller.
            found = wide.clamp(*(bounds if dtype.is_floating_point else map(math.trunc, bounds)))
        return found.to(torch.float32).to(dtype) if dtype.itemsize == 1 and dtype.is_floating_point else found.to(dtype)
    if dtype.is_complex:
        parts = (_floats(own, shape, counter_random.mix(seed, part), device) for part in ("real", "imag"))
        return torch.complex(*parts).to(dtype)
    if dtype is torch.bool:
        return counter_random.uniform(shape, seed, device) < own.mean
    if bounds is not None:
        low, high = max(own.low, bounds[0]), min(own.high, bounds[1])
        own = Like(*((low, high) if low <= high else bounds), own.mean, own.std, own.tails, own.zeros)
    if dtype.is_floating_point:
        return counter_random.to_dtype(_floats(own, shape, seed, device), dtype)
    info = torch.iinfo(dtype)
    low, high = (int(min(max(end, info.min, -(2**62)), info.max, 2**62)) for end in (own.low, own.high))
    made = counter_random.integers(shape, low, high, seed, device)
    if own.zeros and low <= 0 <= high:
        made = torch.where(
            counter_random.uniform(shape, counter_random.mix(seed, "zeros"), device) < own.zeros, 0, made
        )
    return _placed(made, [low, high], seed).to(dtype)


def _floats(own: Like, shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    def uniform(what: str) -> torch.Tensor:
        return counter_random.uniform(shape, counter_random.mix(seed, what), device)

    normal = counter_random.normal(shape, seed, device)
    v = normal * own.std + own.mean
    if own.tails:
        end = own.high if own.high >= -own.low else own.low
        both = own.low < 0 < own.high and min(own.high, -own.low) > 0.5 * max(own.high, -own.low)
        far = torch.where(normal < 0, own.low if both else end, own.high if both else end)
        v = torch.where(uniform("tails") < own.tails, far, v)
    v = v.clamp(own.low, own.high)
    if own.zeros and own.low <= 0 <= own.high:
        v = torch.where(uniform("zeros") < own.zeros, 0.0, v)
    ends = [own.low, own.high] if own.low < own.high else []
    if not own.ordinary:
        u, reached = uniform("special"), 0.0
        for share, value in ((own.nan, math.nan), (own.inf, math.inf), (own.ninf, -math.inf)):
            v = torch.where((u >= reached) & (u < reached + share), value, v)
            reached += share
            ends += [value] if share else []
    return _placed(v, ends, seed)


def _placed(v: torch.Tensor, values: list[float] | list[int], seed: int) -> torch.Tensor:
    """``v`` with each of ``values`` once, unless it has too few elements for most to stay as drawn."""
    if v.numel() < 4 * len(values):
        return v
    v = v.contiguous()
    flat = v.view(-1)
    first, apart = counter_random.mix(seed, "place"), flat.numel() // max(len(values), 1)
    for position, value in enumerate(values):
        flat[(first + position * apart) % flat.numel()] = value
    return v


def digest(data: bytes) -> str:
    """The name of a file of tensors."""
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


@functools.lru_cache(maxsize=4)
def _file(path: str) -> dict[str, torch.Tensor]:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ReplayError(
            f"the recorded tensors {path} cannot be read ({error.strerror}); they are stored for keep_days only and do "
            "not travel with the case. Record them again, or replay the summary: a recording without tensors=True"
        ) from None
    if digest(data) != Path(path).stem:
        raise ReplayError(f"the recorded tensors {path} are not those that were recorded: their hash is {digest(data)}")
    try:
        from safetensors.torch import load
    except ImportError:
        raise ReplayError(f"reading {path} takes safetensors; pip install 'pytest-fusion[record]'") from None
    return load(data)
