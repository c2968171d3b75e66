"""The suite's speed: ``python -m benchmarks.suite [--only NAME[,NAME]] [--json FILE] [--seconds N]``, on one GPU.

Prints the table of ``benchmarks/suite/H200.md`` as its rows come. ``check`` compares all ways at small sizes, also
without a GPU; ``tune`` times other tiles for kernels; ``show`` makes one table of several runs' files.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.suite.model import LIGER, Span, UnknownName

SPANS: dict[str, tuple[Span, ...]] = {"forward": ("forward",), "all": ("forward", "both", "backward")}


def main(given: Sequence[str] | None = None) -> int:
    parser = _parser()
    chosen = parser.parse_args(given)
    try:
        if chosen.command in ("check", "show"):
            return _check(chosen) if chosen.command == "check" else _show(chosen)
        return _on_gpu(chosen)
    except UnknownName as error:
        print(f"benchmarks.suite: {error}")
        return 2


def _on_gpu(chosen: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        print("benchmarks.suite: there is no CUDA device here, and an interpreted kernel has no speed; try `check`")
        return 2
    torch.cuda.set_device(torch.device(chosen.device))
    from benchmarks.suite.tune import tuned

    return {"tune": tuned, "warm": _warm, "run": _run}[chosen.command](chosen)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--only", default="", metavar="NAME[,NAME]", help="families, or parts of rows' names")
    common.add_argument("--device", default="cuda:0")
    timed = argparse.ArgumentParser(add_help=False)
    timed.add_argument("--json", type=Path, metavar="FILE", help="written after every row")
    timed.add_argument("--seconds", type=float, default=540.0, help="budget; the rest is 'not measured: out of time'")
    timed.add_argument("--ahead", type=int, default=-1, metavar="N", help="processes that compile first; 0 for none")
    passes = argparse.ArgumentParser(add_help=False)
    passes.add_argument("--passes", choices=list(SPANS), default="all", help="forward alone, or backward too")
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--without", default="", metavar="WAY[,WAY]", help="ways left out, such as compile,Liger")
    run.add_argument("--compile-seconds", type=float, default=120.0, help="limit of each way's first call")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite", description=__doc__, parents=[common, timed, passes, run]
    )
    parser.set_defaults(command="run", candidates=False, part="0/1")
    commands = parser.add_subparsers(dest="chosen", metavar="check | tune | show")
    shown = commands.add_parser("show", help="the table of the files of several runs")
    shown.add_argument("files", type=Path, nargs="+")
    shown.set_defaults(command="show")
    for name, parents in (
        ("check", [common, run]),
        ("tune", [common, timed]),
        ("warm", [common, passes]),
    ):
        sub = commands.add_parser(name, parents=parents)
        sub.set_defaults(command=name)
        if name == "warm":
            sub.add_argument("--part", default="0/1")
            sub.add_argument("--candidates", action="store_true", help="of the tuner, instead of what is there")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _run(chosen: argparse.Namespace) -> int:
    import torch

    from benchmarks.suite.ahead import compile_ahead, processes
    from benchmarks.suite.families import rows
    from benchmarks.suite.measure import Place
    from benchmarks.suite.run import Budget, Entry, entries, lines, write
    from benchmarks.suite.table import HEADER, summary
    from benchmarks.suite.timing import Ceilings
    from pytest_fusion.bench.on_device import opened
    from pytest_fusion.run.measure.timing.alone import alone

    budget = Budget(chosen.seconds)
    wanted, absent = rows(_names(chosen.only))
    count = processes() if chosen.ahead < 0 else chosen.ahead
    if count:
        arguments = ["--only", chosen.only, "--device", chosen.device, "--passes", chosen.passes]
        print(compile_ahead(arguments, count, budget.left / 3), flush=True)
    device = torch.device(chosen.device)
    here = opened(device)
    about = _environment(here.facts)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    for name, why in absent.items():
        print(f"{name}: {why}")
    print(f"\n{HEADER}", flush=True)
    found: list[Entry] = []
    with alone(device):
        place = Place(device, here.cache, Ceilings.on(device), tuple(_ways(chosen.without)), chosen.compile_seconds)
        place.left = lambda: budget.left
        for entry in entries(wanted, place, budget, wanted=SPANS[chosen.passes]):
            found.append(entry)
            print(lines(entry), flush=True)
            if chosen.json is not None:
                write(chosen.json, about, found)
    print(f"\n{summary([bar for entry in found for bar in entry.bars])}; {budget.spent:.0f} s")
    return 0


def _ways(text: str) -> list[str]:
    return [LIGER if name.lower() == "liger" else name for name in _names(text)]


def _environment(facts: dict[str, str]) -> dict[str, Any]:
    import torch
    import triton

    liger = "not installed"
    if importlib.util.find_spec("liger_kernel") is not None:
        try:
            liger = metadata.version("liger_kernel")
        except metadata.PackageNotFoundError:
            liger = "of no version"
    return {
        "gpu": facts["device_name"],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "liger": liger,
        "python": sys.version.split()[0],
    }


def _warm(chosen: argparse.Namespace) -> int:
    import torch

    from benchmarks.suite.ahead import warm
    from benchmarks.suite.families import rows

    part, _, count = chosen.part.partition("/")
    device = torch.device(chosen.device)
    if chosen.candidates:
        from benchmarks.suite.tune import warm_candidates

        warm_candidates(_names(chosen.only), int(part), int(count), device)
    else:
        warm(rows(_names(chosen.only))[0], int(part), int(count), device, SPANS[chosen.passes])
    return 0


def _show(chosen: argparse.Namespace) -> int:
    from pytest_fusion import interpreter

    # Rows import the kernels, which nothing launches here.
    interpreter.enable()
    from benchmarks.suite.families import rows
    from benchmarks.suite.run import lines, read
    from benchmarks.suite.table import HEADER, summary

    try:
        found, environments = read(chosen.files, rows()[0])
    except ValueError as error:
        print(f"benchmarks.suite: {error}")
        return 2
    for about in environments:
        print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"\n{HEADER}")
    for entry in found:
        print(lines(entry))
    print(f"\n{summary([bar for entry in found for bar in entry.bars])}")
    return 0


def _check(chosen: argparse.Namespace) -> int:
    if chosen.device.startswith("cuda"):
        import torch

        if torch.cuda.device_count() == 0:
            chosen.device = "cpu"
    if chosen.device == "cpu":
        # Before any kernel is imported: Triton decides when it decorates one.
        from pytest_fusion import interpreter

        interpreter.enable()
    import torch

    from benchmarks.suite.check import disagreements
    from benchmarks.suite.families import rows

    wrong = 0
    for row in rows(_names(chosen.only))[0]:
        found = disagreements(row, torch.device(chosen.device), _ways(chosen.without))
        wrong += len(found)
        print(f"{row.name}: " + ("; ".join(f"{way}: {why}" for way, why in found.items()) or "agree"), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
