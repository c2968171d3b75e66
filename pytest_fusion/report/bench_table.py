"""The tables of ``--fusion-bench`` as text: what each case costs, and what each kernel takes of each target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_fusion.report.case_table import Table
from pytest_fusion.report.record import TestRecord

_UNKNOWN = "?"
_CASES = ("case", "launches", "reference's", "bytes", "reference's", "saved", "baseline")
_KERNELS = ("kernel", "target", "registers", "local", "shared", "warps", "tensor core", "compiled in")
_UNITS = ("B", "kB", "MB", "GB", "TB")


def bench_tables(records: Iterable[TestRecord]) -> list[Table]:
    """What each measured case costs, and what each kernel takes of each target; nothing where nothing was measured."""
    measured = [record for record in records if record.bench]
    cases = tuple(row for record in measured for row in _cases(record))
    # One kernel is compiled for several cases; how long that took each time is no other row.
    kernels = tuple({row[:-1]: row for record in measured for row in reversed(_kernels(record))}.values())
    modelled = all(_is_modelled(record) for record in measured)
    how = " (modelled: a GPU launches at least as many)" if modelled else ""
    tables = [Table(f"launches and bytes{how}", _CASES, cases), Table("resources of each kernel", _KERNELS, kernels)]
    return [table for table in tables if table.rows]


def bench_lines(records: Sequence[TestRecord]) -> list[str]:
    """The tables as text, and what could not be measured."""
    lines: list[str] = []
    for table in bench_tables(records):
        lines += [*([""] if lines else []), f"{table.title}:", *_columns(table)]
    return [*lines, *bench_notes(records)]


def bench_notes(records: Iterable[TestRecord]) -> list[str]:
    """What could not be measured, and why, each once."""
    return list(dict.fromkeys(note for record in records for note in record.bench.get("notes", ())))


def _is_modelled(record: TestRecord) -> bool:
    return all(row.get("methods", {}).get("launches", "modelled") == "modelled" for row in record.bench.get("rows", ()))


def _cases(record: TestRecord) -> list[tuple[str, ...]]:
    rows = record.bench.get("rows", [])
    references = {row["case"]: row for row in rows if row["role"] == "reference"}
    verdicts = {(one["case"], one["role"]): one["verdict"] for one in record.bench.get("compared", [])}
    found: list[tuple[str, ...]] = []
    for row in rows:
        if row["role"] != "fused" or "launches.kernels" not in row.get("facts", {}):
            continue
        facts, other = row["facts"], references.get(row["case"], {}).get("facts", {})
        moved, theirs = facts.get("bytes.algorithmic"), other.get("bytes.moved")
        found.append(
            (
                f"{_name(record.nodeid)} {row['case']}",
                str(facts["launches.kernels"]),
                str(other.get("launches.kernels", _UNKNOWN)),
                quantity(moved),
                quantity(theirs),
                f"{theirs / moved:.1f}x" if moved and theirs else _UNKNOWN,
                verdicts.get((row["case"], "fused"), ""),
            )
        )
    return found


def _kernels(record: TestRecord) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for one in record.bench.get("resources", []):
        if one["status"] != "compiled":
            found.append((one["kernel"], one["target"], f"{one['status']}: {one['reason']}"))
            continue
        held, tensor = one.get("occupancy"), _tensor_core(one.get("instructions", {}))
        seconds = one.get("seconds")
        found.append(
            (
                one["kernel"],
                one["target"],
                str(one["registers"]),
                quantity(one["local_bytes"]),
                quantity(one["shared_static"] + one["shared_dynamic"]),
                f"{held['warps']} of {held['most']}" if held else _UNKNOWN,
                str(tensor),
                f"{seconds:.1f} s" if seconds is not None else "cached",
            )
        )
    return found


def _tensor_core(instructions: Mapping[str, Any]) -> int:
    return sum(count for name, count in instructions.items() if name.startswith("tensor_core"))


def quantity(size: int | None) -> str:
    """Bytes with three significant digits and a decimal unit: ``"268 MB"``."""
    if size is None:
        return _UNKNOWN
    value, unit = float(size), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


def _name(nodeid: str) -> str:
    return nodeid.rpartition("::")[2]


def _columns(table: Table) -> list[str]:
    """Columns as wide as their widest cell; the first flush left, the others right; a short row's last cell runs on."""
    title, rows = table.header, table.rows
    whole = [row for row in rows if len(row) == len(title)]
    widths = [max(len(row[i]) for row in [title, *whole]) for i in range(len(title))]
    for row in rows:
        widths[0] = max(widths[0], len(row[0]))

    def line(cells: Sequence[str]) -> str:
        if len(cells) < len(title):
            return "  ".join([cells[0].ljust(widths[0]), *cells[1:]])
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()

    return [line(title), *(line(row) for row in rows)]
