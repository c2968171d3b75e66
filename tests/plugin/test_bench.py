"""``--fusion-bench`` on the CPU lane: what is measured, when, and what becomes of a change."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.plugin.conftest import Project

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

def double(x):
    out = torch.empty_like(x)
    if x.numel():
        double_kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
    return out

def reference(x):
    return x + x
"""
TEST = """
@settings(max_examples=2)
@fused_equivalent(
    reference, inputs={"x": tensor("rows cols", layouts=["contiguous"])}, bench=[{"rows": 512, "cols": 1000}]
)
def test_double(x):
    return FUSED
"""
ONE, TWO = TEST.replace("FUSED", "double(x)"), TEST.replace("FUSED", "double(x) + 0")


@pytest.fixture
def bench(project: Project, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "120")

    def run(test: str, *options: str, targets: str = "none", fork: bool = False) -> pytest.RunResult:
        project.write(KERNEL + test)
        return project.run("--fusion-bench", "--fusion-targets", targets, *options, fork=fork)

    return run


def rows(project: Project) -> dict[tuple[str, str], dict[str, Any]]:
    found = project.tests["test_double"]["bench"]["rows"]
    return {(row["case"], row["role"]): row for row in found}


CASE = "rows=512 cols=1000 bfloat16"


def test_a_passing_test_is_measured_at_its_sizes(project: Project, bench: Any) -> None:
    """Launches and bytes of the kernel and of the reference, exactly, in the JSON and in a table."""
    result = bench(ONE)

    result.assert_outcomes(passed=1)
    found = rows(project)
    moved = 2 * 512 * 1000 * 2
    assert found[CASE, "fused"]["facts"] == {
        "bytes.algorithmic": moved,
        "launches.kernels": 1,
        "launches.memcpy": 0,
        "launches.memset": 0,
    }
    assert found[CASE, "fused"]["names"] == {"double_kernel": 1}
    assert found[CASE, "reference"]["facts"]["bytes.moved"] == moved
    assert found[CASE, "reference"]["facts"]["launches.kernels"] == 1
    assert found[CASE, "fused"]["methods"] == {"launches": "modelled"}
    result.stdout.fnmatch_lines(["launches and bytes (modelled:*", f"test_double {CASE}*1*1*2.05 MB*2.05 MB*1.0x*"])


def test_a_failing_test_prints_no_number(project: Project, bench: Any) -> None:
    """What is wrong has no cost."""
    result = bench(TEST.replace("FUSED", "double(x).double()"))

    result.assert_outcomes(failed=1)
    assert project.tests["test_double"]["bench"] == {}
    result.stdout.no_fnmatch_line("*launches and bytes*")


def test_without_the_option_nothing_is_measured(project: Project) -> None:
    """An ordinary run costs what it did."""
    project.write(KERNEL + ONE)
    project.run().assert_outcomes(passed=1)
    assert project.tests["test_double"]["bench"] == {}


def test_an_update_without_measurements_says_that_it_wrote_nothing(project: Project) -> None:
    """Whoever forgot ``--fusion-bench`` waits for a baseline that nobody writes."""
    project.write("@few\n@fused_equivalent(relu_reference, inputs=X)\ndef test_it(x):\n    return relu(x)\n")

    result = project.run("--fusion-update", "new")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["--fusion-update new wrote nothing: only --fusion-bench measures"])
    project.run().stdout.no_fnmatch_line("*wrote nothing*")


def test_one_launch_more_than_the_baseline_fails(project: Project, bench: Any) -> None:
    """The fact is named with both values; accepting it is a command, and then it is the baseline."""
    written = bench(ONE, "--fusion-update", "new")
    written.assert_outcomes(passed=1)
    written.stdout.fnmatch_lines(["baseline written: .fusion/baselines/*test_double*.json"])
    bench(ONE).assert_outcomes(passed=1)

    worse = bench(TWO)

    worse.assert_outcomes(failed=1)
    worse.stdout.fnmatch_lines(["*launches.kernels 1 -> 2*"])
    found = project.tests["test_double"]
    assert found["failed_check"] == "bench"
    assert "launches.kernels 1 -> 2" in found["checks"]["bench"]["reason"]
    accepted = bench(TWO, "--fusion-update", "regressed")
    accepted.assert_outcomes(passed=1)
    accepted.stdout.fnmatch_lines([f"test_double {CASE}: accepted: *launches.kernels 1 -> 2*"])
    bench(TWO).assert_outcomes(passed=1)
    better = bench(ONE)
    better.assert_outcomes(passed=1)
    better.stdout.fnmatch_lines([f"test_double {CASE}: improved: *launches.kernels 2 -> 1*"])
    compared = project.tests["test_double"]["bench"]["compared"]
    assert {one["verdict"] for one in compared if one["role"] == "fused"} == {"improved"}


