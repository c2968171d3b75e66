"""What CI systems get: JUnit scalars and GitHub's step summary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_fusion.errors import FusionError
from pytest_fusion.report.ci import github, junit
from pytest_fusion.report.record import TestRecord
from tests.report.benched import record, rows, sweep
from tests.sweeps import sweep as some_fast

Make = Callable[..., TestRecord]


def test_junit_gets_scalars_alone(passing: Make, failing: Make) -> None:
    """Each property is a short name with a scalar, and what has no value is left out."""
    assert dict(junit.properties(failing())) == {
        "fusion_verdict": "fail",
        "fusion_cases": 23,
        "fusion_rejected": 0,
        "fusion_failed_check": "values",
        "fusion_cause": "tail-mask",
        "fusion_worst_ratio": 2380.0,
        "fusion_replay": ".fusion/failures/causal.json",
    }
    assert all(type(value) in (str, int, float) for _, value in junit.properties(passing()))


def test_the_summary_tells_failures_first(passing: Make, failing: Make, environment: dict[str, Any]) -> None:
    """Totals, environment and a table whose first row is the failure with its replay command."""
    lines = github.summary([passing(), failing()], environment).splitlines()
    rows = [line for line in lines if line.startswith(("| fail", "| pass"))]

    assert lines[2] == "**1 failed**, **1 passed**"
    assert "torch 2.13.0+cpu" in lines[4]
    assert [row.split(" | ")[0] for row in rows] == ["| fail", "| pass"]
    assert (
        "`pytest 'tests/test_softmax.py::test_softmax[causal]' --fusion-replay .fusion/failures/causal.json`" in rows[0]
    )


def test_no_text_breaks_the_table(failing: Make) -> None:
    """Pipes, newlines, backticks and tags of a message stay inside their cell."""
    record = failing(nodeid="t.py::test[a|b`c]", message="a | b\nc <img> `d` *e*")
    row = next(line for line in github.summary([record], {}).splitlines() if line.startswith("| fail"))

    assert row.replace("\\|", "").count("|") == 5
    assert "<img>" not in row


def test_a_long_summary_is_cut_below_the_limit_with_a_word(failing: Make) -> None:
    """Above the limit GitHub would drop everything, so rows are left out and counted."""
    records = [failing(nodeid=f"t.py::test_é{index}") for index in range(200)]
    text = github.summary(records, {}, limit_bytes=10_000)
    kept = sum(line.startswith("| fail") for line in text.splitlines())

    assert len(text.encode()) <= 10_000
    assert 0 < kept < 200
    assert f"{200 - kept} more tests left out" in text


def test_what_other_steps_wrote_is_kept_and_counted(tmp_path: Path, passing: Make) -> None:
    """The summary is appended, and nothing is when the file is nearly full."""
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    github.append_summary(path, [passing()], {})
    assert path.read_text().startswith("before\n## pytest-fusion")

    path.write_text("x" * (github.LIMIT_BYTES - 10))
    github.append_summary(path, [passing()], {})
    assert path.stat().st_size == github.LIMIT_BYTES - 10


def test_an_unwritable_summary_is_a_named_error(tmp_path: Path, passing: Make) -> None:
    """The error names the file and how to do without."""
    with pytest.raises(FusionError, match="unset GITHUB_STEP_SUMMARY"):
        github.append_summary(tmp_path / "none" / "summary.md", [passing()], {})


def test_junit_gets_each_figure_of_a_bench_as_a_scalar() -> None:
    """Facts, measures, times and ratios of each row under its case and role, and what became of it."""
    case = "rows=8192 hidden=8192 bfloat16"
    found = record(
        rows(case),
        compared=[{"case": case, "role": "fused", "verdict": "same", "reason": ""}],
        limits=[{"case": case, "role": "fused", "limit": "peak_memory", "verdict": "within", "reason": ""}],
    )
    named = dict(junit.properties(found))

    stem = f"fusion.bench.{case}"
    assert named[f"{stem}.fused.launches.kernels"] == 1
    assert named[f"{stem}.reference.launches.kernels"] == 9
    assert named[f"{stem}.fused.launches.method"] == "graph"
    assert named[f"{stem}.fused.latency.fused_s"] == 73.8e-6
    assert named[f"{stem}.fused.latency.ratio"] == pytest.approx(73.8 / 506)
    assert named[f"{stem}.fused.host_s"] == 21e-6
    assert named[f"{stem}.fused.verdict"] == "same"
    assert named[f"{stem}.fused.limit.peak_memory"] == "within"
    assert all(type(value) in (str, int, float) for value in named.values())


def test_junit_gets_no_figure_that_was_not_measured() -> None:
    """No latency without a GPU, and text that JSON has for infinity is no number."""
    bare = record(rows(fused_s=None))
    assert not any("latency" in name or "memory" in name for name, _ in junit.properties(bare))

    odd = record(rows())
    odd.bench["rows"][0]["latency"]["high"] = "inf"
    odd.bench["rows"][0]["measures"]["host_s"] = "nan"
    names = [name for name, _ in junit.properties(odd)]
    assert not any(name.endswith(("latency.high", "host_s")) for name in names)


def test_the_summary_has_the_tables_of_the_bench(passing: Make) -> None:
    """Below the tests, each with its title and as many cells in a row as in its head."""
    measured = record(sweep(), notes=["n=1 was | not measured"])
    lines = github.summary([passing(), measured], {}).splitlines()
    at = lines.index("### latency")
    table = lines[at + 2 : lines.index("", at + 2)]

    assert "| rests on |" in lines[6]
    assert table[2].startswith("| test\\_rms\\_norm rows=256 hidden=8192 bfloat16 | 4.60 us | 33.8 us | 7.35x |")
    assert len({line.count("|") for line in table}) == 1
    assert "### launches and bytes" in lines
    assert lines[-1] == "* test\\_rms\\_norm: n=1 was \\| not measured"


def test_the_summary_says_why_a_bench_failed(passing: Make) -> None:
    """In the row of the test, and below the tables for each case."""
    change = {"verdict": "regressed", "what": "launches.kernels 1 -> 2"}
    compared = [{"case": "n=1", "role": "fused", "verdict": "regressed", "reason": "", "changes": [change]}]
    found = replace(
        record(rows("n=1"), compared=compared),
        verdict="fail",
        failed_check="bench",
        message="test_rms_norm: bench failed\n  n=1, fused: regressed: launches.kernels 1 -> 2",
        checks={"bench": {"verdict": "fail", "reason": "n=1, fused: regressed: launches.kernels 1 -> 2"}},
    )
    lines = github.summary([found], {}).splitlines()

    assert "n=1, fused: regressed: launches.kernels 1 -&gt; 2" in next(x for x in lines if x.startswith("| fail"))
    assert lines[-1] == "* test\\_rms\\_norm n=1: regressed: launches.kernels 1 -&gt; 2"


def test_a_summary_without_a_bench_is_as_it_was(passing: Make) -> None:
    """No heading of nothing."""
    assert "###" not in github.summary([passing()], {})


@some_fast("limit", [900, github.LIMIT_BYTES, 2_000, 5_000, 20_000], fast=2)
def test_a_summary_of_a_long_bench_is_cut_with_a_word(limit: int, failing: Make) -> None:
    """Whatever the limit, all of it holds; what is missing is counted, and no head stands without a row."""
    records = [failing(), record(sweep(range(16, 16 + 3000)), notes=["é" * 300] * 3)]
    text = github.summary(records, {}, limit_bytes=limit)
    lines = text.splitlines()

    assert len(text.encode()) <= limit
    assert any("of the bench left out: the summary may hold 1 MiB" in line for line in lines) == (limit < 10**6)
    assert all(lines[at + 4].startswith("| ") for at, line in enumerate(lines) if line.startswith("### "))
