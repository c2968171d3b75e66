"""What a page draws of a bench: plots of times and rates over sizes, bars of launches, as places in a drawing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_fusion.report.bench_figures import Figures
from pytest_fusion.report.case_table import Table
from pytest_fusion.report.columns import UNKNOWN, clipped, quantity, time
from pytest_fusion.report.html.timeline import Axis, LogAxis, Tick, Timeline, timeline
from pytest_fusion.spec.wording import plural, with_number

# Of a plot's drawing, in its own units; text is 12 of them high.
WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 74, 546, 12, 266
BAR = 15
_LABEL = 78
# First what the plot is about; drawn last, above the others.
_ORDER = {"fused": 0, "compiled": 1, "reference": 2}
_COUNTS = {"kernels": "kernel", "memcpy": "copy", "memset": "memset"}


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Series:
    """``kind`` is ``"fused"``, ``"compiled"``, ``"reference"`` or ``"limit"``, which is a line without marks."""

    kind: str
    label: str
    points: tuple[Point, ...]

    @property
    def line(self) -> str:
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot: ``summary`` says it in a sentence for those who do not see it, ``table`` in numbers."""

    title: str
    summary: str
    x_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar from ``x``, ``wide`` units long, for launches of one ``kind``."""

    kind: str
    x: float
    wide: float


@dataclass(frozen=True, slots=True)
class Bar:
    role: str
    y: float
    parts: tuple[Part, ...]
    end: float
    title: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Launches side by side; ``heads`` are the cases above their bars, with their place."""

    title: str
    summary: str
    height: float
    heads: tuple[Tick, ...]
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """All plots of one test's calls of one kind; ``table`` has the numbers of ``plots``."""

    name: str
    plots: tuple[Plot, ...]
    table: Table | None
    bars: Bars | None
    timeline: Timeline | None


def drawings(found: Sequence[Figures]) -> list[Drawing]:
    """For each test, forward and backward apart; only what was measured, and no plot over a single size."""
    groups: dict[tuple[str, str], list[Figures]] = {}
    for one in found:
        groups.setdefault((str(one.row.get("test", one.test)), one.phase), []).append(one)
    drawn: list[Drawing] = []
    for (_, phase), group in groups.items():
        plots = [plot for plot in (latency_plot(group), bandwidth_plot(group)) if plot is not None]
        name = f"{group[0].test}, {phase}" if phase else group[0].test
        table = _numbers(group) if plots else None
        drawing = Drawing(name, tuple(plots), table, launch_bars(group), _timeline(group))
        if drawing.plots or drawing.bars or drawing.timeline:
            drawn.append(drawing)
    return drawn


def latency_plot(group: Sequence[Figures]) -> Plot | None:
    """Seconds a call over bytes of inputs and outputs, both logarithmic, with the least that this device allows."""
    measured = _series(group, lambda one: one.fused_s, lambda one: one.reference_s)
    limit = [(float(one.size), seconds) for one in group if one.size and (seconds := _least(one)) is not None]
    return _plot("Latency against size", measured, limit, time, "", "seconds a call")


def bandwidth_plot(group: Sequence[Figures]) -> Plot | None:
    """Bytes of inputs and outputs over seconds a call: the same bytes for both, so that higher is sooner done."""

    def rate(seconds: Callable[[Figures], float | None]) -> Callable[[Figures], float | None]:
        return lambda one: one.moved / found if one.moved and (found := seconds(one)) else None

    measured = _series(group, rate(lambda one: one.fused_s), rate(lambda one: one.reference_s))
    limit = [(float(one.size), one.moved / least) for one in group if one.size and one.moved and (least := _least(one))]
    return _plot("Bandwidth against size", measured, limit, quantity, "/s", "bytes of inputs and outputs a second")


def launch_bars(group: Sequence[Figures]) -> Bars | None:
    """Launches of the kernel and of its reference; cases with the same counts share their bars."""
    same: dict[tuple[tuple[str, ...], ...], list[Figures]] = {}
    for one in group:
        if one.series == "fused" and one.fact("launches.kernels") is not None:
            same.setdefault((_counted(one.row), _counted(one.other)), []).append(one)
    if not same:
        return None
    totals = [_total(row) for cases in same.values() for row in (cases[0].row, cases[0].other)]
    axis = Axis(max(1.0, *map(float, totals)), _LABEL, RIGHT - 170)
    heads, bars, y, sentences = [], [], 16.0, []
    for cases in same.values():
        head = with_number([one.case for one in cases])
        heads.append(Tick(y, clipped(head, 78)))
        y += 7
        for role, row in (("fused", cases[0].row), ("reference", cases[0].other)):
            if "launches.kernels" not in row.get("facts", {}):
                continue
            bars.append(_bar(role, row, axis, y))
            sentences.append(f"{head}, {role}: {bars[-1].title}")
            y += BAR + 4
        y += 18
    return Bars("Launches of one call", "; ".join(sentences), y - 10, tuple(heads), tuple(bars))


