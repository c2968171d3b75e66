"""One call of a kernel above one of its reference, on one scale of time: what ran when, and the gaps.

And the axes of plots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_fusion.report.case_table import Table
from pytest_fusion.report.columns import clipped, time, whole
from pytest_fusion.run.measure.timing.roofline import Activity, busy
from pytest_fusion.spec.wording import plural

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


WIDTH, LEFT, RIGHT = 900, 10, 880
LANE = 22
# More marks are smaller than a pixel each, and more rows are not readable.
_MOST_MARKS, _MOST_ROWS = 600, 100
# A character of 11 px text, so that a name is written where it fits.
_CHARACTER = 6.6
# Fewer of a name mean nothing.
_FEWEST = 8


@dataclass(frozen=True, slots=True)
class Mark:
    """One activity: ``text`` is shown in it where there is room, ``title`` on hovering."""

    kind: str
    x: float
    y: float
    wide: float
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Track:
    """One call: ``head`` has its length and how busy the device was, at ``y``; ``height`` from there."""

    role: str
    head: str
    y: float
    marks: tuple[Mark, ...]
    height: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """``tables`` list the activities of each track, ``kinds`` what occurs, for the legend."""

    title: str
    summary: str
    height: float
    tracks: tuple[Track, ...]
    ticks: tuple[Tick, ...]
    tables: tuple[Table, ...]
    kinds: tuple[str, ...]


def timeline(case: str, fused: Iterable[Sequence[Any]], reference: Iterable[Sequence[Any]]) -> Timeline | None:
    """Of activities as ``(name, kind, start, seconds)``; nothing where none of them took time."""
    calls = {"fused": _valid(fused), "reference": _valid(reference)}
    end = max((start + seconds for spans in calls.values() for _, _, start, seconds in spans), default=0.0)
    if end <= 0:
        return None
    axis = Axis(end, LEFT, RIGHT)
    tracks: list[Track] = []
    y = 14.0
    for role, spans in calls.items():
        if spans:
            tracks.append(_track(role, spans, axis, y))
            y += tracks[-1].height + 26
    return Timeline(
        title=f"One call: {case}",
        summary="; ".join(track.head for track in tracks),
        height=y + 16,
        tracks=tuple(tracks),
        ticks=axis.ticks(lambda value: time(value) if value else "0"),
        tables=tuple(_table(role, spans) for role, spans in calls.items() if spans),
        kinds=tuple(dict.fromkeys(_kind(kind) for spans in calls.values() for _, kind, _, _ in spans)),
    )


def _valid(spans: Iterable[Sequence[Any]]) -> list[Activity]:
    """Sorted by their start; JSON has text for a number that is not finite, and then there is nothing to draw."""
    found = [Activity(str(name), str(kind), start, seconds) for name, kind, start, seconds in spans]
    good = [one for one in found if all(isinstance(value, int | float) and value >= 0 for value in one[2:])]
    return sorted(good, key=lambda one: (one.start, -one.seconds))


def _kind(kind: str) -> str:
    return kind if kind in ("kernel", "memcpy", "memset") else "other"


def _track(role: str, spans: Sequence[Activity], axis: Axis, y: float) -> Track:
    """Draws overlapping activities, of several streams, in rows below each other."""
    free: list[float] = []
    marks = []
    top = y + 7
    for name, kind, start, seconds in spans[:_MOST_MARKS]:
        lane = next((number for number, until in enumerate(free) if until <= start * (1 + 1e-9)), len(free))
        free[lane:] = [start + seconds, *free[lane + 1 :]]
        wide = max(axis.at(start + seconds) - axis.at(start), 0.8)
        room = int((wide - 6) / _CHARACTER)
        text = clipped(name, room) if room >= min(len(name), _FEWEST) else ""
        title = f"{name} ({kind}): {time(seconds)} from {time(start)}"
        marks.append(Mark(_kind(kind), axis.at(start), top + lane * (LANE + 2), wide, text, title))
    length = max(start + seconds for _, _, start, seconds in spans)
    works = whole(busy(spans) / length) if length else "?"
    more = f", the first {_MOST_MARKS} drawn" if len(spans) > _MOST_MARKS else ""
    head = (
        f"{role}: {plural(len(spans), 'activity').replace('activitys', 'activities')} in {time(length)}, busy {works}"
    )
    return Track(role, head + more, y, tuple(marks), 7.0 + len(free) * (LANE + 2))


def _table(role: str, spans: Sequence[Activity]) -> Table:
    rows = [
        (name, kind, time(start) if start else "0", time(seconds)) for name, kind, start, seconds in spans[:_MOST_ROWS]
    ]
    if len(spans) > _MOST_ROWS:
        rows.append((f"and {len(spans) - _MOST_ROWS} more", "", "", ""))
    return Table(f"{role}, one call", ("name", "kind", "start", "time"), tuple(rows))
