"""A listing of measured calls as text that fits a terminal, by dropping columns; and the format of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fusion.report.case_table import Table

# Not known; not applicable.
UNKNOWN, NONE = "?", "-"
_GAP, _INDENT = "  ", "  "


@dataclass(frozen=True, slots=True)
class Listing:
    """``rows`` of cells under ``header``; the first cell names the row, ``groups`` has the test of each row. Columns in
    ``drop`` go first where there is no room. The last cell of a short row is text of any length."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    groups: tuple[str, ...] = ()
    drop: tuple[int, ...] = ()

    def table(self) -> Table:
        """For a page, which scrolls: every column, and each row's full name."""
        names = self.groups or ("",) * len(self.rows)
        rows = tuple((f"{group} {row[0]}".strip(), *row[1:]) for group, row in zip(names, self.rows, strict=True))
        return Table(self.title, self.header, rows)

    def known(self) -> Listing:
        """Without the columns that have no known cell."""
        whole = [row for row in self.rows if len(row) == len(self.header)]
        empty = [i for i in range(1, len(self.header)) if whole and all(row[i] in (UNKNOWN, NONE, "") for row in whole)]
        return self.without(empty)

    def without(self, columns: Sequence[int]) -> Listing:
        if not columns:
            return self
        left = [i for i in range(len(self.header)) if i not in columns]
        rows = tuple(tuple(row[i] for i in left) if len(row) == len(self.header) else row for row in self.rows)
        drop = tuple(left.index(i) for i in self.drop if i in left)
        return Listing(self.title, tuple(self.header[i] for i in left), rows, self.groups, drop)


def lines(listing: Listing, width: int) -> list[str]:
    """The listing in at most ``width`` characters a line, except for text at the end of short rows. Names of tests move
    above their rows where there is no room, then columns go, and last the middle of the names."""
    flat = Listing(listing.title, listing.header, listing.table().rows, (), listing.drop)
    if _width(flat, 0) <= width or not listing.groups:
        return _grid(_fitted(flat, width, 0), width, 0)
    head, *body = _grid(_fitted(listing, width, len(_INDENT)), width, len(_INDENT))
    found = [head]
    for number, line in enumerate(body):
        if number == 0 or listing.groups[number] != listing.groups[number - 1]:
            found.append(clipped(listing.groups[number], width))
        found.append(line)
    return found


def clipped(text: str, width: int) -> str:
    """``text`` without its middle if it is too long: both ends of a test's name distinguish it from others."""
    if len(text) <= width:
        return text
    most = max(width - 1, 2)
    return f"{text[: (most + 1) // 2]}…{text[len(text) - most // 2 :]}"


def _fitted(listing: Listing, width: int, indent: int) -> Listing:
    while listing.drop and _width(listing, indent) > width:
        listing = listing.without(listing.drop[:1])
    return listing


def _widths(listing: Listing) -> list[int]:
    whole = [row for row in [listing.header, *listing.rows] if len(row) == len(listing.header)]
    widths = [max(len(row[i]) for row in whole) for i in range(len(listing.header))]
    return [max([widths[0], *(len(row[0]) for row in listing.rows)]), *widths[1:]]


def _width(listing: Listing, indent: int) -> int:
    widths = _widths(listing)
    return indent + sum(widths) + len(_GAP) * (len(widths) - 1)


def _grid(listing: Listing, width: int, indent: int) -> list[str]:
    """Columns as wide as their widest cell, the first flush left, others right; a short row's last cell is longer."""
    widths = _widths(listing)
    rest = sum(widths[1:]) + len(_GAP) * (len(widths) - 1)
    widths[0] = max(min(widths[0], width - indent - rest), 8)

    def line(cells: Sequence[str]) -> str:
        first = clipped(cells[0], widths[0]).ljust(widths[0])
        if len(cells) < len(listing.header):
            return " " * indent + _GAP.join([first, *cells[1:]])
        others = (cell.rjust(size) for cell, size in zip(cells[1:], widths[1:], strict=True))
        return (" " * indent + _GAP.join([first, *others])).rstrip()

    return [line(listing.header), *map(line, listing.rows)]


_UNITS = ("B", "kB", "MB", "GB", "TB")


def quantity(size: float | None) -> str:
    """Bytes with three significant digits and a decimal unit: ``"268 MB"``."""
    if size is None:
        return UNKNOWN
    value, unit = float(size), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


def time(seconds: float | None) -> str:
    """Three significant digits in microseconds, milliseconds or seconds: ``"55.1 us"``."""
    if seconds is None:
        return UNKNOWN
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * scale < 999.5:
            return f"{three(seconds * scale)} {unit}"
    return f"{three(seconds)} s"


def three(value: float) -> str:
    """Three significant digits, also zeros, never in powers of ten: ``"5.70"``, ``"1240"``."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.9995 else f"{value:.3g}"


def whole(share: float | None) -> str:
    """Whole per cent, with one digit below 10 %: ``"91 %"``, ``"0.4 %"``."""
    if share is None:
        return UNKNOWN
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"
