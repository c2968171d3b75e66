"""Where in an output the errors sit, as a page shows it: drawn cells where there are any, else words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# More cells than this are smaller than a pixel of the drawing.
_MOST = 256


@dataclass(frozen=True, slots=True)
class HeatMap:
    """``cells[row][column]`` from 0 (no element wrong) to 1 (every one); ``text`` says it in words."""

    cells: tuple[tuple[float, ...], ...]
    text: str
    caption: str

    @property
    def width(self) -> int:
        return max((len(row) for row in self.cells), default=0)

    @property
    def height(self) -> int:
        return len(self.cells)


def heat_map(found: Any) -> HeatMap | None:
    """What a check left under ``"error_map"``: text, rows of numbers, or a mapping.

    A mapping has ``cells`` (rows of numbers) or ``axes`` (a text for each axis of the output), and may have
    ``caption``, ``where``, ``count`` and ``total``. Anything else, an empty map or one of more than 256 x 256 cells is
    nothing: a report must not fail over a picture.
    """
    if isinstance(found, str):
        return HeatMap((), found.strip("\n"), "") if found.strip() else None
    if not isinstance(found, Mapping):
        cells = _cells(found)
        return HeatMap(cells, "", "") if cells else None
    axes = found.get("axes")
    listed = axes if isinstance(axes, list | tuple) else ()
    cells = _cells(found.get("cells"))
    text = "\n".join(f"axis {axis}: {said}" for axis, said in enumerate(listed))
    return HeatMap(cells, text, _caption(found)) if cells or text else None


def _cells(found: Any) -> tuple[tuple[float, ...], ...]:
    """Rows of numbers as shares, or nothing."""
    if not isinstance(found, Sequence) or isinstance(found, str) or len(found) > _MOST:
        return ()
    rows = []
    for row in found:
        if not isinstance(row, Sequence) or isinstance(row, str) or not 0 < len(row) <= _MOST:
            return ()
        if not all(isinstance(value, int | float) for value in row):
            return ()
        rows.append(tuple(_share(float(value)) for value in row))
    # One cell is no picture.
    return tuple(rows) if sum(map(len, rows)) > 1 else ()


def _caption(found: Mapping[str, Any]) -> str:
    parts = [str(found["caption"])] if found.get("caption") else []
    if isinstance(found.get("count"), int) and isinstance(found.get("total"), int):
        parts.append(f"{found['count']:,} of {found['total']:,} elements wrong")
    if found.get("where"):
        parts.append(str(found["where"]))
    return ": ".join(parts)


def _share(value: float) -> float:
    return 1.0 if math.isnan(value) else min(max(value, 0.0), 1.0)
