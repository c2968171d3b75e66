"""The command line `pytest-fusion`: replay a failing case, render a report from JSON."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_fusion.errors import FusionError, ReplayError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pytest-fusion", description="Judge fused kernels against their references.")
    commands = parser.add_subparsers(dest="command", required=True)
    replay = commands.add_parser("replay", help="run the case of a replay file again")
    replay.add_argument("file", type=Path)
    replay.add_argument("pytest_args", nargs="*", help="further arguments for pytest, after --")
    report = commands.add_parser("report", help="make an HTML report from a --fusion-json file")
    report.add_argument("json", type=Path)
    report.add_argument("html", type=Path)
    return parser


def _replay(file: Path, more: Sequence[str]) -> int:
    import pytest

    from pytest_fusion.diagnosis.replay import owner

    return int(pytest.main([_locate(owner(file), file), "--fusion-replay", str(file), *more]))


def _locate(nodeid: str, file: Path) -> str:
    """The node id with its path as found from here.

    It is relative to the root of its project: this folder, one above it, or one above the replay file. Raises
    ``ReplayError`` where none of them has the file.
    """
    path, _, name = nodeid.partition("::")
    here, there = Path.cwd(), file.resolve().parent
    for folder in (here, *here.parents, *there.parents):
        if (folder / path).is_file():
            return f"{os.path.relpath(folder / path)}::{name}"
    raise ReplayError(
        f"{file} belongs to {nodeid}, and neither {here} nor {there} lies in a project with the file {path}; "
        "run this in the project's folder"
    )


def _report(source: Path, target: Path) -> int:
    from pytest_fusion.report.html import write_html
    from pytest_fusion.report.json_file import read_json

    records, environment = read_json(source)
    write_html(target.absolute(), records, environment)
    sys.stdout.write(f"html report: {target}\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 4, as pytest, for an error of use, else what the command returns."""
    given = _parser().parse_args(argv)
    try:
        if given.command == "replay":
            return _replay(given.file, given.pytest_args)
        return _report(given.json, given.html)
    except FusionError as error:
        sys.stderr.write(f"pytest-fusion: {error}\n")
        return 4


if __name__ == "__main__":
    raise SystemExit(main())
