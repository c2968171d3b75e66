"""Where in an output the errors sit, as a page shows it: drawn cells where there are any, else words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_fusion.diagnosis.text import heat
from pytest_fusion.report.phrases import number

_SHADES = heat.TOP - 1


@dataclass(frozen=True, slots=True)
class Mark:
    """One cell to draw: ``shade`` from 0 to 1, ``hard`` where no error at all is allowed, ``title`` on hovering."""

    x: int
    y: int
    shade: float
    hard: bool
    title: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """``cells[row][column]``: the error over the allowed one, on a logarithmic scale that ends at ``top``.

    ``shape`` has the rows and columns that the cells stand for; ``text`` says it in words.
    """

    cells: tuple[tuple[float, ...], ...]
    text: str
    caption: str
    top: float
    shape: tuple[int, int]

    @property
    def width(self) -> int:
        return max((len(row) for row in self.cells), default=0)

    @property
    def height(self) -> int:
        return len(self.cells)

    @property
    def steps(self) -> list[tuple[float, str]]:
        """The shades of the scale's legend, each with where it begins."""
        return [(_opacity(step / _SHADES), number(self.top ** (step / _SHADES))) for step in range(_SHADES)]

    @property
    def hard(self) -> bool:
        """Whether some cell is off where nothing is allowed."""
        return any(mark.hard for mark in self.marks())

    def marks(self) -> Iterator[Mark]:
        """The cells that are not blank, row by row."""
        for y, row in enumerate(self.cells):
            for x, value in enumerate(row):
                place = f"row {self._span(y, 0)}, column {self._span(x, 1)}"
                level = heat.level(value, self.top)
                if level == heat.TOP:
                    yield Mark(x, y, 1.0, True, f"{place}: wrong where no error is allowed")
                elif level:
                    title = f"{place}: {number(value)} times the allowed error"
                    yield Mark(x, y, _opacity((level - 1) / _SHADES), False, title)

    def _span(self, index: int, axis: int) -> str:
        count = (self.height, self.width)[axis]
        size = self.shape[axis] or count
        first, last = index * size // count, -(-(index + 1) * size // count) - 1
        return f"{first}" if first == last else f"{first} to {last}"


def heat_map(found: Mapping[str, Any]) -> HeatMap | None:
    """The error map of a check; ``None`` where it says nothing: of one element, and without axes."""
    cells = tuple(tuple(map(heat.number, row)) for row in found.get("cells") or ())
    text = "\n".join(f"axis {axis}: {one}" for axis, one in enumerate(found.get("axes") or ()))
    if sum(map(len, cells)) < 2:
        cells = ()  # one cell is no picture
    if not cells and not text:
        return None
    rows, columns = found.get("shape") or (0, 0)
    return HeatMap(cells, text, _caption(found), heat.largest(cells), (rows, columns))


def _opacity(shade: float) -> float:
    """The faintest cell must still be seen on either ground."""
    return 0.2 + 0.8 * shade


def _caption(found: Mapping[str, Any]) -> str:
    parts = [
        found.get("caption"),
        f"{found['count']:,} of {found['total']:,} elements wrong" if "count" in found else "",
    ]
    return ": ".join(str(part) for part in (*parts, found.get("where")) if part)
