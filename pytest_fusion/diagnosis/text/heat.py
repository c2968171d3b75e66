"""Errors on a logarithmic scale: the level of a cell, and a picture of all of them in characters. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# The unit of an error map's cells.
SCALE = "error over allowed"
# From within the allowed error to far beyond; ASCII, since a CI log may show nothing else.
CHARACTERS = " .:-=+*#%@"
TOP = len(CHARACTERS) - 1
_ROWS, _COLUMNS = 16, 48


def number(value: Any) -> float:
    """A cell as JSON may have left it: ``"inf"`` is infinity, and so is anything that is no number."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return math.inf
    return math.inf if math.isnan(found) else found


def largest(cells: Iterable[Sequence[float]]) -> float:
    """The largest finite cell, at least 10: the scale has one decade or more."""
    return max([10.0, *(value for row in cells for value in row if math.isfinite(value))])


def level(value: float, top: float) -> int:
    """0 within what is allowed; 1 to 8 evenly in the logarithm from 1 to ``top``; 9 where it is infinite."""
    if value <= 1:
        return 0
    if math.isinf(value):
        return TOP
    return 1 + min(int((TOP - 1) * math.log(value) / math.log(top)), TOP - 2)


def pooled(cells: Sequence[Sequence[float]], rows: int, columns: int) -> list[list[float]]:
    """The largest of neighbouring cells, so that at most ``rows`` x ``columns`` are left."""
    height, width = min(rows, len(cells)), min(columns, len(cells[0]) if cells else 0)
    down, across = _parts(len(cells), height), _parts(len(cells[0]) if cells else 0, width)
    return [[max(cells[y][x] for y in part for x in span) for span in across] for part in down]


def _parts(size: int, count: int) -> list[range]:
    """``range(size)`` in ``count`` parts; neighbours may share an index, as with adaptive pooling."""
    return [range(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


def drawing(found: Mapping[str, Any]) -> list[str]:
    """An error map as lines of at most 48 characters and a legend; empty if all cells have one level."""
    if found.get("scale") != SCALE:
        return []
    every = [[number(value) for value in row] for row in found.get("cells") or ()]
    small = pooled(every, _ROWS, _COLUMNS)
    top = largest(every)
    levels = [[level(value, top) for value in row] for row in small]
    used = {value for row in levels for value in row}
    if len(used) < 2:
        return []
    rows, columns = found.get("shape") or (len(every), len(every[0]))
    bars = [f"|{''.join(CHARACTERS[value] for value in row)}|" for row in levels]
    return [f"{rows:,} x {columns:,}, worst of each cell: {_legend(used, top)}", *bars]


def _legend(used: set[int], top: float) -> str:
    if used == {0, TOP}:
        return f"blank right, '{CHARACTERS[TOP]}' wrong"
    text = ["blank allowed"] if 0 in used else []
    if used & set(range(1, TOP)):
        text.append(f"'{CHARACTERS[1]}' to '{CHARACTERS[TOP - 1]}' 1 to {top:,.3g} times the allowed (log)")
    if TOP in used:
        text.append(f"'{CHARACTERS[TOP]}' none allowed (NaN, inf, exact)")
    return ", ".join(text)
