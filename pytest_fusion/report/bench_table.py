"""The tables of ``--fusion-bench``: costs of each case, and resources of each kernel on each target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_fusion.report.bench_figures import Figures, figures
from pytest_fusion.report.case_table import Table
from pytest_fusion.report.columns import NONE, UNKNOWN, Listing, clipped, lines, quantity, three, time, whole
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.wording import grouped, with_number

WIDTH = 80
_TIMES = (
    "case", "fused", "reference", "speed-up", "interval", "of copy", "of matmul", "bound", "host", "peak",
    "ref. peak", "timed by",
)  # fmt: skip
_TIMES_DROP = (11, 10, 9, 6, 8, 7, 5, 4, 2)
_COSTS = ("case", "launches", "ref. launches", "bytes", "ref. bytes", "saved", "baseline")
_COSTS_DROP = (4, 2, 5)
_MEMORY = ("case", "peak", "ref. peak", "retained", "ref. retained")
_MEMORY_DROP = (4, 3)
_KERNELS = ("kernel", "target", "registers", "local", "shared", "warps", "tensor core", "compiled in")
_KERNELS_DROP = (7, 6, 5)
# No latency: ncu runs a kernel alone and from emptied caches.
_COUNTERS_TITLE = "counters of each kernel under ncu, from empty caches"
_COUNTERS = ("kernel", "launches", "DRAM read", "written", "DRAM/bytes", "occupancy", "tensor pipe", "ncu's time")
_COUNTERS_DROP = (7, 1, 6, 5)
# C++ names with all their template arguments would leave no room for numbers.
_LONGEST = 34
# A rewritten kernel changes the counts of some thirty instructions; the JSON file has them all.
_MOST_CHANGES = 4


def bench_tables(records: Iterable[TestRecord]) -> list[Table]:
    """Costs of each measured case, and resources of each kernel on each target; empty if nothing was measured."""
    return [listing.table() for listing in _listings(list(records))]


def bench_lines(records: Sequence[TestRecord], width: int = WIDTH) -> list[str]:
    """The tables as text of at most ``width`` characters a line, and notes on what could not be measured."""
    found: list[str] = []
    for listing in _listings(records):
        found += [*([""] if found else []), f"{listing.title}:", *lines(listing, width)]
    return [*found, *bench_notes(records)]


def bench_notes(records: Iterable[TestRecord]) -> list[str]:
    """Changes from the baselines, unusual timing, and reasons for missing measurements, each once."""
    records = list(records)
    unusual = grouped((one.unusual, f"{one.test} {one.label}") for one in figures(records) if one.unusual)
    lines = [f"latency of {with_number(same)}: {how}" for how, same in unusual.items()]
    tests: dict[str, list[str]] = {}
    for record in records:
        for note in dict.fromkeys(record.bench.get("notes", ())):
            tests.setdefault(note, []).append(record.nodeid.rpartition("::")[2])
    notes = [f"{same[0]}: {note}" if len(same) == 1 else note for note, same in tests.items()]
    return [*changed_lines(records), *lines, *notes]


def changed_lines(records: Iterable[TestRecord]) -> list[str]:
    """A line for each change from a baseline, regressions first: the first row that shares it, what, before and now."""
    rows: dict[str, list[str]] = {}
    for record in records:
        for one in record.bench.get("compared", ()):
            change = _changes(one)
            if change:
                role = "" if one["role"] == "fused" else f", {one['role']}"
                rows.setdefault(change, []).append(f"{record.nodeid.rpartition('::')[2]} {one['case']}{role}")
    worst = sorted(rows.items(), key=lambda row: not row[0].startswith("regressed"))
    return [f"{with_number(same)}: {change}" for change, same in worst]


def _changes(compared: Mapping[str, Any]) -> str:
    parts = grouped((change["verdict"], change["what"]) for change in compared.get("changes", ()))
    listed = [
        f"{verdict}: {', '.join(parts[verdict][:_MOST_CHANGES])}"
        + (f" and {len(parts[verdict]) - _MOST_CHANGES} more" if len(parts[verdict]) > _MOST_CHANGES else "")
        for verdict in ("regressed", "accepted", "changed", "improved", "unknown")
        if verdict in parts
    ]
    return "; ".join(listed) + str(compared.get("context", "")) if listed else ""


def latency_listing(found: Sequence[Figures]) -> Listing:
    """Times beside the reference's, and as shares of what this device can do."""
    return _listing("latency", _TIMES, _TIMES_DROP, [(one.test, _time(one)) for one in found if one.timed]).known()


def cost_listing(found: Sequence[Figures]) -> Listing:
    """Launches and bytes. If some were counted and some modelled, the modelled ones are marked."""
    counted = [one for one in found if one.fact("launches.kernels") is not None]
    ways = {way for one in counted for way in (_way(one.row), _way(one.other)) if way}
    modelled = ways == {"modelled"}
    how = " (modelled: a GPU launches at least as many)" if modelled else ""
    rows = [(one.test, _cost(one, say_modelled=not modelled)) for one in counted]
    return _listing(f"launches and bytes{how}", _COSTS, _COSTS_DROP, rows)


def memory_listing(found: Sequence[Figures]) -> Listing:
    """Memory of calls with their backward pass; that of forward calls is beside their latency."""
    rows = []
    for one in found:
        if one.phase == "backward" and one.fact("memory.peak") is not None:
            case = one.case if one.series == "fused" else f"{one.case}, {one.series}"
            names = ("memory.peak", "memory.retained")
            sizes = [quantity(figure(name)) for name in names for figure in (one.fact, one.reference_fact)]
            rows.append((one.test, (case, *sizes)))
    return _listing("device memory above the inputs, forward and backward", _MEMORY, _MEMORY_DROP, rows).known()


