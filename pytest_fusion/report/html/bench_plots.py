"""Drawings of a bench on a page: plots of times and rates over sizes, and one call on a time scale."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_fusion.report.bench_figures import Figures
from pytest_fusion.report.columns import quantity, time, whole
from pytest_fusion.run.measure.timing.roofline import Activity, busy
from pytest_fusion.spec.wording import grouped, plural

# Of a plot, in units of the drawing; text is 12 of them high.
WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 74, 546, 12, 266
# The subject of the plot is first; it is drawn last, above the others.
_ORDER = ("fused", "compiled", "reference", "limit")
# A shorter logarithmic axis looks as if nothing grew, or everything.
_LEAST = 4.0
_MOST_TICKS = 7
# More marks are smaller than a pixel each.
_MOST_MARKS = 600


class Tick(NamedTuple):
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
        """An axis with some room around ``values``, which are positive; there is at least one."""
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
        # Each decade if there are few of them, else each second, third, ...
        stride = max(1, math.ceil(decades / _MOST_TICKS))
        values = [step * 10.0**power for power in range(first, last + 1) if power % stride == 0 for step in steps]
        # "10 us" for "10.0 us": a tick is a round number.
        shown = [(value, re.sub(r"\.0+(?= )", "", text(value))) for value in values if self.low <= value <= self.high]
        return tuple(Tick(self.at(value), short) for value, short in shown)


class Point(NamedTuple):
    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Series:
    """``kind`` is ``"fused"``, ``"compiled"``, ``"reference"`` or ``"limit"``, which is a line without marks."""

    kind: str
    points: tuple[Point, ...]

    @property
    def line(self) -> str:
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot over bytes of inputs and outputs; ``summary`` is a sentence for readers who cannot see it."""

    title: str
    summary: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    series: tuple[Series, ...]


class Mark(NamedTuple):
    """One activity: ``left`` and ``wide`` in per cent of the longer call, ``lane`` for overlapping ones."""

    kind: str
    left: float
    wide: float
    lane: int
    name: str
    title: str


class Track(NamedTuple):
    """One call: ``head`` has its length and how busy the device was."""

    role: str
    head: str
    marks: tuple[Mark, ...]
    lanes: int


class Timeline(NamedTuple):
    """One call of a kernel above one of its reference, on one scale of time; ``kinds`` for the legend."""

    title: str
    tracks: tuple[Track, ...]
    kinds: tuple[str, ...]


class Drawing(NamedTuple):
    """All plots of one test's calls of one kind."""

    name: str
    plots: tuple[Plot, ...]
    timeline: Timeline | None


def drawings(found: Sequence[Figures]) -> list[Drawing]:
    """Drawings for each test, forward and backward separately; no plot over a single size."""
    groups = grouped(((str(one.row.get("test", one.test)), one.phase), one) for one in found)
    drawn: list[Drawing] = []
    for (_, phase), group in groups.items():
        plots = tuple(plot for plot in (latency_plot(group), bandwidth_plot(group)) if plot is not None)
        line = _timeline(group)
        if plots or line:
            drawn.append(Drawing(f"{group[0].test}, {phase}" if phase else group[0].test, plots, line))
    return drawn


def latency_plot(group: Sequence[Figures]) -> Plot | None:
    """Seconds a call over bytes of inputs and outputs, both logarithmic, with the least that this device allows."""
    return _plot("Latency against size", "seconds a call", group, lambda one, seconds: seconds, time)


def bandwidth_plot(group: Sequence[Figures]) -> Plot | None:
    """Bytes of inputs and outputs over seconds a call: the same bytes for both, so higher is faster."""
    return _plot(
        "Bandwidth against size",
        "bytes of inputs and outputs a second",
        group,
        lambda one, seconds: one.moved / seconds if one.moved else None,
        lambda value: f"{quantity(value)}/s",
    )


