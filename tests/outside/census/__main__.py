"""``python -m tests.outside.census [--only NAME] [--seeds 0-2] [--device cuda] [--processes 14] [--json FILE]``."""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REFERENCES = ("dtype", "float32")
PACKAGES = (
    "liger",
    "fla",
    "flag_gems",
    "conch",
    "unsloth",
    "flash_attn",
    "mamba",
    "cut_cross_entropy",
    "adasplash",
    "quantization",
)
# A layout that the launcher does not take, and nothing documents that.
STRIDES = {"ignores-strides"}
WIDTHS = (58, 9, 4, 8, 46, 5, 6)


@dataclass(frozen=True, slots=True)
class Row:
    """What one test of one kernel gave; ``record`` is the test's entry of ``--fusion-json``."""

    package: str
    kernel: str
    reference: str
    seed: int
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> tuple[str, ...]:
        """The codes for which the test fails."""
        listed = self.record.get("findings") or ()
        if not listed and self.record.get("verdict") == "fail":
            return (str(self.record.get("cause")),)
        return tuple(f["code"] for f in listed if f["level"] == "wrong")

    @property
    def hazards(self) -> tuple[str, ...]:
        return tuple(f["code"] for f in self.record.get("findings") or () if f["level"] == "hazard")

    @property
    def verdict(self) -> str:
        """Of a test that fails ``wrong``, or why that is no surprise; ``hazard`` for one that passes with some."""
        if self.record["verdict"] == "fail":
            left = set(self.wrong) - set(self.record.get("proved", ()))
            return "wrong" if left - STRIDES else "strides" if left else "proved"
        return "hazard" if self.hazards else str(self.record["verdict"])

    def cells(self) -> tuple[str, ...]:
        message = str(self.record.get("message") or "").strip().replace("\n", " | ")[:300]
        return (
            f"{self.package}: {self.kernel}",
            self.reference,
            str(self.seed),
            self.verdict,
            " ".join((*self.wrong, *(f"({code})" for code in self.hazards))),
            str(self.record.get("cases", 0)),
            f"{self.record.get('seconds', 0):.1f}",
            message,
        )


@dataclass(frozen=True, slots=True)
class Settings:
    device: str
    seconds: float
    cases: int


def command(*arguments: str, settings: Settings) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if settings.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.outside.census.examined", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    )


def lines(child: subprocess.Popen[str], seconds: float) -> Iterator[dict[str, Any]]:
    """What ``child`` answers; it ends, with all that it started, when a line takes longer than ``seconds``."""
    assert child.stdout is not None
    with child, selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(seconds):
                os.killpg(child.pid, signal.SIGKILL)
                yield {"verdict": "no end", "message": f"no answer within {seconds:.0f} s", "seconds": seconds}
                break
            line = child.stdout.readline()
            if not line:
                break
            yield json.loads(line)


def rows(package: str, kernel: str, seeds: range, settings: Settings) -> Iterator[Row]:
    """One kernel against both references with each seed; a run that ends its process does not end the others."""
    left = [(reference, seed) for seed in seeds for reference in REFERENCES]
    while left:
        runs = [f"{reference}:{seed}" for reference, seed in left]
        child = command(package, kernel, settings.device, str(settings.cases), *runs, settings=settings)
        ended = False
        for record in lines(child, settings.seconds):
            ended = True
            yield Row(package, kernel, *left.pop(0), record)
        if left and not ended:
            died = {"verdict": "died", "message": f"the process ended with {child.returncode}"}
            yield Row(package, kernel, *left.pop(0), died)


def listed(package: str, settings: Settings) -> tuple[list[str], str]:
    """Names of the kernels of ``package``, or why it is left out."""
    names = []
    for line in lines(command(package, settings=settings), 300):
        if "name" not in line:
            return [], str(line.get("skipped") or line.get("message"))
        if settings.device.partition(":")[0] in line["devices"]:
            names.append(line["name"])
    return names, "" if names else "listing its kernels ended the process"


def summary(found: list[Row]) -> list[str]:
    """Kernels by package and reference, each by its worst seed, as a table in Markdown."""
    order = ("pass", "hazard", "strides", "proved", "wrong")
    worst: dict[tuple[str, str, str], str] = {}
    for row in found:
        key = row.package, row.reference, row.kernel
        verdicts = {worst.get(key, "pass"), row.verdict}
        worst[key] = max(verdicts, key=lambda v: order.index(v) if v in order else len(order))
    lines = ["", "| package | reference | kernels | pass | hazards | strides | wrong, proved | wrong | not judged |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for package, reference in dict.fromkeys(key[:2] for key in worst):
        counts = Counter(v if v in order else "" for key, v in worst.items() if key[:2] == (package, reference))
        cells = [counts.total(), *(counts[v] for v in (*order, ""))]
        lines.append(f"| {package} | {reference} | {' | '.join(map(str, cells))} |")
    return lines


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.outside.census", description=__doc__)
    parser.add_argument("--only", default="", help="kernels whose 'package: name' contains this")
    parser.add_argument("--seeds", type=_seeds, default=range(1), help="each test with these seeds, such as 0-2")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--processes", type=int, default=1, help="so many kernels at a time")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one test")
    parser.add_argument("--cases", type=int, default=0, help="cases of a test at most; 0: as many as a test has")
    parser.add_argument("--json", type=Path, help="all records go here")
    return parser.parse_args()


def main() -> int:
    options = _parse()
    device = "cuda:0" if options.device == "cuda" else options.device
    settings = Settings(device, options.seconds, options.cases)
    started, printing = time.monotonic(), threading.Lock()
    found: list[Row] = []

    def line(cells: tuple[str, ...]) -> None:
        text = "  ".join(cell.ljust(width) for cell, width in zip(cells, (*WIDTHS, 0), strict=True)).rstrip()
        print(text, flush=True)

    def work(job: tuple[str, str]) -> None:
        for row in rows(*job, options.seeds, settings):
            with printing:
                found.append(row)
                line(row.cells())

    skipped, jobs = {}, []
    with ThreadPoolExecutor(options.processes) as pool:
        wanted = [package for package in PACKAGES if package == options.only.partition(":")[0]] or PACKAGES
        for package, (names, why) in zip(wanted, pool.map(lambda p: listed(p, settings), wanted), strict=True):
            jobs += [(package, name) for name in names if options.only in f"{package}: {name}"]
            if why:
                skipped[package] = why
        line(("kernel", "reference", "seed", "verdict", "findings, (hazards)", "cases", "s", ""))
        list(pool.map(work, jobs))
    for package, why in skipped.items():
        print(f"skipped {package}: {why}")
    counts = Counter(row.verdict for row in found)
    print(f"{len(jobs)} kernels, {len(found)} tests, {time.monotonic() - started:.0f} s: ", end="")
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.most_common()))
    for level in ("wrong", "hazards"):
        for code, number in Counter(code for row in found for code in set(getattr(row, level))).most_common():
            print(f"{number:5d}  {level}: {code}")
    print("\n".join(summary(found)))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    return 1 if set(counts) - {"pass", "hazard", "strides", "proved"} else 0


if __name__ == "__main__":
    sys.exit(main())