def _listings(records: Sequence[TestRecord]) -> list[Listing]:
    found = figures(records)
    listings = (latency_listing(found), cost_listing(found), memory_listing(found), counter_listing(found))
    return [listing for listing in (*listings, resource_listing(records)) if listing.rows]


def resource_listing(records: Sequence[TestRecord]) -> Listing:
    """Resources of each kernel on each target, by test and case; once if they are equal in several cases."""
    rows: list[_Grouped] = []
    for record in records:
        # Another compile time does not make another row.
        alike: dict[tuple[str, ...], tuple[tuple[str, ...], dict[str, None]]] = {}
        for case, row in _kernels(record):
            key = row[:-1] if len(row) == len(_KERNELS) else row
            alike.setdefault(key, (row, {}))[1][case] = None
        for row, cases in alike.values():
            rows.append((f"{record.nodeid.rpartition('::')[2]} {with_number(list(cases))}".rstrip(), row))
    return _listing("resources of each kernel", _KERNELS, _KERNELS_DROP, rows)


# A row after the name of its group.
_Grouped = tuple[str, tuple[str, ...]]


def _listing(title: str, header: tuple[str, ...], drop: tuple[int, ...], rows: Sequence[_Grouped]) -> Listing:
    return Listing(title, header, tuple(row for _, row in rows), tuple(group for group, _ in rows), drop)


def _time(one: Figures) -> tuple[str, ...]:
    up = one.speed_up
    latency = one.row["latency"]
    return (
        one.label,
        time(one.fused_s),
        time(one.reference_s),
        UNKNOWN if up is None else f"{three(up[0])}x",
        UNKNOWN if up is None else f"{three(up[1])}-{three(up[2])}",
        whole(one.copy_share),
        NONE if one.flops == 0 else whole(one.matmul_share),
        one.bound or UNKNOWN,
        time(one.measure("host_s")),
        quantity(one.fact("memory.peak")),
        quantity(one.reference_fact("memory.peak")),
        ", ".join(str(latency.get("method", {}).get(name, UNKNOWN)) for name in ("timer", "cache")),
    )


def _cost(one: Figures, *, say_modelled: bool) -> tuple[str, ...]:
    moved, theirs = one.moved, one.reference_fact("bytes.moved")

    def launches(count: int | None, row: Mapping[str, Any]) -> str:
        if count is None:
            return UNKNOWN
        return f"{count} modelled" if say_modelled and _way(row) == "modelled" else str(count)

    return (
        one.label,
        launches(one.fact("launches.kernels"), one.row),
        launches(one.reference_fact("launches.kernels"), one.other),
        quantity(moved),
        quantity(theirs),
        f"{theirs / moved:.1f}x" if moved and theirs else UNKNOWN,
        one.verdict,
    )


def _way(row: Mapping[str, Any]) -> str:
    """How a row's launches were counted; empty if they were not."""
    if "launches.kernels" not in row.get("facts", {}):
        return ""
    return str(row.get("methods", {}).get("launches", "modelled"))


def _kernels(record: TestRecord) -> list[_Grouped]:
    """A row of each kernel and target, with the case that launches it, in the order of entries and launches."""
    found: list[_Grouped] = []
    for one in record.bench.get("resources", []):
        case = str(one.get("case", ""))
        if one["status"] != "compiled":
            found.append((case, (one["kernel"], one["target"], f"{one['status']}: {one['reason']}")))
            continue
        held, instructions = one.get("occupancy"), one.get("instructions", {})
        seconds = one.get("seconds")
        row = (
            one["kernel"],
            one["target"],
            str(one["registers"]),
            quantity(one["local_bytes"]),
            quantity(one["shared_static"] + one["shared_dynamic"]),
            f"{held['warps']} of {held['most']}" if held else UNKNOWN,
            str(sum(count for name, count in instructions.items() if name.startswith("tensor_core"))),
            f"{seconds:.1f} s" if seconds is not None else "cached",
        )
        found.append((case, row))
    return found


def counter_listing(found: Sequence[Figures]) -> Listing:
    """The kernels of each call by name, after the call's sum if there are several."""
    rows = [(f"{one.test} {one.label}", row) for one in found for row in _counter_rows(one)]
    return _listing(_COUNTERS_TITLE, _COUNTERS, _COUNTERS_DROP, rows).known()


def _counter_rows(one: Figures) -> list[tuple[str, ...]]:
    kernels = grouped((launch["kernel"], launch) for launch in one.counters.get("launches", ()))
    everything = [launch for launches in kernels.values() for launch in launches]
    # Copy engines move bytes too, so the kernels' bytes are a lower bound.
    least = ">" if one.counters.get("unseen") else ""
    whole_call = [_counter_row("all kernels", everything, one.moved, least)] if len(kernels) > 1 else []
    least = "" if whole_call else least
    return [*whole_call, *(_counter_row(name, launches, one.moved, least) for name, launches in kernels.items())]


def _counter_row(name: str, launches: Sequence[Mapping[str, Any]], needed: int | None, least: str) -> tuple[str, ...]:
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
    """A counter of each launch; empty if one of them has none."""
    found = [float(value) for launch in launches if isinstance(value := launch.get(name), int | float)]
    return found if len(found) == len(launches) else []


def _sum(launches: Sequence[Mapping[str, Any]], name: str) -> float | None:
    found = _known(launches, name)
    return sum(found) if found else None


def _mean(launches: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean over the time of all launches if that is known, else over the launches."""
    found = _known(launches, name)
    seconds = _known(launches, "duration_s")
    weights = seconds if sum(seconds) > 0 else [1.0] * len(found)
    return sum(v * w for v, w in zip(found, weights, strict=True)) / sum(weights) if found else None
