"""NVIDIA's compute-sanitizer: its path, its command line, and its output.

A report is a line after ``=========`` and the indented ones below it, in its documented formats (12.x: ``at kernel(int
*)+0x70 in file.cu:6``, 11.x: ``at 0x70 in file.cu:6:kernel(int *)``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_fusion.run.measure.tools.again import installed

TOOLS: tuple[str, ...] = ("memcheck", "synccheck", "initcheck", "racecheck")
INSTALL = (
    "compute-sanitizer was not found: it comes with the CUDA toolkit (Debian and Ubuntu: cuda-sanitizer-<version>, "
    "conda: cuda-sanitizer-api); put it on PATH, or set CUDA_HOME"
)
# The sanitized process prints it before each case, to assign reports to cases.
MARK = "#pytest-fusion-case"

_BELOW = ("bin/compute-sanitizer", "compute-sanitizer/compute-sanitizer")
_PREFIX = "========="
_NEW = re.compile(r"at (?P<kernel>.+?)\+0x[0-9a-f]+(?: in (?P<file>.+?):(?P<line>\d+))?(?: \[\d+ hazards?\])?$")
_OLD = re.compile(r"at 0x[0-9a-f]+ in (?:(?P<file>.+?):(?P<line>\d+):)?(?P<kernel>.+?)(?: \[\d+ hazards?\])?$")
_THREAD = re.compile(r"by thread \((?P<thread>[\d,]+)\) in block \((?P<block>[\d,]+)\)")
_RACE = re.compile(
    r"^(?:(?P<level>\w+): )?(?P<what>Race reported between (?P<access>\w+) access) (?P<at>at .+)$", re.IGNORECASE
)
# Kernels of torch and of libraries, by the namespaces in their names.
_LIBRARIES = re.compile(
    r"\b(at|c10|cub|thrust|cutlass|cudnn|cublas\w*|nccl\w*)(::|_|<)|^(sm\d+_|ampere_|volta_|turing_)"
)


@dataclass(frozen=True, slots=True)
class Report:
    """One report: the tool, its words, and the line of the kernel (``line`` 0 if unknown). ``case`` counts cases from
    0, -1 before the first. ``mild``: the tool calls it a warning."""

    tool: str
    what: str
    kernel: str = ""
    file: str = ""
    line: int = 0
    thread: str = ""
    block: str = ""
    details: tuple[str, ...] = ()
    case: int = -1
    mild: bool = False

    @property
    def own(self) -> bool:
        """Whether the kernel may be the candidate's: those of torch and libraries are not."""
        return bool(self.kernel) and _LIBRARIES.search(self.kernel) is None

    @property
    def where(self) -> str:
        return self.kernel + (f" at {Path(self.file).name}:{self.line}" if self.line else "")

    def __str__(self) -> str:
        program = f", program ({self.block})" if self.block else ""
        more = f": {'; '.join(self.details)}" if self.details else ""
        return f"{self.tool}: {self.what} in {self.where}{program}{more}"


def find(environment: Mapping[str, str] = os.environ) -> str | None:
    """The path of compute-sanitizer, on PATH or in a CUDA toolkit; ``None`` if there is none."""
    return installed("compute-sanitizer", _BELOW, environment)


def command(executable: str, tool: str, program: Sequence[str]) -> list[str]:
    """The command line of one tool on a program and its child processes."""
    return [executable, "--tool", tool, "--target-processes", "all", "--print-limit", "100", *program]


def parse(tool: str, output: str) -> list[Report]:
    """The reports in a tool's output, in order, each distinct place once; ignores anything else."""
    found: dict[tuple[str, ...], Report] = {}
    head, below, case = "", list[str](), -1

    def close() -> None:
        report = _report(tool, head, below)
        if report is not None:
            found.setdefault((report.what, report.where), replace(report, case=case))

    for line in output.splitlines():
        if line.startswith(MARK):
            close()
            head, below, case = "", [], int(line.removeprefix(MARK).strip() or -1)
            continue
        if not line.startswith(_PREFIX):
            continue
        text = line.removeprefix(_PREFIX).rstrip()
        if text.startswith("     "):
            below.append(text.strip())
            continue
        close()
        head, below = text.strip(), []
    close()
    return list(found.values())


def _report(tool: str, head: str, below: Iterable[str]) -> Report | None:
    """A report, or ``None`` for banners, summaries, errors of API calls and notes of the tool."""
    race = _RACE.match(head)
    if race is not None:
        mild = (race["level"] or "").lower() in ("warning", "info")
        report = _located(Report(tool, race["what"], mild=mild), race["at"])
        return replace(report, details=tuple(line for line in below if line.startswith("and "))) if report else None
    report, details = None, []
    for line in below:
        if report is None:
            report = _located(Report(tool, head), line)
        elif (by := _THREAD.search(line)) is not None:
            report = replace(report, thread=by["thread"], block=by["block"])
        elif line.startswith(("Address", "and is", "Access")):
            details.append(line)
    return replace(report, details=tuple(details)) if report is not None else None


def _located(report: Report, text: str) -> Report | None:
    """The report with the place in a line ``at ...``; ``None`` for any other line."""
    at = _NEW.match(text) or _OLD.match(text)
    if at is None:
        return None
    kernel = at["kernel"].partition("(")[0].strip()
    return replace(report, kernel=kernel, file=at["file"] or "", line=int(at["line"] or 0))
