"""Where in an output the errors sit, as a page shows it: drawn cells where there are any, else words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_fusion.diagnosis.text import heat
from pytest_fusion.report.phrases import number

# More cells than this are smaller than a pixel of the drawing.
_MOST = 256
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
    """``cells[row][column]``: the error over the allowed one on a logarithmic scale, or a share from 0 to 1.

    ``top`` is where the scale ends, 0 for shares; ``shape`` the rows and columns that the cells stand for; ``text``
    says it in words.
    """

    cells: tuple[tuple[float, ...], ...]
    text: str
    caption: str
    top: float = 0.0
    shape: tuple[int, int] = (0, 0)

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
                if not self.top:
                    if value > 0:
                        yield Mark(x, y, _opacity(value), False, f"{place}: {value:.0%} wrong")
                    continue
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


def heat_map(found: Any) -> HeatMap | None:
    """What a check left under ``"error_map"``: text, rows of numbers, or a mapping.

    A mapping has ``cells`` (rows of numbers) or ``axes`` (a text for each axis of the output), and may have
    ``caption``, ``where``, ``count``, ``total``, ``scale`` and ``shape``. Anything else, an empty map or one of more
    than 256 x 256 cells is nothing: a report must not fail over a picture.
    """
    if isinstance(found, str):
        return HeatMap((), found.strip("\n"), "") if found.strip() else None
    if not isinstance(found, Mapping):
        cells = _cells(found, shares=True)
        return HeatMap(cells, "", "") if cells else None
    axes = found.get("axes")
    listed = axes if isinstance(axes, list | tuple) else ()
    shares = found.get("scale") != heat.SCALE
    cells = _cells(found.get("cells"), shares=shares)
    text = "\n".join(f"axis {axis}: {one}" for axis, one in enumerate(listed))
    if not cells and not text:
        return None
    return HeatMap(cells, text, _caption(found), 0.0 if shares else heat.largest(cells), _shape(found.get("shape")))


def _opacity(shade: float) -> float:
    """The faintest cell must still be seen on either ground."""
    return 0.2 + 0.8 * shade


def _shape(found: Any) -> tuple[int, int]:
    pair = isinstance(found, list | tuple) and len(found) == 2 and all(isinstance(size, int) for size in found)
    return (found[0], found[1]) if pair else (0, 0)


def _cells(found: Any, *, shares: bool) -> tuple[tuple[float, ...], ...]:
    """Rows of numbers, or nothing; what JSON has no number for (``"inf"``) is infinite."""
    if not isinstance(found, Sequence) or isinstance(found, str) or len(found) > _MOST:
        return ()
    rows = []
    for row in found:
        if not isinstance(row, Sequence) or isinstance(row, str) or not 0 < len(row) <= _MOST:
            return ()
        if not all(isinstance(value, int | float) or value in ("inf", "nan") for value in row):
            return ()
        numbers = (heat.number(value) for value in row)
        rows.append(tuple(min(max(value, 0.0), 1.0) if shares else value for value in numbers))
    # One cell is no picture.
    return tuple(rows) if sum(map(len, rows)) > 1 else ()


def _caption(found: Mapping[str, Any]) -> str:
    parts = [str(found["caption"])] if found.get("caption") else []
    if isinstance(found.get("count"), int) and isinstance(found.get("total"), int):
        parts.append(f"{found['count']:,} of {found['total']:,} elements wrong")
    if found.get("where"):
        parts.append(str(found["where"]))
    return ": ".join(parts)
