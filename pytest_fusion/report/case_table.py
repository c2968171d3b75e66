"""A case as tables, complete, from any plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """``rows`` of cells under ``header``; the first cell of a row names it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def case_tables(case: Mapping[str, Any]) -> tuple[Table, ...]:
    """One table of plain values, then one for each group of mappings (dims, inputs), with a column per key to compare
    inputs. The one-line ``text`` repeats all that and is left out."""
    scalars: list[tuple[str, ...]] = []
    tables: list[Table] = []
    for key, value in case.items():
        if key == "text":
            continue
        if isinstance(value, Mapping) and value and all(isinstance(item, Mapping) for item in value.values()):
            tables.append(_grid(key, value))
        elif isinstance(value, Mapping) and value:
            scalars.append((key, ", ".join(f"{name} = {cell(item)}" for name, item in value.items())))
        else:
            scalars.append((key, cell(value)))
    return (*([Table("case", (), tuple(scalars))] if scalars else []), *tables)


def cell(value: Any) -> str:
    """A value in one cell: lists in brackets, nested mappings in braces, text as it is."""
    if value is None or (isinstance(value, Mapping | list | tuple) and not value):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {cell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(cell(item) for item in value) + "]"
    return str(value)


def _grid(title: str, named: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for item in named.values() for key in item))
    rows = tuple(
        (name, *(cell(item[column]) if column in item else "" for column in columns)) for name, item in named.items()
    )
    return Table(title, ("", *columns), rows)
