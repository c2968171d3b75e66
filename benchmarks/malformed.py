"""What kernels do with calls that their specs rule out: ``python -m benchmarks.malformed PACKAGE ...``.

``suite`` are the kernels of this repository, any other name is a package of the census (tests/outside/census). Prints a
line of Markdown for each kernel, with a column for each kind of call; docs/malformed.md has what it printed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

# Distributions of the census' packages that have another name.
_RELEASES = {
    "liger": "liger-kernel",
    "fla": "fla-core",
    "flag_gems": "flag-gems",
    "conch": "conch-triton-kernels",
    "mamba": "mamba-ssm",
}
_KINDS = ("index", "offsets", "dtype", "size", "stride", "overlap")
_SHORT = {
    "equal to the reference": "right",
    "writes out of bounds": "**writes outside**",
    "reads out of bounds": "**reads outside**",
    "changes an input": "**changes an input**",
    "leaves an output unwritten": "**unwritten**",
    "is silently wrong": "**silently wrong**",
    "raises what does not state why": "**unclear exception**",
}
# One passing case is enough: what costs most and does not concern a broken call is left out.
_LEFT_OUT = ("gradients", "configs", "invariance", "honesty", "launches", "compile", "repeat")


def kind_of(call: str) -> str:
    """The kind of a call by the words of its name."""
    how = call.partition(": ")[2]
    if how in ("float64", "int32"):
        return "dtype"
    if " along " in how:
        return "size"
    if how.endswith("strides"):
        return "stride"
    if how.startswith("the memory"):
        return "overlap"
    return "offsets" if how in ("not monotone", "past the end") else "index"


def cells(calls: dict[str, str]) -> list[str]:
    """For each kind, how its calls ended, with counts."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in _KINDS}
    for call, result in calls.items():
        found[kind_of(call)][_SHORT.get(result, result)] += 1
    return [", ".join(f"{n} {result}" for result, n in counts.most_common()) for counts in found.values()]


def specs_of(package: str) -> dict[str, Any]:
    """Specs by name."""
    import pytest_fusion.plugin.testing  # noqa: F401 - chooses the lane, which comes before the import of a package

    if package != "suite":
        entries = importlib.import_module(f"tests.outside.census.{package}").kernels()
        return {entry.name: entry.spec("dtype") for entry in entries if "cpu" in entry.devices}
    folder = Path(__file__).resolve().parent.parent / "reference_kernels"
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*/spec.py")):
        specs = importlib.import_module(f"reference_kernels.{path.parent.name}.spec").SPECS
        found |= {f"{path.parent.name}: {spec.name}": spec for spec in specs if spec.requires != "cuda"}
    return found


def line_of(name: str, spec: Any, *, verbose: bool) -> str:
    """The kernel's line of the table."""
    from pytest_fusion.plugin.testing import examine

    without = {**spec.without, **dict.fromkeys(_LEFT_OUT, "not this sweep's")}
    with tempfile.TemporaryDirectory() as root:
        tried = spec.with_(malformed=True, without=without, bench=(), bench_limits={})
        record = examine(tried, max_cases=30, first=True, root=Path(root))
    entry = record.checks["malformed"]
    if verbose:
        for call, shown in entry.get("shown", {}).items():
            print(f"    {call}: {entry['calls'][call]}: {shown}", file=sys.stderr, flush=True)
    if "calls" not in entry:
        return f"| {name} | not tried: {record.failed_check or entry['reason']} |{' |' * (len(_KINDS) - 1)}"
    return f"| {name} | {' | '.join(cells(entry['calls']))} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.malformed", description=__doc__)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these kernels alone")
    parser.add_argument("--most", type=int, default=1000, help="kernels of each package at most")
    parser.add_argument("--verbose", action="store_true", help="what shows each result, on stderr")
    given = parser.parse_args()
    if len(given.packages) > 1:
        # A process for each: packages do not expect each other.
        options = ["--only", *given.only, "--most", str(given.most), *(["--verbose"] if given.verbose else [])]
        for package in given.packages:
            subprocess.run([sys.executable, "-m", "benchmarks.malformed", package, *options], check=False)
        return
    (package,) = given.packages
    found = {name: spec for name, spec in specs_of(package).items() if not given.only or name in given.only}
    release = "" if package == "suite" else f" {importlib.metadata.version(_RELEASES.get(package, package))}"
    print(f"\n## {package}{release}\n")
    print(f"| kernel | {' | '.join(_KINDS)} |\n|{'---|' * (len(_KINDS) + 1)}", flush=True)
    for name, spec in list(found.items())[: given.most]:
        print(line_of(name, spec, verbose=given.verbose), flush=True)


if __name__ == "__main__":
    main()
