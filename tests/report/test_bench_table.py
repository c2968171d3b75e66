"""The tables of a bench: what they say of each row, what they leave out, and that they fit."""

from __future__ import annotations

import pytest

from pytest_fusion.report.bench_figures import figures
from pytest_fusion.report.bench_table import bench_lines, bench_tables
from pytest_fusion.report.columns import clipped, quantity, three, time, whole
from tests.report.benched import latency, record, rows, sweep


def test_a_timed_row_says_time_speed_up_and_what_it_reaches() -> None:
    """Both times, their ratio with its interval, shares of the ceilings, host time and peaks, with units."""
    (table, _) = bench_tables([record(rows(reference={"facts": {"work.flops": 10**9}}))])

    assert table.title == "latency"
    assert dict(zip(table.header[:-2], table.rows[0][:-2], strict=True)) == {
        "case": "test_rms_norm rows=8192 hidden=8192 bfloat16",
        "fused": "73.8 us",
        "reference": "506 us",
        "speed-up": "6.86x",
        "interval": "6.79-6.93",
        "of copy": "91 %",
        "of matmul": "1.7 %",
        "bound": "memory",
        "host": "21.0 us",
        "peak": "134 MB",
    }
    assert table.rows[0][-2:] == ("537 MB", "graph, cold")


def test_what_was_not_measured_has_no_number() -> None:
    """Without ceilings there is no share and no bound; a column in which nothing is known is not there."""
    bare = rows(fused={"measures": None, "facts": {"memory.peak": None}}, reference={"facts": {"memory.peak": None}})
    (alone, _) = bench_tables([record(bare)])
    (mixed, _) = bench_tables([record([*bare, *rows("rows=1 hidden=8192 bfloat16")])])

    assert alone.header == ("case", "fused", "reference", "speed-up", "interval", "timed by")
    assert [row[mixed.header.index("of copy")] for row in mixed.rows] == ["?", "91 %"]
    assert [row[mixed.header.index("peak")] for row in mixed.rows] == ["?", "134 MB"]


def test_without_a_gpu_there_is_no_latency_and_counts_are_labelled() -> None:
    """The table of launches says that it is modelled, and no other table comes."""
    (table,) = bench_tables([record(rows(fused_s=None))])

    assert table.title == "launches and bytes (modelled: a GPU launches at least as many)"
    assert table.rows == (("test_rms_norm rows=8192 hidden=8192 bfloat16", "1", "9", "268 MB", "1.61 GB", "6.0x", ""),)


def test_a_modelled_count_beside_counted_ones_says_so_itself() -> None:
    """One title cannot say it of some rows."""
    found = rows(reference={"methods": {"launches": "modelled"}})
    table = bench_tables([record(found)])[1]

    assert table.title == "launches and bytes"
    assert table.rows[0][1:3] == ("1", "9 modelled")


@pytest.mark.parametrize(
    ("measures", "flops", "expected"),
    [
        ({"host_s": 1e-6}, 0, "memory"),
        ({"host_s": 1e-6}, 10**12, "compute"),
        ({"host_s": 1e-6, "matmul_flops_per_s": None}, 10**12, None),
        ({"host_s": 99e-6}, 0, "launch"),
        ({"host_s": 1e-6, "busy_s": 40e-6}, 0, "launch"),
        ({"host_s": None}, 0, None),
        ({"host_s": 1e-6, "copy_bytes_per_s": None}, 0, None),
    ],
)
def test_the_bound_is_told_where_it_was_measured(
    measures: dict[str, float | None], flops: int, expected: str | None
) -> None:
    """A slow host or an idle device is launch; else what takes longer at the ceilings; else nobody knows."""
    found = rows(fused={"measures": measures}, reference={"facts": {"work.flops": flops}})
    (one,) = figures([record(found)])

    assert one.bound == expected


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 240])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    """Columns go, never a line's end; time and speed-up stay, and a wide terminal shows all."""
    name = "tests/test_norm.py::test_rms_norm_of_a_name_that_goes_on_and_on_and_on_for_longer_than_a_line[float16-True]"
    found = [record([*sweep(), *rows(phase="backward")]), record(rows(test=name), name)]
    lines = bench_lines(found, width)

    assert max(map(len, lines)) <= width
    assert any("4.60 us" in line and "7.35x" in line for line in lines)
    assert width < 240 or "graph, cold" in "".join(lines)
    assert width > 80 or "graph, cold" not in "".join(lines)


def test_a_test_stands_above_its_rows_where_both_do_not_fit() -> None:
    """Once for each test, in the order of the run."""
    other = "tests/test_norm.py::test_layer_norm"
    lines = bench_lines([record(sweep()), record(rows(test=other), other)], 80)

    assert [line for line in lines[:10] if line.startswith("test_")] == ["test_rms_norm", "test_layer_norm"]
    assert lines[3] == "  rows=256 hidden=8192 bfloat16    4.60 us    33.8 us     7.35x  7.27-7.42"


def test_another_way_of_timing_is_told() -> None:
    """Events, a warm cache and an unsteady clock are said with the case; the usual way is not."""
    odd = latency(1e-5, 2e-5, method={"timer": "events", "cache": "warm", "warm-up": "steady"})
    lines = bench_lines([record([*rows("n=1 float16", fused={"latency": odd}), *rows()])], 80)

    assert lines[-1] == "latency of test_rms_norm n=1 float16: timer events, cache warm"
    assert sum("latency of" in line for line in lines) == 1


