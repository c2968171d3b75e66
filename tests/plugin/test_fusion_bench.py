"""The fixture ``fusion_bench``: what it returns, when it measures, and what becomes of the numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.plugin.conftest import Project
from tests.plugin.test_bench import KERNEL

TORCH = """
def test_relu(fusion_bench):
    x = torch.randn(64, 100)
    assert torch.equal(fusion_bench(relu, relu_reference, x), relu_reference(x))
"""
CASE = "64x100 float32"
DOUBLE = """
def test_double(fusion_bench):
    x = torch.randn(4, 100)
    assert torch.equal(fusion_bench(double, reference, x), reference(x))
"""


@pytest.fixture
def bench(project: Project, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(code: str, *options: str, fork: bool = False) -> pytest.RunResult:
        project.write(code)
        return project.run("--fusion-bench", *options, fork=fork)

    return run


def rows(project: Project, test: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = [t for t in project.report["tests"] if t["nodeid"].endswith(f"::{test}")]
    return {(row["case"], row["role"]): row for one in found for row in one["bench"].get("rows", ())}


def test_without_the_option_it_is_the_call_alone(project: Project) -> None:
    """``fused`` is called once, nothing is compared, and its result comes back."""
    project.write(
        """
calls = []

def counted(x, *, scale):
    calls.append("fused")
    return x * scale

def never(x, *, scale):
    raise AssertionError("called")

def test_it(fusion_bench):
    x = torch.ones(3)
    assert torch.equal(fusion_bench(counted, never, x, scale=2), 2 * x)
    assert calls == ["fused"]
"""
    )
    project.run().assert_outcomes(passed=1)
    assert project.report["tests"] == []


def test_operators_of_torch_are_counted_and_timed(project: Project, bench: Any) -> None:
    """The CPU computes both calls itself: launches, bytes, and a latency by the host's clock with its raw seconds."""
    bench(TORCH).assert_outcomes(passed=1)

    found = rows(project, "test_relu")
    fused, other = found[CASE, "fused"], found[CASE, "reference"]
    assert fused["facts"] == {
        "bytes.algorithmic": 2 * 64 * 100 * 4,
        "launches.kernels": 1,
        "launches.memcpy": 0,
        "launches.memset": 0,
    }
    assert other["facts"]["bytes.moved"] == 2 * 64 * 100 * 4
    latency = fused["latency"]
    assert (latency["method"]["timer"], latency["place"]["torch"][:1].isdigit()) == ("host", True)
    assert latency["low"] <= latency["ratio"] <= latency["high"]
    assert len(fused["samples"]["fused"]) == len(fused["samples"]["reference"]) == 5 * len(latency["blocks"])


def test_an_interpreted_kernel_has_no_latency(project: Project, bench: Any) -> None:
    """Its launches and bytes are facts; how long the interpreter takes is not told, and why is."""
    result = bench(KERNEL + DOUBLE)

    result.assert_outcomes(passed=1)
    fused = rows(project, "test_double")["4x100 float32", "fused"]
    assert fused["names"] == {"double_kernel": 1}
    assert "latency" not in fused
    assert "samples" not in fused
    result.stdout.fnmatch_lines(
        ["test_double: 4x100 float32: no latency: an interpreted kernel has no latency worth a number"]
    )


def test_a_wrong_result_prints_no_number(project: Project, bench: Any) -> None:
    """The judge of values stands before any figure; the failure is its own."""
    result = bench(TORCH.replace("fusion_bench(relu,", "fusion_bench(wrong,"))

    result.assert_outcomes(failed=1)
    (record,) = project.report["tests"]
    assert (record["failed_check"], record["bench"]) == ("structure", {})
    result.stdout.no_fnmatch_line("*launches and bytes*")


@pytest.mark.parametrize(("key", "failed"), [("x.data_ptr()", 1), ("(x.data_ptr(), x._version)", 0)])
def test_an_answer_from_a_cache_is_no_latency(project: Project, bench: Any, key: str, failed: int) -> None:
    """One call is timed over and over on the same arguments; a cache that knows them by address alone is a failure."""
    result = bench(
        f"""
kept = {{}}

def cached(x):
    return kept.setdefault({key}, relu(x))

def test_it(fusion_bench):
    fusion_bench(cached, relu_reference, torch.linspace(-3, 3, 100))
"""
    )

    result.assert_outcomes(failed=failed, passed=1 - failed)
    (record,) = project.report["tests"]
    assert record["failed_check"] == ("honesty" if failed else None)
    assert bool(record["bench"]) is not bool(failed)


