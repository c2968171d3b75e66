"""The table of ``--fusion-counters``: what the hardware counted of each kernel, beside the bytes that are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_fusion.report.bench_figures import Figures
from pytest_fusion.report.columns import UNKNOWN, Listing, clipped
from pytest_fusion.report.numbers import quantity, three, time, whole

# No latency: ncu runs a kernel alone and from emptied caches.
_TITLE = "counters of each kernel under ncu, from empty caches"
_COUNTERS = ("kernel", "launches", "DRAM read", "written", "DRAM/bytes", "occupancy", "tensor pipe", "ncu's time")
_DROP = (7, 1, 6, 5)
# Names of C++ with all that a template was given would leave no room for numbers.
_LONGEST = 34


def counter_listing(found: Sequence[Figures]) -> Listing:
    """The kernels of each call by name, each call's sum above them where there are several."""
    rows: list[tuple[str, ...]] = []
    groups: list[str] = []
    for one in found:
        own = list(_rows(one))
        rows += own
        groups += [f"{one.test} {one.label}"] * len(own)
    return Listing(_TITLE, _COUNTERS, tuple(rows), tuple(groups), _DROP).known()


def _rows(one: Figures) -> list[tuple[str, ...]]:
    kernels: dict[str, list[Mapping[str, Any]]] = {}
    for launch in one.counters.get("launches", ()):
        kernels.setdefault(launch["kernel"], []).append(launch)
    everything = [launch for launches in kernels.values() for launch in launches]
    # Beside what copy engines move, the kernels' bytes are the least that the call moves.
    least = ">" if one.counters.get("unseen") else ""
    whole_call = [_row("all kernels", everything, one.moved, least)] if len(kernels) > 1 else []
    least = "" if whole_call else least
    return [*whole_call, *(_row(name, launches, one.moved, least) for name, launches in kernels.items())]


def _row(name: str, launches: Sequence[Mapping[str, Any]], needed: int | None, least: str) -> tuple[str, ...]:
    read, written = _sum(launches, "dram_read_bytes"), _sum(launches, "dram_written_bytes")
    ratio = (read + written) / needed if needed and read is not None and written is not None else None
    return (
        clipped(name, _LONGEST),
        str(len(launches)),
        quantity(read),
        quantity(written),
        UNKNOWN if ratio is None else f"{least}{f'{ratio:.2f}' if ratio < 1 else three(ratio)}x",
        whole(_mean(launches, "occupancy")),
        whole(_mean(launches, "tensor_share")),
        time(_sum(launches, "duration_s")),
    )


def _known(launches: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A counter of each launch; nothing where one of them has none."""
    found = [float(value) for launch in launches if isinstance(value := launch.get(name), int | float)]
    return found if len(found) == len(launches) else []


def _sum(launches: Sequence[Mapping[str, Any]], name: str) -> float | None:
    found = _known(launches, name)
    return sum(found) if found else None


def _mean(launches: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Over the time of all launches, where that is known; else over the launches."""
    found = _known(launches, name)
    seconds = _known(launches, "duration_s")
    weights = seconds if sum(seconds) > 0 else [1.0] * len(found)
    return sum(v * w for v, w in zip(found, weights, strict=True)) / sum(weights) if found else None
