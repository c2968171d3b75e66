"""Baselines as lines for people: what there is, how old it is, and what one file holds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pytest_fusion.bench.baseline.codec import Baseline
from pytest_fusion.bench.baseline.row import Latency, Row
from pytest_fusion.bench.baseline.store import find, read
from pytest_fusion.errors import BaselineError


def listed(folder: Path, now: datetime) -> list[str]:
    """A line for each file: test, device class, cases, age, file. What cannot be read is a line too.

    Raises ``BaselineError`` where there is no baseline at all, with the command that makes some.
    """
    paths = find(folder)
    if not paths:
        raise BaselineError(f"{folder} has no baselines; make them with: pytest --fusion-bench --fusion-update new")
    table = [("test", "device", "cases", "age", "file")]
    broken = []
    for path in paths:
        try:
            found = read(path)
        except BaselineError as error:
            broken.append(str(error))
            continue
        cases = {key.case for key in found.rows}
        table.append((found.test, found.device, str(len(cases)), _age(found, now), path.name))
    return [*_aligned(table), *broken]


def shown(path: Path, now: datetime) -> list[str]:
    """What one file holds, in words. Raises ``BaselineError``."""
    found = read(path)
    lines = [found.test, f"on {found.device}, {_age(found, now)} old"]
    for row in found.rows.values():
        lines += ["", f"{row.case}  {row.role}", *(f"  {line}" for line in _of(row))]
    return lines


def _of(row: Row) -> list[str]:
    facts = [(fact, str(value)) for fact, value in sorted(row.facts.items())]
    facts += [(f"kernel {name}", f"{count} x") for name, count in sorted(row.names.items())]
    lines = _aligned(facts)
    if row.latency is not None:
        lines.append(_latency(row.latency))
    lines += [
        f"golden {output.name}: {output.dtype} {list(output.shape)}, {output.digest[:19]}" for output in row.golden
    ]
    return [*lines, *(f"{name} {value}" for name, value in sorted(row.environment.items()))]


def _latency(found: Latency) -> str:
    sessions = len(found.history) + 1
    return (
        f"{found.fused_s * 1e6:.4g} us, reference {found.reference_s * 1e6:.4g} us; log ratio {found.ratio:+.4f} "
        f"({found.low:+.4f} to {found.high:+.4f}), {len(found.blocks)} blocks, {sessions} session"
        f"{'s' if sessions > 1 else ''}"
    )


def _age(found: Baseline, now: datetime) -> str:
    """Of the newest row, in days; a file that was written by hand has none."""
    times = []
    for row in found.rows.values():
        try:
            made = datetime.fromisoformat(row.made)
        except ValueError:
            continue
        times.append(made if made.tzinfo else made.replace(tzinfo=UTC))
    if not times:
        return "of unknown age"
    days = max(0, (now - max(times)).days)
    return "today" if days == 0 else f"{days} d"


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    if not table:
        return []
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
