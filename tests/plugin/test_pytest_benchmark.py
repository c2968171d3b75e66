"""Latencies in the tables and files of pytest-benchmark, with it and without."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from pytest_fusion.plugin.benchmark import other_gpu, timed_rows
from tests.plugin.conftest import Project
from tests.plugin.test_fusion_bench import TORCH
from tests.sweeps import sweep

installed = pytest.mark.skipif(importlib.util.find_spec("pytest_benchmark") is None, reason="no pytest-benchmark")
BOTH = {f"test_it.py::test_relu::64x100 float32::{role}" for role in ("fused", "reference")}
PLAIN = """
def test_plain():
    pass
"""


@pytest.fixture
def run(project: Project, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # By this pytest-benchmark knows a worker, where it switches itself off.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    project.write(TORCH + PLAIN)

    def run(*options: str) -> pytest.RunResult:
        return project.run("--fusion-bench", *options, fork=True)

    return run


def saved(project: Project, name: str = "bench.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project.pytester.path / name).read_text())
    return found


@installed
@sweep("workers", [(), ("-n", "1")], ids=["serial", "workers"], fast=("serial",))
def test_latencies_are_rows_of_its_files(project: Project, run: Any, workers: tuple[str, ...]) -> None:
    """Both sides of each pair, with their raw seconds, launches and bytes; from workers of pytest-xdist too."""
    result = run("--benchmark-json=bench.json", *workers)

    result.assert_outcomes(passed=2)
    rows = {row["fullname"]: row for row in saved(project)["benchmarks"]}
    assert set(rows) == BOTH
    fused = rows["test_it.py::test_relu::64x100 float32::fused"]
    raw = next(
        r
        for t in project.report["tests"]
        for r in t["bench"]["rows"]
        if "latency" in r and r["case"] == "64x100 float32"
    )
    assert fused["stats"]["data"] == raw["samples"]["fused"]
    assert fused["stats"]["median"] == pytest.approx(raw["latency"]["fused_s"])
    assert fused["options"] == {"timer": "host"}
    assert fused["extra_info"]["launches.kernels"] == 1
    assert fused["extra_info"]["bytes.algorithmic"] == 2 * 64 * 100 * 4
    assert {row["group"] for row in rows.values()} == {"test_relu 64x100 float32"}
    assert saved(project)["machine_info"]["gpu"] is None
    result.stdout.fnmatch_lines(["*benchmark 'test_relu 64x100 float32': 2 tests*"])


@installed
def test_a_stored_run_is_compared_with(project: Project, run: Any) -> None:
    """``--benchmark-save`` and ``--benchmark-compare`` find the rows by test, case and role."""
    run("--benchmark-save=first").assert_outcomes(passed=2)

    result = run("--benchmark-compare", "-W", "ignore")

    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*benchmark 'test_relu 64x100 float32': 4 tests*"])


@installed
def test_a_run_on_another_gpu_is_refused(project: Project, run: Any) -> None:
    """Its numbers would say nothing; the message names both devices, and nothing is run first."""
    run("--benchmark-save=first").assert_outcomes(passed=2)
    (path,) = Path(project.pytester.path).glob(".benchmarks/*/*first.json")
    stored = json.loads(path.read_text())
    stored["machine_info"]["gpu"] = {"name": "NVIDIA H200"}
    path.write_text(json.dumps(stored))

    result = run("--benchmark-compare")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*the stored run was made on NVIDIA H200, this one is on no GPU*"])


@installed
@pytest.mark.parametrize(
    ("option", "passed", "skipped", "rows"),
    [("--benchmark-only", 1, 1, True), ("--benchmark-skip", 1, 1, False), ("--benchmark-disable", 2, 0, False)],
)
def test_its_options_hold_for_measured_tests(
    project: Project, run: Any, option: str, passed: int, skipped: int, rows: bool
) -> None:
    """Tests with ``fusion_bench`` are the benchmarks of a run with ``--fusion-bench``."""
    result = run(option, "--benchmark-json=bench.json", "-W", "ignore")

    result.assert_outcomes(passed=passed, skipped=skipped)
    text = (project.pytester.path / "bench.json").read_text() if rows else ""
    assert ("test_relu" in text) is rows
    assert bool([line for line in result.outlines if "benchmark 'test_relu" in line]) is rows


@installed
def test_without_the_option_it_has_no_rows(project: Project) -> None:
    """A run without ``--fusion-bench`` leaves pytest-benchmark alone."""
    project.write(TORCH)

    result = project.run(fork=True)

    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*benchmark 'test_relu*")


def test_it_may_be_absent(project: Project, run: Any) -> None:
    """With ``-p no:benchmark``, which is as if it were not installed, our own table and record are whole."""
    result = run("-p", "no:benchmark")

    result.assert_outcomes(passed=2)
    assert any("latency" in row for t in project.report["tests"] for row in t["bench"]["rows"])
    result.stdout.no_fnmatch_line("*benchmark 'test_relu*")


ROW = {
    "test": "t.py::test_it",
    "case": "n=1",
    "role": "fused backward",
    "facts": {"launches.kernels": 2},
    "latency": {"fused_s": 1e-3, "reference_s": 2e-3, "ratio": -0.7, "low": -0.8, "high": -0.6, "method": {}},
}


def test_a_row_gives_both_sides_of_its_pair() -> None:
    """Of each role; without raw samples the medians stand for them, and a row without a latency gives none."""
    other = {"test": "t.py::test_it", "case": "n=1", "role": "reference backward", "facts": {"launches.kernels": 5}}

    found = {row.standin.fullname: row for row in timed_rows([ROW, other])}

    assert list(found) == ["t.py::test_it::n=1::fused backward", "t.py::test_it::n=1::reference backward"]
    assert [row.seconds for row in found.values()] == [[1e-3], [2e-3]]
    assert [row.standin.extra_info["launches.kernels"] for row in found.values()] == [2, 5]


@pytest.mark.parametrize(
    ("there", "here", "ours", "refused"),
    [
        ({"name": "A100"}, {"name": "H200"}, True, True),
        ({"name": "H200"}, {"name": "H200"}, True, False),
        (None, {"name": "H200"}, True, True),
        (None, None, True, False),
        ({"name": "A100"}, {"name": "H200"}, False, False),
    ],
)
def test_only_rows_of_another_gpu_do_not_compare(there: Any, here: Any, ours: bool, refused: bool) -> None:
    """Files without rows of this plugin are none of its business."""
    stored = {"machine_info": {"gpu": there}, "benchmarks": [{"extra_info": {"fusion": {}} if ours else {}}]}

    assert (other_gpu({"gpu": here}, stored) is not None) is refused