@pytest.mark.slow
def test_a_missing_baseline_fails_where_nobody_can_make_it(
    project: Project, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In CI, with the command; elsewhere it is new."""
    bench(ONE).assert_outcomes(passed=1)
    monkeypatch.setenv("CI", "true")

    result = bench(ONE)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no baseline*--fusion-bench --fusion-update new, and commit*"])
    result.stdout.no_fnmatch_line("*--fusion-update regressed*")
    kept = project.pytester.path / "own folder"
    elsewhere = bench(ONE, "--fusion-baseline", str(kept))
    elsewhere.stdout.fnmatch_lines([f"*--fusion-update new --fusion-baseline '{kept}', and commit*"])
    bench(ONE, "--fusion-update", "new").assert_outcomes(passed=1)
    bench(ONE).assert_outcomes(passed=1)


def test_a_damaged_baseline_is_an_error_that_names_the_file(project: Project, bench: Any) -> None:
    """Nothing is compared with it and nothing written over it."""
    bench(ONE, "--fusion-update", "new")
    (path,) = (project.pytester.path / ".fusion" / "baselines").glob("*.json")
    path.write_text("{")

    result = bench(ONE, "--fusion-update", "all")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{path.name}*"])
    assert path.read_text() == "{"


@pytest.mark.slow
def test_kernels_are_compiled_for_the_targets(project: Project, bench: Any) -> None:
    """Registers, shared memory and occupancy without a GPU, in the table and as exact facts of the baseline."""
    result = bench(ONE, "--fusion-update", "new", targets="sm_90")

    result.assert_outcomes(passed=1)
    (one,) = project.tests["test_double"]["bench"]["resources"]
    assert (one["kernel"], one["target"], one["status"]) == ("double_kernel", "sm_90", "compiled")
    assert (one["case"], one["registers"] > 0) == (CASE, True)
    result.stdout.fnmatch_lines([f"test_double {CASE}", "  double_kernel*sm_90*"])
    (path,) = (project.pytester.path / ".fusion" / "baselines").glob("*.json")
    facts = {name: value for row in json.loads(path.read_text())["rows"] for name, value in row["facts"].items()}
    assert facts["sm_90/double_kernel/registers"] == one["registers"]


SIZES = ", ".join(f'{{"rows": 8, "cols": {cols}}}' for cols in (100, 1000))
TILES = """
@triton.jit
def tiled_kernel(x, out, n: KIND, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

def double(x):
    out = torch.empty_like(x)
    if x.numel():
        block = 128 if x.shape[1] < 128 else 1024
        tiled_kernel[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
    return out
""" + ONE.replace('{"rows": 512, "cols": 1000}', SIZES)


@pytest.mark.slow
def test_another_reason_to_compile_again_is_told(project: Project, bench: Any) -> None:
    """A size that became a constant compiles for each value, as often as the tile did for two cases."""
    bench(TILES.replace("n: KIND", "n"), "--fusion-update", "new", targets="sm_90").assert_outcomes(passed=1)

    result = bench(TILES.replace("KIND", "tl.constexpr"), targets="sm_90")

    result.assert_outcomes(passed=1)
    now = "tiled_kernel: constexpr n 800 or 8000; constexpr BLOCK 128 or 1024"
    said = f"compiled again for other reasons: tiled_kernel: constexpr BLOCK * -> {now}"
    result.stdout.fnmatch_lines([f"test_double all entries: changed: {said}"])


@pytest.mark.slow
def test_workers_measure_and_the_controller_writes(project: Project, bench: Any) -> None:
    """Under pytest-xdist too each path is written once, by the one process that sees the whole run."""
    project.write(KERNEL + ONE)
    options = ("--fusion-bench", "--fusion-targets", "none", "--fusion-update", "new", "-n", "1")
    result = project.run(*options, subprocess=True)

    result.assert_outcomes(passed=1)
    assert len(list((project.pytester.path / ".fusion" / "baselines").glob("*.json"))) == 1
    result.stdout.fnmatch_lines(["baseline written: *"])


def test_a_target_that_is_none_is_refused_before_the_run(bench: Any) -> None:
    """Nothing is judged for an hour first; the message has the right name."""
    result = bench(ONE, targets="sm_91")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fusion-targets 'sm_91' is no target; did you mean*"])


@pytest.mark.slow
def test_entries_that_cannot_be_called_are_told(project: Project, bench: Any) -> None:
    """A launcher that raises at the sizes of every entry leaves no row, with targets too; the note says why."""
    call = "double(x) if x.numel() < 200_000 else x.view(7)"
    two = '[{"rows": 512, "cols": 1000}, {"rows": 512, "cols": 2000}]'
    result = bench(TEST.replace("FUSED", call).replace('[{"rows": 512, "cols": 1000}]', two), targets="sm_90")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"test_*: {CASE}: not measured: the call raises RuntimeError: *"])
    assert not any(row["role"] == "reference" for row in project.tests["test_double"]["bench"]["rows"])


def test_a_reference_that_needs_values_is_told(project: Project, bench: Any) -> None:
    """What it moves is not known then; the kernel's own facts are."""
    asks = ONE.replace("reference,", "lambda x: x + x * bool((x == x).all() or True),", 1)
    result = bench(asks)

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"test_*: {CASE}: launches and bytes of the reference not known: it needs values (*"])
    assert set(rows(project)) == {(CASE, "fused")}


def test_without_a_child_it_is_measured_here(project: Project, bench: Any) -> None:
    """With ``--fusion-isolate off`` too. It imports ``torch._dynamo``, which a process bears once only."""
    bench(ONE, "--fusion-isolate", "off", fork=True).assert_outcomes(passed=1)
    assert rows(project)[CASE, "fused"]["facts"]["launches.kernels"] == 1


GOLDEN = """
@settings(max_examples=2)
@fused_equivalent(reference, inputs={"x": tensor("rows cols", layouts=["contiguous"])}, golden=True)
def test_double(x):
    return FUSED
"""


def test_golden_outputs_are_kept_and_compared(project: Project, bench: Any) -> None:
    """Equal bits are the same; an answer that changed with its reference fails."""
    bench(GOLDEN.replace("FUSED", "double(x)"), "--fusion-update", "new").assert_outcomes(passed=1)
    kept = project.tests["test_double"]["bench"]["rows"]
    assert {(row["role"], bool(row["golden"])) for row in kept} == {("fused", True)}
    assert len(kept) == 2

    again = bench(GOLDEN.replace("FUSED", "double(x)"))
    again.assert_outcomes(passed=1)
    assert {one["verdict"] for one in project.tests["test_double"]["bench"]["compared"]} == {"same"}

    other = GOLDEN.replace("FUSED", "double(x) * 2").replace("reference,", "lambda x: x * 4,")
    bench(other).assert_outcomes(failed=1)
    assert "golden output out: sample" in project.tests["test_double"]["message"]


def test_limits_without_a_gpu_are_unknown_and_pass_nothing(project: Project, bench: Any) -> None:
    """The test stays green, and its report says what was not judged; a limit of nothing is an error."""
    limits = ONE.replace("}]\n)", '}],\n    bench_limits={"latency_ratio": 0.9, "peak_memory": "1 MiB"},\n)')
    assert limits != ONE
    result = bench(limits)

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"test_*: bench_limits not judged in {CASE}: latency_ratio: no latency was measured*"])
    found = project.tests["test_double"]["bench"]["limits"]
    assert {one["limit"]: one["verdict"] for one in found} == {"latency_ratio": "unknown", "peak_memory": "unknown"}


