"""The command line `pytest-fusion`: replay or pin a failing case, render a report, list baselines."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_fusion.errors import FusionError, ReplayError
from pytest_fusion.plugin import cli_canary

_EXITS = "exit status: 0 it passes now, 1 it still fails, 2 it could not be judged here"
# Our package is imported before pytest; the warning would be an error in projects that make errors of warnings.
_IMPORTED = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
# The exit status of an error of use, as in pytest; a replay has 2 instead.
_USAGE = 4


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pytest-fusion", description="Judge fused kernels against their references.")
    commands = parser.add_subparsers(dest="command", required=True)
    replay = commands.add_parser("replay", help="run the case of a replay file again", epilog=_EXITS)
    replay.add_argument("file", type=Path)
    replay.add_argument("pytest_args", nargs="*", help="further arguments for pytest, after --")
    pin = commands.add_parser("pin", help="keep a replay file beside its test, which runs it first from then on")
    pin.add_argument("file", type=Path)
    report = commands.add_parser("report", help="make an HTML report from a --fusion-json file")
    report.add_argument("json", type=Path)
    report.add_argument("html", type=Path)
    baseline = commands.add_parser("baseline", help="look at what --fusion-update wrote")
    views = baseline.add_subparsers(dest="view", required=True)
    listing = views.add_parser("list", help="tests, device classes, cases and ages")
    listing.add_argument("folder", type=Path, nargs="?", help="the folder given to --fusion-baseline, if any was")
    configs = commands.add_parser("configs", help="write which autotune configs of a test's kernels give equal bits")
    configs.add_argument("test", help="a test as pytest takes it, such as tests/test_norm.py::test_norm")
    configs.add_argument("file", type=Path, help="the JSON file to write")
    configs.add_argument("pytest_args", nargs="*", help="further arguments for pytest, after --")
    cli_canary.add(commands)
    return parser


class _Records:
    """A pytest plugin that collects the records of the replayed test."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.found.extend(getattr(report, "fusion", ()))


def _replay(file: Path, more: Sequence[str]) -> int:
    """0 if the case passes now, 1 if it fails, 2 if it could not be judged. Raises ``ReplayError``."""
    import pytest

    from pytest_fusion.diagnosis.repro.replay_file import lane_of, owner

    records = _Records()
    # A failure of the CPU lane is replayed there, on a machine with a GPU too, unless another device is named.
    named = any(argument.startswith("--fusion-device") for argument in more)
    device = ["--fusion-device=cpu"] if lane_of(file) == "cpu-interpreter" and not named else []
    options = ["--fusion-replay", str(file), *device, "-W", _IMPORTED, *more]
    code = int(pytest.main([_locate(owner(file), file), *options], [records]))
    verdicts = {record["verdict"] for record in records.found}
    # pytest's own status is less exact: 1 also for a fixture that raises, 0 also for a skipped test.
    if "fail" in verdicts:
        return 1
    return 0 if verdicts == {"pass"} and code in (0, 1) else 2


def _locate(nodeid: str, file: Path) -> str:
    """The node id with its path as seen from here. It is relative to the root of its project: this folder, one above
    it, or one above the replay file. Raises ``ReplayError`` if none of them has the file."""
    path, _, name = nodeid.partition("::")
    here, there = Path.cwd(), file.resolve().parent
    for folder in (here, *here.parents, *there.parents):
        if name and (folder / path).is_file():
            return f"{os.path.relpath(folder / path)}::{name}"
    if not name:
        raise ReplayError(
            f"{file} belongs to the spec {nodeid!r} and names no test file; name it: "
            f"pytest --fusion-replay {file} tests/the_test_of_that_spec.py"
        )
    raise ReplayError(
        f"{file} belongs to {nodeid}, and neither {here} nor {there} is in a project with the file {path}; "
        "run this in the project's folder"
    )


def _pin(file: Path) -> int:
    from pytest_fusion.diagnosis.repro.replay_file import owner
    from pytest_fusion.plugin.pinned import FOLDER, names_only_spec

    nodeid = owner(file)
    # A test with that spec runs the file, and pytest looks for files from its root and from tests/ down.
    tests = Path("tests") if Path("tests").is_dir() else Path()
    folder = (tests if names_only_spec(nodeid) else Path(_locate(nodeid, file).partition("::")[0]).parent) / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        target = Path(shutil.copyfile(file, folder / file.name))
    except OSError as error:
        raise ReplayError(f"cannot copy {file} to {folder} ({error.strerror or error})") from None
    sys.stdout.write(f"pinned: {target}\ncommit it; its test runs it first from now on\n")
    return 0


def _report(source: Path, target: Path) -> int:
    from pytest_fusion.report.html.page import write_page
    from pytest_fusion.report.json_file import read_json

    records, environment = read_json(source)
    write_page(target.absolute(), records, environment)
    sys.stdout.write(f"html report: {target}\n")
    return 0


def _configs(test: str, target: Path, more: Sequence[str]) -> int:
    """Writes ``{test: {kernel: [[config, ...], ...]}}`` by equal bits; 1 if a test fails. Raises ``FusionError``."""
    import pytest

    records = _Records()
    # Under a budget not all configs are compared.
    code = int(pytest.main([test, "-W", _IMPORTED, "--fusion-seconds", "none", *more], [records]))
    found = {record["nodeid"]: record["checks"].get("configs", {}).get("classes") for record in records.found}
    found = {nodeid: classes for nodeid, classes in found.items() if classes}
    if not found:
        raise FusionError(
            f"no test of {test} passed that launches a kernel under triton.autotune, so nothing is written"
        )
    target.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"classes of configs: {target}\n")
    return min(code, 1)


def _baselines(folder: Path | None) -> int:
    from datetime import UTC, datetime

    from pytest_fusion.bench.baseline.store import FOLDER, listed

    sys.stdout.write("".join(f"{line}\n" for line in listed(folder or FOLDER, datetime.now(UTC))))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. ``replay`` and ``canary`` have own exit statuses (``--help``), others 0, or 4 for wrong use."""
    given = _parser().parse_args(argv)
    try:
        if given.command == "replay":
            return _replay(given.file, given.pytest_args)
        if given.command == "baseline":
            return _baselines(given.folder)
        if given.command == "canary":
            return cli_canary.run(given)
        if given.command == "configs":
            return _configs(given.test, given.file, given.pytest_args)
        return _pin(given.file) if given.command == "pin" else _report(given.json, given.html)
    except FusionError as error:
        sys.stderr.write(f"pytest-fusion: {error}\n")
        return 2 if given.command == "replay" else _USAGE


if __name__ == "__main__":
    raise SystemExit(main())