def test_what_was_not_judged_is_not_measured(project: Project, bench: Any) -> None:
    """Where nobody knows whether the result is right it has no cost; the note has the reason."""
    result = bench(
        """
from pytest_fusion.plugin import active, measuring
from pytest_fusion.report.record import TestRecord

def unsure(*args):
    record = TestRecord("test_it.py::test_it", "unknown", message="nobody looked")
    active.current().records.append(record)
    return record

def test_it(fusion_bench, monkeypatch):
    monkeypatch.setattr(measuring, "check_equivalent", unsure)
    assert fusion_bench(relu, relu_reference, torch.ones(3)).sum() == 3
"""
    )

    result.assert_outcomes(passed=1)
    (record,) = project.report["tests"]
    assert record["bench"]["rows"] == []
    result.stdout.fnmatch_lines(["test_it: 3 float32: not measured: it is not known to be right (nobody looked)"])


def test_calls_that_take_too_long_have_no_latency(project: Project, bench: Any) -> None:
    """Fifty pairs are needed for an interval; calls that would take minutes for them are counted only."""
    result = bench(
        """
from pytest_fusion.bench import concrete_calls

def test_it(fusion_bench, monkeypatch):
    monkeypatch.setattr(concrete_calls, "_MOST_S", 0.0)
    fusion_bench(relu, relu_reference, torch.ones(3))
"""
    )

    result.assert_outcomes(passed=1)
    assert "latency" not in rows(project, "test_it")["3 float32", "fused"]
    result.stdout.fnmatch_lines(["test_it: 3 float32: no latency: both calls take *, and 50 pairs are needed*"])


def test_cases_of_one_test_have_names(project: Project, bench: Any) -> None:
    """Given ones, else shapes and dtypes, numbered where they are equal; one given twice is an error."""
    bench(
        """
def test_it(fusion_bench):
    for _ in range(2):
        fusion_bench(relu, relu_reference, torch.ones(3))
    fusion_bench(relu, relu_reference, torch.ones(3), case="mine")
    with pytest.raises(FusionError, match="'mine'"):
        fusion_bench(relu, relu_reference, torch.ones(3), case="mine")
"""
    ).assert_outcomes(passed=1)

    assert {case for case, role in rows(project, "test_it") if role == "fused"} == {
        "3 float32",
        "3 float32 #2",
        "mine",
    }


def test_rows_have_baselines(project: Project, bench: Any) -> None:
    """One launch more fails the test with both values, as for ``bench=``; seconds of a CPU fail nothing."""
    bench(TORCH, "--fusion-update", "new").assert_outcomes(passed=1)
    (path,) = (project.pytester.path / ".fusion" / "baselines").glob("*.json")
    stored = json.loads(path.read_text())
    assert "samples" not in stored["rows"][0]
    stored["rows"][0]["latency"].update(ratio=-3.0, low=-3.1, high=-2.9)
    path.write_text(json.dumps(stored))
    bench(TORCH).assert_outcomes(passed=1)
    (compared,) = [one for t in project.report["tests"] for one in t["bench"]["compared"] if one["role"] == "fused"]
    assert compared["verdict"] == "inconclusive"
    assert "from process to process" in compared["reason"]

    worse = bench(TORCH.replace("fusion_bench(relu,", "fusion_bench(lambda x: relu(x) + 0,"))

    worse.assert_outcomes(failed=1)
    worse.stdout.fnmatch_lines(["*launches.kernels 1 -> 2*"])


def test_it_measures_in_the_body_of_a_test(bench: Any) -> None:
    """In another fixture no test has begun that the numbers could belong to."""
    result = bench(
        """
@pytest.fixture
def measured(fusion_bench):
    return fusion_bench(relu, relu_reference, torch.ones(3))

def test_it(measured):
    pass
"""
    )

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*fusion_bench measures in the body of a test*"])


@pytest.mark.slow
def test_what_a_compiled_reference_moves_is_not_known(project: Project, bench: Any) -> None:
    """Inductor's kernels pass no operator of torch, so their bytes are no fact; the call itself is timed."""
    result = bench(
        """
compiled = torch.compile(relu_reference)

def test_it(fusion_bench):
    fusion_bench(relu, compiled, torch.ones(64, 7))
""",
        fork=True,
    )

    result.assert_outcomes(passed=1)
    found = rows(project, "test_it")
    assert "bytes.moved" not in found["64x7 float32", "reference"]["facts"]
    assert "latency" in found["64x7 float32", "fused"]
    result.stdout.fnmatch_lines(["*bytes of the reference not known: it launches kernels*"])
