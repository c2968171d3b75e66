"""Axes of plots: values to places, and ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A logarithmic axis of less than this looks as if nothing grew, or as if everything did.
_LEAST = 4.0
_MOST_TICKS = 7


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark at ``at`` in units of the drawing, and its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class LogAxis:
    """Values from ``low`` to ``high`` (both positive) at ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float], start: float, end: float) -> LogAxis:
        """An axis with some room around ``values``, which are positive and at least one."""
        low, high = min(values), max(values)
        room = max(1.25, math.sqrt(_LEAST / (high / low)))
        return cls(low / room, high * room, start, end)

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, text: Callable[[float], str]) -> tuple[Tick, ...]:
        decades = math.log10(self.high / self.low)
        steps = (1,) if decades >= 2.5 else (1, 2, 5) if decades >= 0.9 else (1, 2, 3, 4, 5, 6, 8)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        # Each decade where there are few of them, else each second, third, ...
        stride = max(1, math.ceil(decades / _MOST_TICKS))
        values = [step * 10.0**power for power in range(first, last + 1) if power % stride == 0 for step in steps]
        return tuple(Tick(self.at(value), text(value)) for value in values if self.low <= value <= self.high)


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from zero to ``high`` at ``start`` to ``end``."""

    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + value / self.high * (self.end - self.start)

    def ticks(self, text: Callable[[float], str]) -> tuple[Tick, ...]:
        raw = self.high / (_MOST_TICKS - 1)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
        count = math.floor(self.high / step * (1 + 1e-9))
        return tuple(Tick(self.at(index * step), text(index * step)) for index in range(count + 1))
