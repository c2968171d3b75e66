"""``--fusion-counters``: what a run without a GPU says of it, and what a test does in the process that ncu watches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_fusion.bench import profiled
from tests.plugin.conftest import Project

TEST = """
def double(x):
    with open("calls.txt", "a") as stream:
        print(x.numel(), torch.is_grad_enabled(), file=stream)
    return x * 2

@few
@fused_equivalent(
    lambda x: x + x, inputs={"x": tensor("n")}, bench=[{"n": 8, "dtype": torch.float32}, {"n": 16}, {"n": 32}]
)
def test_double(x):
    if x.numel() == 32:
        raise ValueError("not 32")
    return double(x)

def test_fixture(fusion_bench):
    for n in (4, 5):
        fusion_bench(double, lambda x: x + x, torch.ones(n, requires_grad=True), case=f"n={n}")
"""
GREEN = """
@few
@fused_equivalent(relu_reference, inputs=X, bench=[{"rows": 4, "hidden": 8}, {"rows": 5, "hidden": 8}])
def test_it(x):
    return relu(x)

def test_fixture(fusion_bench):
    fusion_bench(relu, relu_reference, torch.ones(4), case="one")
"""


def test_under_ncu_the_cases_asked_for_are_called(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice to warm up and once counted, without gradients and without a check; one that raises says so."""
    project.write(TEST)
    file = tmp_path / "calls.json"
    profiled.write_request(file, ["n=8 float32", "n=32 bfloat16", "n=5"])
    monkeypatch.setenv(profiled.VARIABLE, str(file))
    project.run("--fusion-isolate=off", "--fusion-bench").assert_outcomes(passed=2)

    calls = (project.pytester.path / "calls.txt").read_text().splitlines()
    assert calls == ["8 False"] * 3 + ["4 True", *["5 False"] * 3, "5 True"]
    assert profiled.steps(file) == [
        ("begun", "n=8 float32", ""),
        ("done", "n=8 float32", ""),
        ("raised", "n=32 bfloat16", "the call raises ValueError: not 32"),
        ("begun", "n=5", ""),
        ("done", "n=5", ""),
    ]
    assert all(not test["bench"] for test in project.tests.values())


@pytest.mark.parametrize("how", ["option", "ini"])
def test_without_a_gpu_counters_are_unknown(project: Project, how: str) -> None:
    """The reason is told once for the run and stands in the JSON for each case; the bench goes on."""
    project.write(GREEN)
    more: Any = ["--fusion-counters"] if how == "option" else ["-o", "fusion_counters=true"]
    result = project.run("--fusion-bench", "--fusion-targets=none", *more)
    result.assert_outcomes(passed=2)
    said = "no counters: ncu counts on a GPU; the interpreter has no counters"
    assert sum(said in line for line in result.outlines) == 1
    found = [one for test in project.tests.values() for one in test["bench"]["counters"]]
    assert [one["case"] for one in found] == ["rows=4 hidden=8 bfloat16", "rows=5 hidden=8 bfloat16", "one"]
    assert {one["status"] for one in found} == {"unknown"}
    assert all(test["bench"]["rows"] for test in project.tests.values())


def test_without_a_bench_there_is_nothing_to_count(project: Project) -> None:
    """The option alone is refused before the run; a setting of the project waits for a bench."""
    project.write(GREEN)
    result = project.run("--fusion-counters")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fusion-counters adds to what --fusion-bench measures*"])
    project.run("-o", "fusion_counters=true").assert_outcomes(passed=2)
    assert all(not test["bench"] for test in project.tests.values())


def test_a_run_without_the_option_has_no_counters(project: Project) -> None:
    """Neither a note nor an entry."""
    project.write(GREEN)
    result = project.run("--fusion-bench", "--fusion-targets=none", "-k", "test_it")
    result.stdout.no_fnmatch_line("*counters:*")
    assert project.tests["test_it"]["bench"]["counters"] == []