def test_backward_and_compiled_rows_are_named() -> None:
    """Each has a line of its own, beside the reference of its kind."""
    compiled = [row for row in rows(reference=None) if row.role == "fused"]
    found = record(
        [*rows(), *rows(phase="backward", reference={"facts": {"launches.kernels": 20}})],
    )
    found.bench["rows"].append({**compiled[0].as_json(), "role": "compiled"})
    costs = bench_tables([found])[1]

    assert [row[0].partition("bfloat16")[2] for row in costs.rows] == ["", ", backward", ", compiled"]
    assert [row[2] for row in costs.rows] == ["9", "20", "9"]


def test_numbers_have_three_digits_and_a_unit() -> None:
    """No power of ten, no digit that was not measured."""
    assert [time(value) for value in (2.345e-7, 2.3e-6, 55.14e-6, 0.9996e-3, 0.0123, 1.5, None)] == [
        "0.234 us", "2.30 us", "55.1 us", "1.00 ms", "12.3 ms", "1.50 s", "?",
    ]  # fmt: skip
    assert [three(value) for value in (0.1234, 1.0, 9.996, 99.96, 1234.0)] == ["0.123", "1.00", "10.0", "100", "1234"]
    assert [whole(value) for value in (None, 0.004, 0.914, 1.31)] == ["?", "0.4 %", "91 %", "131 %"]
    assert [quantity(value) for value in (None, 0, 999, 268_451_840)] == ["?", "0 B", "999 B", "268 MB"]
    assert clipped("abcdefghij", 5) == "ab…ij"


def test_memory_with_a_backward_pass_has_a_table() -> None:
    """Peak and retained beside the reference's, of backward rows alone; a column that nobody knows is not there."""
    found = [*rows(fused_s=None), *rows(fused_s=None, phase="backward")]
    ours, theirs = {"memory.peak": 100, "memory.retained": 0}, {"memory.peak": 3000, "memory.retained": 512}
    measured = rows(fused_s=None, phase="backward", fused={"facts": ours}, reference={"facts": theirs})
    title = "device memory above the inputs, forward and backward"

    assert not any(table.title == title for table in bench_tables([record(found)]))
    (table,) = (table for table in bench_tables([record([*rows(), *measured])]) if table.title == title)
    assert table.header == ("case", "peak", "ref. peak", "retained", "ref. retained")
    assert table.rows == (("test_rms_norm rows=8192 hidden=8192 bfloat16", "100 B", "3 kB", "0 B", "512 B"),)


def kernel(case: str, registers: int, **more: object) -> dict[str, object]:
    made: dict[str, object] = {
        "case": case, "kernel": "rms_kernel", "target": "sm_90", "status": "compiled", "registers": registers,
        "local_bytes": 0, "shared_static": 0, "shared_dynamic": 16, "instructions": {}, "seconds": None,
    }  # fmt: skip
    return {**made, **more}


def test_resources_name_the_case_and_keep_the_order_of_entries() -> None:
    """Two rows of one kernel are told apart; what is alike in several cases stands once, whatever compiling took."""
    found = [
        kernel("n=8", 48),
        kernel("n=7", 30, seconds=2.5),
        kernel("n=9", 30),
        kernel("n=6", 0, status="refused", reason="no"),
    ]
    (_, table) = bench_tables([record(rows(fused_s=None), resources=found)])

    assert [row[0] for row in table.rows] == [
        "test_rms_norm n=8 rms_kernel", "test_rms_norm n=7 and 1 more rms_kernel", "test_rms_norm n=6 rms_kernel",
    ]  # fmt: skip
    assert [row[2] for row in table.rows] == ["48", "30", "refused: no"]
    lines = bench_lines([record(rows(fused_s=None), resources=found)], 80)
    at = lines.index("test_rms_norm n=8")
    assert [line.split()[0] for line in lines[at::2]] == ["test_rms_norm"] * 3


def test_a_row_that_differs_from_its_baseline_says_in_what() -> None:
    """Before and now, the versions that may explain it, and a number for the rest; alike ones are told once."""
    more = [{"verdict": "changed", "what": f"sm_90/k/count{n} 1 -> 2"} for n in range(6)]
    changes = [{"verdict": "unknown", "what": "b"}, *more, {"verdict": "improved", "what": "memory.peak 9 -> 8"}]
    one = {"role": "fused", "verdict": "unknown", "changes": changes, "context": "; made with another triton"}
    drift = {"verdict": "changed", "what": "golden output out: a drift"}
    compared = [
        {**one, "case": "n=8"},
        {**one, "case": "n=9"},
        {"case": "n=8", "role": "reference", "verdict": "changed", "changes": [drift], "context": ""},
        {"case": "n=7", "role": "fused", "verdict": "same", "changes": [], "context": ""},
        {"case": "n=6", "role": "fused", "verdict": "same"},
    ]
    lines = bench_lines([record(rows(), compared=compared)], 80)

    counts = ", ".join(f"sm_90/k/count{n} 1 -> 2" for n in range(4))
    rest = " and 2 more; improved: memory.peak 9 -> 8; unknown: b; made with another triton"
    assert lines[-2:] == [
        f"test_rms_norm n=8 and 1 more: changed: {counts}{rest}",
        "test_rms_norm n=8, reference: changed: golden output out: a drift",
    ]
