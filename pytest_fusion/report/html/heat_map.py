"""The places of errors in an output, for a page: drawn cells if there are any, else words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pytest_fusion.diagnosis.text import heat
from pytest_fusion.report.phrases import number

_SHADES = heat.TOP - 1


class Mark(NamedTuple):
    """One cell to draw: ``shade`` from 0 to 1, ``hard`` if no error at all is allowed, ``title`` on hovering."""

    x: int
    y: int
    shade: float
    hard: bool
    title: str


class HeatMap(NamedTuple):
    """Cells that are not blank, of ``width`` x ``height``, on a logarithmic scale up to ``top``, and as ``text``."""

    marks: tuple[Mark, ...]
    width: int
    height: int
    top: float
    text: str
    caption: str

    @property
    def steps(self) -> list[tuple[float, str]]:
        """The shades of the scale's legend, each with its start."""
        return [(_opacity(step), number(self.top ** (step / _SHADES))) for step in range(_SHADES)]


def heat_map(found: Mapping[str, Any]) -> HeatMap | None:
    """The error map of a check; ``None`` if it has one element and no axes."""
    cells = [list(map(heat.number, row)) for row in found.get("cells") or ()]
    text = "\n".join(f"axis {axis}: {one}" for axis, one in enumerate(found.get("axes") or ()))
    if sum(map(len, cells)) < 2:
        cells = []  # one cell is no picture
    if not cells and not text:
        return None
    top, height, width = heat.largest(cells), len(cells), max(map(len, cells), default=0)
    rows, columns = found.get("shape") or (0, 0)
    marks = []
    for y, row in enumerate(cells):
        for x, value in enumerate(row):
            level = heat.level(value, top)
            hard = level == heat.TOP
            what = "wrong where no error is allowed" if hard else f"{number(value)} times the allowed error"
            title = f"row {_span(y, height, rows)}, column {_span(x, width, columns)}: {what}"
            if level:
                marks.append(Mark(x, y, 1.0 if hard else _opacity(level - 1), hard, title))
    wrong = f"{found['count']:,} of {found['total']:,} elements wrong" if "count" in found else ""
    caption = ": ".join(str(part) for part in (found.get("caption"), wrong, found.get("where")) if part)
    return HeatMap(tuple(marks), width, height, top, text, caption)


def _span(index: int, count: int, size: int) -> str:
    """The rows or columns of a cell, of ``size`` in all."""
    first, last = index * (size or count) // count, -(-(index + 1) * (size or count) // count) - 1
    return f"{first}" if first == last else f"{first} to {last}"


def _opacity(step: int) -> float:
    """The opacity of a shade; the faintest cell must be visible on a light and a dark page."""
    return 0.2 + 0.8 * step / _SHADES