def _plot(
    title: str,
    what: str,
    group: Sequence[Figures],
    value: Callable[[Figures, float], float | None],
    text: Callable[[float], str],
) -> Plot | None:
    # Size and value by kind and case; the reference of the kernel if there is one, else of others.
    found: dict[str, dict[str, tuple[float, float]]] = {kind: {} for kind in _ORDER}
    for one in sorted(group, key=lambda one: one.series != "fused"):
        for kind, seconds in ((one.series, one.fused_s), ("reference", one.reference_s), ("limit", _least(one))):
            y = value(one, seconds) if one.size and seconds else None
            if one.size and y is not None:
                found.setdefault(kind, {}).setdefault(one.case, (float(one.size), y))
    measured = [point for kind, points in found.items() if kind != "limit" for point in points.values()]
    if len({size for size, _ in measured}) < 2:
        return None
    values = [y for _, y in measured]
    # A limit far below all times would compress them at the top.
    near = [y for _, y in found["limit"].values() if min(values) / 10 <= y <= max(values) * 10]
    x_axis = LogAxis.of([size for size, _ in measured], LEFT, RIGHT)
    y_axis = LogAxis.of([*values, *near], BOTTOM, TOP)
    series, ends = [], []
    for kind, points in found.items():
        ordered = sorted((size, y, case) for case, (size, y) in points.items())
        drawn = (
            Point(x_axis.at(size), y_axis.at(y), f"{kind}, {case}, {quantity(size)}: {text(y)}")
            for size, y, case in ordered
        )
        series += [Series(kind, tuple(drawn))] if ordered else []
        if ordered and kind != "limit":
            (first, low, _), (last, high, _) = ordered[0], ordered[-1]
            ends.append(f"{kind} {text(low)} at {quantity(first)} to {text(high)} at {quantity(last)}")
    return Plot(title, f"{what}: {'; '.join(ends)}", x_axis.ticks(quantity), y_axis.ticks(text), tuple(series))


def _least(one: Figures) -> float | None:
    """Seconds that moving or computing takes at the ceilings of this device, the longer of both."""
    copy, matmul = one.measure("copy_bytes_per_s"), one.measure("matmul_flops_per_s")
    if not one.moved or copy is None or (one.flops and matmul is None):
        return None
    return max(one.moved / copy, one.flops / matmul if one.flops and matmul else 0.0)


def _timeline(group: Sequence[Figures]) -> Timeline | None:
    """The timeline of the largest case that has one: at small sizes gaps of the host hide the kernels."""
    having = [one for one in group if one.series == "fused" and one.row.get("timeline")]
    if not having:
        return None
    one = max(having, key=lambda one: one.size or 0)
    return timeline(one.case, one.row["timeline"], one.other.get("timeline", ()))


def timeline(case: str, fused: Iterable[Sequence[Any]], reference: Iterable[Sequence[Any]]) -> Timeline | None:
    """The timeline of activities ``(name, kind, start, seconds)``; ``None`` if none of them took time."""
    calls = {"fused": _valid(fused), "reference": _valid(reference)}
    end = max((one.start + one.seconds for spans in calls.values() for one in spans), default=0.0)
    if end <= 0:
        return None
    tracks = tuple(_track(role, spans, 100 / end) for role, spans in calls.items() if spans)
    kinds = dict.fromkeys(_kind(one.kind) for spans in calls.values() for one in spans)
    return Timeline(f"One call: {case}", tracks, tuple(kinds))


def _valid(spans: Iterable[Sequence[Any]]) -> list[Activity]:
    """Activities by their start, without those whose numbers are text, which JSON has for non-finite ones."""
    found = [Activity(str(name), str(kind), start, seconds) for name, kind, start, seconds in spans]
    good = [one for one in found if all(isinstance(value, int | float) and value >= 0 for value in one[2:])]
    return sorted(good, key=lambda one: (one.start, -one.seconds))


def _kind(kind: str) -> str:
    return kind if kind in ("kernel", "memcpy", "memset") else "other"


def _track(role: str, spans: Sequence[Activity], scale: float) -> Track:
    """Draws overlapping activities, of several streams, in lanes below each other."""
    free: list[float] = []
    marks = []
    for name, kind, start, seconds in spans[:_MOST_MARKS]:
        lane = next((number for number, until in enumerate(free) if until <= start * (1 + 1e-9)), len(free))
        free[lane:] = [start + seconds, *free[lane + 1 :]]
        title = f"{name} ({kind}): {time(seconds)} from {time(start)}"
        marks.append(Mark(_kind(kind), start * scale, seconds * scale, lane, name, title))
    length = max(one.start + one.seconds for one in spans)
    works = whole(busy(spans) / length) if length else "?"
    count = plural(len(spans), "activity").replace("activitys", "activities")
    more = f", the first {_MOST_MARKS} drawn" if len(spans) > _MOST_MARKS else ""
    return Track(role, f"{role}: {count} in {time(length)}, busy {works}{more}", tuple(marks), len(free))