def test_a_limit_that_is_passed_fails_whatever_is_updated(
    project: Project, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new baseline accepts what regressed, not what nobody allows."""
    from pytest_fusion.bench import bench_run as running
    from pytest_fusion.bench.limits import Limited

    def over(rows: Any, limits: Any, **_: Any) -> Any:
        return [Limited(rows[0].key, "peak_memory", "over", "peak_memory: 2 B above the inputs")]

    monkeypatch.setattr(running, "limited", over)
    result = bench(ONE, "--fusion-update", "all")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{CASE}, fused: over: peak_memory: 2 B above*", "*change bench_limits=, or fix*"])


def test_ci_gets_the_figures(project: Project, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """JUnit has a property for each fact, once; the step summary and the page have the tables."""
    folder = project.pytester.path
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary.md"))
    bench(ONE, "--junit-xml", "junit.xml", "--fusion-report", "page.html").assert_outcomes(passed=1)

    found = ET.parse(folder / "junit.xml").iter("property")
    values = [one.get("value") for one in found if one.get("name") == f"fusion.bench.{CASE}.fused.launches.kernels"]
    assert values == ["1"]
    assert "### launches and bytes (modelled" in (folder / "summary.md").read_text()
    page = (folder / "page.html").read_text()
    assert "launches and bytes (modelled" in page
    assert "Latency against size" not in page


@pytest.mark.slow
def test_chance_has_as_many_tries_as_the_run_has_cases(
    project: Project, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holm's correction counts the entries of all tests of the run."""
    from pytest_fusion.bench import measured as running

    seen: list[int | None] = []
    judged = running.judged

    def noting(found: Any, *, family: int | None = None) -> Any:
        seen.append(family)
        return judged(found, family=family)

    monkeypatch.setattr(running, "judged", noting)
    two = ONE.replace('"cols": 1000}]', '"cols": 1000}, {"rows": 2, "cols": 3}]').replace("test_double", "test_two")
    bench(ONE + two + "\ndef test_any(fusion_bench):\n    pass\n").assert_outcomes(passed=3)
    assert seen == [4, 4]
