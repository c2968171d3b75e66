"""The table of counters: each kernel's traffic beside the bytes that are needed."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_fusion.report.bench_table import bench_lines, bench_tables
from pytest_fusion.report.ci.junit import properties
from pytest_fusion.report.html.page import render
from pytest_fusion.report.record import TestRecord
from tests.report.benched import record, rows

CASE, MOVED = "rows=8192 hidden=8192 bfloat16", 268_451_840
TEMPLATE = "cunn_SoftMaxForwardReg<BFloat16, float, BFloat16, unnamed>::SoftMaxForwardEpilogue, long, 4>"


def launch(kernel: str, read: int | None, written: int | None, seconds: float | None = 73e-6, **more: Any) -> Any:
    fields = {"kernel": kernel, "dram_read_bytes": read, "dram_written_bytes": written, "duration_s": seconds}
    return {**fields, "occupancy": 0.94, "tensor_share": 0.004, "tensor_instructions": 5, **more}


def counted(*launches: Any, unseen: int = 0) -> TestRecord:
    totals = {"dram_read_bytes": launches[0]["dram_read_bytes"], "dram_written_bytes": None}
    one = {"case": CASE, "role": "fused", "status": "counted", "unseen": unseen, **totals, "launches": list(launches)}
    return record(rows(), counters=[one])


def table(found: TestRecord) -> list[dict[str, str]]:
    (one,) = (table for table in bench_tables([found]) if "counters" in table.title)
    return [dict(zip(one.header, row, strict=True)) for row in one.rows]


def test_traffic_stands_beside_the_bytes_that_are_needed() -> None:
    """What was read and written over the bytes of inputs and outputs; occupancy, tensor pipe, ncu's time."""
    (row,) = table(counted(launch("rms_norm_kernel", MOVED // 2, MOVED)))
    assert row == {
        "kernel": f"test_rms_norm {CASE} rms_norm_kernel",
        "launches": "1",
        "DRAM read": "134 MB",
        "written": "268 MB",
        "DRAM/bytes": "1.50x",
        "occupancy": "94 %",
        "tensor pipe": "0.4 %",
        "ncu's time": "73.0 us",
    }


def test_several_kernels_have_a_sum() -> None:
    """Launches of one kernel are one row; a share is that of the time."""
    found = table(
        counted(
            launch("a", 100, 200, 1e-6, occupancy=0.5),
            launch("a", 100, 200, 3e-6, occupancy=0.9),
            launch("b", MOVED, 0, 4e-6, occupancy=0.2),
        )
    )
    assert [row["kernel"].rpartition("bfloat16 ")[2] for row in found] == ["all kernels", "a", "b"]
    assert [row["launches"] for row in found] == ["3", "2", "1"]
    assert [row["DRAM read"] for row in found] == ["268 MB", "200 B", "268 MB"]
    assert [row["occupancy"] for row in found] == ["50 %", "80 %", "20 %"]
    assert [row["DRAM/bytes"] for row in found] == ["1.00x", "0.00x", "1.00x"]
    assert found[0]["ncu's time"] == "8.00 us"


def test_what_the_gpu_does_not_count_is_no_number() -> None:
    """A sum of which a part is missing is not known; a column of which nothing is known is not there."""
    one, other = launch("a", 100, None, None, tensor_share=None), launch("b", 100, 50, None, tensor_share=None)
    whole, first, second = table(counted(one, other))
    assert [row["written"] for row in (whole, first, second)] == ["?", "?", "50 B"]
    assert [row["DRAM/bytes"] for row in (whole, first)] == ["?", "?"]
    assert "tensor pipe" not in whole
    assert "ncu's time" not in whole
    assert whole["occupancy"] == "94 %"


def test_what_copy_engines_move_makes_it_the_least() -> None:
    """The call moves more than its kernels were seen to move."""
    assert table(counted(launch("a", MOVED, 0), unseen=1))[0]["DRAM/bytes"] == ">1.00x"
    found = table(counted(launch("a", MOVED, 0), launch("b", MOVED, 0), unseen=1))
    assert [row["DRAM/bytes"] for row in found] == [">2.00x", "1.00x", "1.00x"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_the_terminal(width: int) -> None:
    """Names of templates are cut, so that traffic and its ratio stay."""
    lines = bench_lines([counted(launch(TEMPLATE, MOVED, 0), launch("b", MOVED, 0))], width)
    assert max(map(len, lines)) <= width
    shown = lines[lines.index("counters of each kernel under ncu, from empty caches:") :]
    assert shown[2] == f"test_rms_norm {CASE}"
    assert any("all kernels" in line and "2.00x" in line for line in shown)
    assert width < 80 or "94 %" in shown[-1]


def test_unknown_counters_are_no_rows() -> None:
    """Their reason is a note."""
    unknown = {"case": CASE, "role": "fused", "status": "unknown", "reason": "no ncu"}
    found = record(rows(), counters=[unknown], notes=["no counters: no ncu"])
    assert not any("counters of" in line for line in bench_lines([found], 120))
    assert "test_rms_norm: no counters: no ncu" in bench_lines([found], 120)


def test_page_and_properties_have_them() -> None:
    """The page as a table, JUnit as bytes of the call where they are known."""
    found = counted(launch("rms_norm_kernel", MOVED, 0))
    page = render([found], {})
    assert "counters of each kernel under ncu" in page
    assert "DRAM/bytes" in page
    known = dict(properties(found))
    assert known[f"fusion.bench.{CASE}.fused.counters.dram_read_bytes"] == MOVED
    assert f"fusion.bench.{CASE}.fused.counters.dram_written_bytes" not in known
