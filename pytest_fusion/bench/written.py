"""What a whole run measured, written into the baselines by the one process that sees all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_fusion.bench.baseline.row import Key, Row
from pytest_fusion.bench.baseline.update import update


def write(folder: Path, measured: Sequence[Mapping[str, Any]], mode: str) -> list[Path]:
    """The ``bench`` of each record into ``folder``, as ``--fusion-update`` says; returns the paths that were written.

    Raises ``BaselineError``.
    """
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
