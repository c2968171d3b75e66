"""NVIDIA's Nsight Compute (``ncu``): its path, its command line, and its output on each kernel."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pytest_fusion.run.measure.tools.again import installed

INSTALL = (
    "ncu was not found: it comes with the CUDA toolkit (Debian and Ubuntu: cuda-nsight-compute-<version>, conda: "
    "nsight-compute); put it on PATH, or set CUDA_HOME"
)
_FORBIDDEN = "ERR_NVGPUCTRPERM"
_PERMISSION = (
    f"this user may not read the GPU's counters ({_FORBIDDEN}): run as root or with CAP_SYS_ADMIN, or load the driver "
    "with NVreg_RestrictProfilingToAdminUsers=0"
)
_SI = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BYTES = {f"{prefix}byte": scale for prefix, scale in _SI.items()}
_INSTRUCTIONS = {f"{prefix}inst": scale for prefix, scale in _SI.items()}
_SHARE = {"%": 0.01}
_SECONDS = {
    unit: scale
    for scale, units in ((1e-9, "ns nsecond"), (1e-6, "us usecond"), (1e-3, "ms msecond"), (1.0, "s second"))
    for unit in units.split()
}
# ncu's metrics: the field of each and its possible units. The tensor pipe's instructions alone mislead: on an H200 a
# softmax without products has five for each warp.
METRICS: dict[str, tuple[str, Mapping[str, float]]] = {
    "dram__bytes_read.sum": ("dram_read_bytes", _BYTES),
    "dram__bytes_write.sum": ("dram_written_bytes", _BYTES),
    "gpu__time_duration.sum": ("duration_s", _SECONDS),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("occupancy", _SHARE),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("tensor_share", _SHARE),
    "sm__inst_executed_pipe_tensor.sum": ("tensor_instructions", _INSTRUCTIONS),
}
_WHOLE = frozenset({"dram_read_bytes", "dram_written_bytes", "tensor_instructions"})

_PACKAGES = "/opt/nvidia/nsight-compute"
_COLUMNS = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
_NUMBER = re.compile(r"(\d{1,3}(,\d{3})+|\d+)(\.\d+)?([eE][+-]?\d+)?")
_LACKING = frozenset({"", "n/a", "nan", "inf", "-nan"})
_OWN, _ERROR = "==", "==ERROR=="


class UnreadableError(Exception):
    """A line of ncu's output has an unknown form."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """One launch of a kernel as the hardware counts it; ``None`` is what this GPU does not count. Bytes between the
    last cache and memory; seconds; ``occupancy``: the share of a multiprocessor's possible warps, averaged over its
    active cycles; ``tensor_share``: the share of these cycles in which its tensor pipe works."""

    kernel: str
    dram_read_bytes: int | None = None
    dram_written_bytes: int | None = None
    duration_s: float | None = None
    occupancy: float | None = None
    tensor_share: float | None = None
    tensor_instructions: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find(environment: Mapping[str, str] = os.environ) -> str | None:
    """The path of ncu, on PATH, in a CUDA toolkit, or in its own packages' folder; ``None`` if there is none."""
    packages = sorted(Path(_PACKAGES).glob("*/ncu"), reverse=True)
    return installed("ncu", ("bin/ncu",), environment, packages)


def command(executable: str, log: Path, metrics: Sequence[str], program: Sequence[str]) -> list[str]:
    """The command line of ncu on a program; ncu writes to ``log``, as the program prints too. Clocks stay as they are,
    because they time other work on the GPU; ncu empties the caches before each kernel. Kernels count between
    cudaProfilerStart and cudaProfilerStop."""
    options = ["--csv", "--clock-control", "none", "--target-processes", "all", "--replay-mode", "kernel"]
    options += ["--profile-from-start", "off", "--print-units", "base", "--log-file", str(log)]
    return [executable, *options, "--metrics", ",".join(metrics), *program]


def parse(output: str) -> list[Profiled]:
    """The launches of ncu's CSV, in order; none without a table. Raises ``UnreadableError``."""
    found: dict[int, dict[str, Any]] = {}
    for row in _rows(output):
        number = row["ID"]
        if not number.isdigit():
            raise UnreadableError(f"the launch {number!r} has no number")
        launch = found.setdefault(int(number), {"kernel": row["Kernel Name"]})
        if row["Metric Name"] in METRICS:
            name, units = METRICS[row["Metric Name"]]
            launch[name] = _value(name, row["Metric Value"], row["Metric Unit"], units)
    return [Profiled(**found[number]) for number in sorted(found)]


def lacking(output: str, metrics: Sequence[str]) -> list[str]:
    """The ``metrics`` that ncu complains about by name: a GPU may lack some."""
    complaints = [line for line in output.splitlines() if line.startswith((_ERROR, "==WARNING=="))]
    return [name for name in metrics if any(name.partition(".")[0] in line for line in complaints)]


def problem(output: str) -> str:
    """Why ncu profiled nothing, in its words or better ones; empty if it gives no reason."""
    if _FORBIDDEN in output:
        return _PERMISSION
    errors = [line.removeprefix(_ERROR).strip() for line in output.splitlines() if line.startswith(_ERROR)]
    # The program itself reports its failure better.
    errors = [line for line in errors if not line.startswith("The application returned")]
    return f"ncu says: {errors[0][:200]}" if errors else ""


def _rows(output: str) -> Iterator[dict[str, str]]:
    """The table's rows by column; a report of several processes may repeat its header."""
    header: list[str] | None = None
    for line in output.splitlines():
        if not line.strip() or line.startswith(_OWN):
            continue
        cells = next(csv.reader([line]), [])
        if set(_COLUMNS) <= set(cells):
            header = cells
        elif header is not None:
            if len(cells) != len(header):
                raise UnreadableError(f"{len(cells)} of {len(header)} columns in the line {line[:80]!r}")
            yield dict(zip(header, cells, strict=True))


def _value(name: str, text: str, unit: str, units: Mapping[str, float]) -> int | float | None:
    text = text.removeprefix("(!)").strip()
    if text.lower() in _LACKING:
        return None
    if unit not in units:
        raise UnreadableError(f"{name} in {unit!r}, where {' or '.join(units)} is known")
    if _NUMBER.fullmatch(text) is None:
        raise UnreadableError(f"{name} is {text!r}, and a number is needed")
    number = float(text.replace(",", ""))
    if name not in _WHOLE:
        return number * units[unit]
    if units[unit] == 1.0 and not number.is_integer():
        # In some locales a point separates thousands.
        raise UnreadableError(f"{name} is {text!r}, and a whole number is needed")
    return round(number * units[unit])
