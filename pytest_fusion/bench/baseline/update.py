"""Which rows of a run go into the files, by the mode of ``--fusion-update``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_fusion.bench.baseline import store
from pytest_fusion.bench.baseline.codec import Baseline
from pytest_fusion.bench.baseline.facts import RECOMPILES, group, with_unmeasured
from pytest_fusion.bench.baseline.latency_judge import continued
from pytest_fusion.bench.baseline.row import Key, Row
from pytest_fusion.errors import BaselineError


def update(
    folder: Path,
    rows: Sequence[Row],
    mode: str,
    *,
    regressed: Collection[Key] = (),
    complete: Collection[str] = (),
) -> list[Path]:
    """Writes ``rows`` of this run as ``mode`` says; returns the written paths.

    ``"none"`` writes nothing. ``"new"`` adds rows that no file has, and facts, latency and golden outputs that a row
    lacks. ``"regressed"`` also replaces the rows in ``regressed``, ``"all"`` every measured row. Other rows stay,
    except, with ``"all"``, those of tests in ``complete``, whose every case was measured: the other cases no longer
    exist. Only the process that sees all of a run writes. Raises ``BaselineError``, also for two different rows of one
    case; then nothing is written.
    """
    if mode == "none" or not rows:
        return []
    by_file: dict[tuple[str, str], dict[Key, Row]] = {}
    for row in merge(rows):
        by_file.setdefault((row.test, row.device), {})[row.key] = row
    with store.locked(folder) as made:
        changed = []
        for (test, device), measured in sorted(by_file.items()):
            stored = store.load(folder, test, device) or Baseline(test, device)
            updated = _chosen(stored, measured, mode, regressed)
            if mode == "all" and test in complete:
                updated = {key: row for key, row in updated.items() if key in measured}
            changed.append(replace(stored, rows=updated))
        return [*made, *store.write(folder, changed)]


def write_measured(folder: Path, measured: Sequence[Mapping[str, Any]], mode: str) -> list[Path]:
    """Writes the ``bench`` of each record of a run as :func:`update` does; returns the written paths."""
    rows = [Row.from_json(data) for one in measured for data in one.get("rows", ())]
    tests = [(one, Row.from_json(one["rows"][0]).test) for one in measured if one.get("rows")]
    regressed = [
        Key(test, compared["case"], compared["role"])
        for one, test in tests
        for compared in one.get("compared", ())
        if compared["verdict"] == "regressed"
    ]
    complete = [test for one, test in tests if one.get("complete")]
    return update(folder, rows, mode, regressed=regressed, complete=complete)


def merge(rows: Iterable[Row]) -> list[Row]:
    """Each row once, from all workers; of equal facts the last latency. Raises ``BaselineError`` where facts differ."""
    found: dict[tuple[Key, str], Row] = {}
    for row in rows:
        earlier = found.get((row.key, row.device))
        if earlier is not None and (earlier.facts, earlier.names) != (row.facts, row.names):
            raise BaselineError(
                f"{row.key} was measured twice on {row.device} with different facts ({_difference(earlier, row)}); "
                "give the cases of the test different sizes or ids, or find out what the facts depend on"
            )
        found[row.key, row.device] = row
    return list(found.values())


def _chosen(stored: Baseline, measured: Mapping[Key, Row], mode: str, regressed: Collection[Key]) -> dict[Key, Row]:
    updated = dict(stored.rows)
    for key, row in measured.items():
        before = stored.rows.get(key)
        if before is None:
            updated[key] = row
        elif mode == "all" or (mode == "regressed" and key in regressed):
            updated[key] = _again(before, row)
        else:
            updated[key] = _filled(before, row)
    return updated


def _again(before: Row, row: Row) -> Row:
    """The new row with what this run did not measure (golden outputs, latency, a group of facts) from before."""
    latency = row.latency
    if latency is None:
        latency = before.latency
    elif before.latency is not None:
        latency = continued(before.latency, latency, before.made)
    new = replace(
        row,
        facts=with_unmeasured(before.facts, row.facts),
        names=row.names if any(group(fact) == "launches" for fact in row.facts) else row.names or before.names,
        methods={**before.methods, **row.methods},
        reasons=row.reasons if RECOMPILES in row.facts else before.reasons,
        latency=latency,
        golden=row.golden or before.golden,
    )
    # A time of day alone is no change worth a review.
    return before if replace(new, made=before.made) == before else new


def _filled(before: Row, row: Row) -> Row:
    """The stored row with what it lacks. Its own values stay, so no change is accepted."""
    # Today's reasons explain the stored count only if it is the same.
    explains = before.facts.get(RECOMPILES) in (None, row.facts.get(RECOMPILES))
    return replace(
        before,
        facts={**row.facts, **before.facts},
        names=before.names or row.names,
        methods={**row.methods, **before.methods},
        reasons=before.reasons or (row.reasons if explains else {}),
        latency=before.latency or row.latency,
        golden=before.golden or row.golden,
    )


def _difference(one: Row, other: Row) -> str:
    for name in sorted({*one.facts, *other.facts}):
        if one.facts.get(name) != other.facts.get(name):
            return f"{name}: {one.facts.get(name)} and {other.facts.get(name)}"
    return "the names of its kernels"
