"""A process of its own for one kernel: ``python -m tests.outside.census.examined PACKAGE KERNEL DEVICE CASES RUN ...``.

A run is ``REFERENCE:SEED``. Each gives a line of JSON on stdout: the record of the test, or why there is none. With
``PACKAGE`` alone the lines are the names of its kernels. Everything else that is printed goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any


def kernels(package: str) -> list[Any]:
    """What ``package`` lists, with Triton's interpreter on where there is no GPU; raises what its import raises."""
    import pytest_fusion.plugin.testing  # noqa: F401 - chooses the lane, which comes before the import of a package

    warnings.simplefilter("ignore")
    name = package if "." in package else f"tests.outside.census.{package}"
    return list(importlib.import_module(name).kernels())


def examine_one(entry: Any, reference: str, seed: int, device: str, cases: int | None) -> dict[str, Any]:
    """The record of one test as JSON types; ``{"verdict": "broken", ...}`` where the spec or the judge raises."""
    from pytest_fusion.plugin.testing import examine

    with tempfile.TemporaryDirectory() as folder:
        try:
            record = examine(entry.spec(reference), seed=seed, device=device, max_cases=cases, root=Path(folder))
        except Exception as error:  # noqa: BLE001 - any of them is the answer
            return {"verdict": "broken", "message": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
    return {**record.as_json(), "proved": list(entry.proved)}


def main(arguments: list[str]) -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        print(json.dumps(value, default=str), file=answers, flush=True)

    package, *rest = arguments
    try:
        found = {entry.name: entry for entry in kernels(package)}
    except Exception as error:  # noqa: BLE001 - a package that is not installed, or that does not import here
        answer({"skipped": f"{type(error).__name__}: {error}".splitlines()[0]})
        return 0
    if not rest:
        for entry in found.values():
            answer({"name": entry.name, "devices": list(entry.devices)})
        return 0
    name, device, cases, *runs = rest
    import torch

    torch.set_num_threads(1)
    for run in runs:
        reference, seed = run.split(":")
        answer(examine_one(found[name], reference, int(seed), device, int(cases) or None))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