def _series(
    group: Sequence[Figures],
    ours: Callable[[Figures], float | None],
    theirs: Callable[[Figures], float | None],
) -> dict[str, list[tuple[float, float, str]]]:
    """Size, value and case of each kind; the reference beside the kernel where there is one, else beside others."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    seen: set[str] = set()
    for one in sorted(group, key=lambda one: one.series != "fused"):
        value, beside = ours(one), theirs(one)
        if one.size and value is not None:
            found.setdefault(one.series, []).append((float(one.size), value, one.case))
        if one.size and beside is not None and one.case not in seen:
            seen.add(one.case)
            found.setdefault("reference", []).append((float(one.size), beside, one.case))
    return {kind: sorted(points) for kind, points in found.items()}


def _plot(
    title: str,
    measured: Mapping[str, Sequence[tuple[float, float, str]]],
    limit: Sequence[tuple[float, float]],
    text: Callable[[float], str],
    unit: str,
    what: str,
) -> Plot | None:
    sizes = {size for points in measured.values() for size, _, _ in points}
    if len(sizes) < 2:
        return None
    values = [value for points in measured.values() for _, value, _ in points]
    # A limit far below all times would press them together at the top.
    near = [value for _, value in limit if min(values) / 10 <= value <= max(values) * 10]
    x = LogAxis.of(sorted(sizes), LEFT, RIGHT)
    y = LogAxis.of([*values, *near], BOTTOM, TOP)

    def text_of(value: float) -> str:
        return f"{text(value)}{unit}"

    series = [
        Series(
            kind,
            kind,
            tuple(
                Point(x.at(size), y.at(v), f"{kind}, {case}, {quantity(size)}: {text_of(v)}")
                for size, v, case in points
            ),
        )
        for kind, points in sorted(measured.items(), key=lambda item: _ORDER.get(item[0], len(_ORDER)))
    ]
    if limit:
        line = tuple(Point(x.at(size), y.at(value), text_of(value)) for size, value in sorted(limit))
        series.append(Series("limit", "limit of this device", line))
    ends = (
        f"{kind} {text_of(points[0][1])} at {quantity(points[0][0])} "
        f"to {text_of(points[-1][1])} at {quantity(points[-1][0])}"
        for kind, points in measured.items()
    )
    return Plot(
        title=title,
        summary=f"{what}: {'; '.join(ends)}",
        x_label="bytes of inputs and outputs",
        x_ticks=x.ticks(lambda value: _short(quantity(value))),
        y_ticks=y.ticks(lambda value: _short(text_of(value))),
        series=tuple(series),
    )


def _least(one: Figures) -> float | None:
    """Seconds that moving and computing take at the ceilings of this device, whichever is longer."""
    copy, matmul = one.measure("copy_bytes_per_s"), one.measure("matmul_flops_per_s")
    if not one.moved or copy is None or (one.flops and matmul is None):
        return None
    return max(one.moved / copy, one.flops / matmul if one.flops and matmul else 0.0)


def _numbers(group: Sequence[Figures]) -> Table:
    rows = tuple(
        (
            one.case if one.series == "fused" else f"{one.case}, {one.series}",
            quantity(one.size),
            time(one.fused_s),
            time(one.reference_s),
            f"{quantity(one.moved / one.fused_s)}/s" if one.moved and one.fused_s else UNKNOWN,
            f"{quantity(one.moved / one.reference_s)}/s" if one.moved and one.reference_s else UNKNOWN,
        )
        for one in sorted(group, key=lambda one: one.size or 0)
        if one.timed
    )
    header = ("case", "size", "fused", "reference", "bandwidth", "ref. bandwidth")
    return Table("numbers of the plots", header, rows)


def _timeline(group: Sequence[Figures]) -> Timeline | None:
    """Of the largest case that has one: at small sizes gaps of the host hide what the kernels do."""
    having = [one for one in group if one.series == "fused" and one.row.get("timeline")]
    if not having:
        return None
    one = max(having, key=lambda one: one.size or 0)
    return timeline(one.case, one.row["timeline"], one.other.get("timeline", ()))


def _counted(row: Mapping[str, Any]) -> tuple[str, ...]:
    facts = row.get("facts", {})
    return (*(str(facts.get(f"launches.{name}")) for name in _COUNTS), str(row.get("methods", {}).get("launches")))


def _total(row: Mapping[str, Any]) -> int:
    return sum(row.get("facts", {}).get(f"launches.{name}", 0) for name in _COUNTS)


def _bar(role: str, row: Mapping[str, Any], axis: Axis, y: float) -> Bar:
    parts, done, words = [], 0, []
    for name, noun in _COUNTS.items():
        count = row["facts"].get(f"launches.{name}", 0)
        if count:
            parts.append(Part(name, axis.at(done), axis.at(done + count) - axis.at(done)))
            words.append(plural(count, noun) if noun != "copy" or count == 1 else f"{count:,} copies")
            done += count
    modelled = " (modelled)" if row.get("methods", {}).get("launches", "modelled") == "modelled" else ""
    return Bar(role, y, tuple(parts), axis.at(done), (", ".join(words) or "none") + modelled)


def _short(text: str) -> str:
    """``"10 us"`` for ``"10.0 us"``: a tick is a round number."""
    return re.sub(r"\.0+(?= )", "", text)
