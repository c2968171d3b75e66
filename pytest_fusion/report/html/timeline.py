"""One call of a kernel above one of its reference, on one scale of time: what ran when, and the gaps between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_fusion.report.case_table import Table
from pytest_fusion.report.columns import clipped
from pytest_fusion.report.html.axis import Axis, Tick
from pytest_fusion.report.numbers import time, whole
from pytest_fusion.run.measure.timing.activity import Activity, busy
from pytest_fusion.spec.wording import plural

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
