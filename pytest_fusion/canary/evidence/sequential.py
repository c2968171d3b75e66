"""Tests and intervals for a mean that hold after every observation: betting on binned, bounded values.

docs/internals/canary-evidence.md explains the bets. In a bet on a mean above ``m`` an observation ``x`` pays
``(x - low) / (m - low)`` per staked coin. If the mean is at most ``m``, the wealth ever reaches ``1 / alpha`` with
probability ``alpha`` at most (Waudby-Smith and Ramdas, JRSS-B 86, 2024). Stakes are fixed (Cover's universal portfolio;
Orabona and Jun, IEEE Trans. Inf. Theory 70, 2024). For values 0 and 1 the wealth is the likelihood ratio of a mixture
of rates. Values outside the scale are clipped: the statement is about the clipped mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Stakes are 1, 1/2, 1/4, ... of the coins: 2^-20 is best for a rate of 10^-6 above an allowed one of zero.
_STAKES = 2.0 ** -np.arange(21)
# Half of the coins are on the highest stake: without an event, log(2 / alpha) / limit observations show that a rate is
# below the limit, a rule of three for every look. The others share the rest equally.
_SHARES = np.array([0.5] + [0.5 / 20] * 20)
# If one value in so many is at an end of the scale, the mean is only a bound. Single ones are interrupts.
_CLIPPED = 10


@dataclass(frozen=True, slots=True)
class Scale:
    """The grid ``low``, ``low + step``, ... ``high``: a mean is off by half a step at most. Raises ``ValueError``."""

    low: float
    high: float
    step: float

    def __post_init__(self) -> None:
        steps = (self.high - self.low) / self.step if self.step > 0 else 0.0
        if not (math.isfinite(steps) and steps >= 1 and abs(steps - round(steps)) < 1e-6):
            raise ValueError(f"from {self.low} to {self.high} is not a whole number of steps of {self.step}")

    @property
    def size(self) -> int:
        return round((self.high - self.low) / self.step) + 1

    def index(self, value: float) -> int:
        """The index of the nearest value of the grid; infinities are clipped. Raises ``ValueError`` for NaN."""
        if math.isnan(value):
            raise ValueError("NaN is not on a scale")
        return round((min(max(value, self.low), self.high) - self.low) / self.step)

    def value(self, index: int) -> float:
        return self.low + index * self.step


# Whether something happened in a call: 0 or 1.
RATE = Scale(0.0, 1.0, 1.0)


def mean(counts: Mapping[int, int], scale: Scale) -> float:
    """The mean of counted values; NaN for none."""
    total = sum(counts.values())
    return scale.low + scale.step * sum(index * count for index, count in counts.items()) / total if total else math.nan


def in_percent(ratio: float) -> str:
    """A log ratio in per cent, with its sign."""
    return f"{100 * math.expm1(ratio):+.1f} %"


def percent(counts: Mapping[int, int], scale: Scale) -> str:
    """The mean of log ratios in per cent: "at least +28.4 %" where many values were clipped to an end of the scale."""
    low, high, total = counts.get(0, 0), counts.get(scale.size - 1, 0), sum(counts.values())
    bound = "at least " if high > low else "at most " if low > high else ""
    shown = in_percent(mean(counts, scale))
    return bound + shown if _CLIPPED * abs(high - low) >= total else shown


def above(counts: Mapping[int, int], scale: Scale, bound: float) -> float:
    """Logarithm of the evidence that the mean is above ``bound``, from the counts of each index of ``scale``.
    It ever exceeds ``log(1 / alpha)`` in at most ``alpha`` of the streams whose mean is not above. With
    ``bound <= low`` the first other value is infinite evidence; with ``bound >= high`` there is none."""
    if bound <= scale.low:
        return math.inf if any(index > 0 and count for index, count in counts.items()) else 0.0
    return _wealth(counts, _payoffs(scale, bound, up=True)) if bound < scale.high else 0.0


def below(counts: Mapping[int, int], scale: Scale, bound: float) -> float:
    """As :func:`above`, for a mean below ``bound``."""
    if bound >= scale.high:
        top = scale.size - 1
        return math.inf if any(index < top and count for index, count in counts.items()) else 0.0
    return _wealth(counts, _payoffs(scale, bound, up=False)) if bound > scale.low else 0.0


def interval(counts: Mapping[int, int], scale: Scale, alpha: float) -> tuple[float, float]:
    """The interval that ever excludes the true mean in at most ``alpha`` of all streams. Raises ``ValueError``."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}, and must be a probability between 0 and 1")
    needed = math.log(2 / alpha)
    centre = mean(counts, scale)
    if math.isnan(centre):
        return scale.low, scale.high
    # Evidence falls as the bound nears the mean from either side, so each end is a sign change.
    lower = _refuted(lambda bound: _fresh(counts, scale, bound, up=True) >= needed, scale.low, centre)
    upper = _refuted(lambda bound: _fresh(counts, scale, bound, up=False) >= needed, scale.high, centre)
    return lower, upper


def clean_calls(limit: float, alpha: float) -> int:
    """The number of observations without an event that shows its rate to be below ``limit``."""
    return math.ceil(math.log(2 / alpha) / -math.log1p(-limit))


def _refuted(refutes: Callable[[float], bool], outer: float, inner: float) -> float:
    """The end of the refuted range between ``outer`` and ``inner``; ``outer`` where nothing is refuted."""
    unit = inner - outer
    # Bisects on a logarithmic grid, which resolves a rate of 10^-6 as well as one of one half.
    refuted, open_ = 1e-12, 1.0
    if unit == 0 or not refutes(outer + unit * refuted):
        return outer
    for _ in range(60):
        middle = math.sqrt(refuted * open_)
        if refutes(outer + unit * middle):
            refuted = middle
        else:
            open_ = middle
    return outer + unit * refuted


def _fresh(counts: Mapping[int, int], scale: Scale, bound: float, *, up: bool) -> float:
    return _wealth(counts, _log_payoffs(scale, bound, up=up)) if scale.low < bound < scale.high else 0.0


def _log_payoffs(scale: Scale, bound: float, *, up: bool) -> NDArray[np.float64]:
    """Logarithm of what a coin becomes: float64, stakes x values."""
    values = scale.low + scale.step * np.arange(scale.size)
    gain = (values - scale.low) / (bound - scale.low) if up else (scale.high - values) / (scale.high - bound)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log((1 - _STAKES[:, None]) + _STAKES[:, None] * np.maximum(gain, 0.0)[None, :]))


# A judge needs the same few bounds at every look.
_payoffs = functools.lru_cache(maxsize=64)(_log_payoffs)


def _wealth(counts: Mapping[int, int], payoffs: NDArray[np.float64]) -> float:
    seen = [(index, count) for index, count in counts.items() if count]
    if not seen:
        return 0.0
    indices, many = zip(*seen, strict=True)
    each = payoffs[:, list(indices)] @ np.array(many, dtype=np.float64)
    top = float(each.max())
    return top + math.log(float(_SHARES @ np.exp(each - top)))
