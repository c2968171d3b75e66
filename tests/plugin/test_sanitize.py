"""`--fusion-sanitize`: what a sanitizer says of a test's smallest cases becomes part of its record."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.verdict import failed
from pytest_fusion.engine import sanitize
from pytest_fusion.engine.request import Request
from pytest_fusion.engine.sanitize import Run, folded
from pytest_fusion.engine.tally import Failure, Tally
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.measure.tools.sanitizer import Report
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
from tests.plugin.conftest import Project

SPEC = FusionSpec(fused=lambda x: x + 1, reference=lambda x: x + 1, inputs={"x": tensor("rows hidden")})
CASE = Case({"rows": 3, "hidden": 4}, "float32", {"x": TensorCase("float32")})
PASSED = {check: {"verdict": "pass", "reason": "", "cases": 9} for check in ("bounds", "unwritten", "repeat")}
RECORD = TestRecord("test_it.py::test_it", "pass", cases=9, checks=PASSED)
READ = Report(
    "memcheck", "Invalid __global__ read of size 4 bytes", "add", "k.py", 7, details=("and is 1 bytes after",), case=0
)
WRITE = replace(
    READ,
    what="Invalid __global__ write of size 4 bytes",
    details=("and is 4 bytes before the nearest allocation at 0x7f of size 512 bytes",),
)
ODD = replace(READ, what="Invalid __global__ read of size 16 bytes", details=("Address 0x7f04 is misaligned",))
UNWRITTEN = Report("initcheck", "Uninitialized __global__ memory read of size 4 bytes", "add", "k.py", 9)
RACE = Report("racecheck", "Race reported between Write access", "add", "k.py", 11)
TORCHS = Report("initcheck", "Uninitialized __global__ memory read of size 4 bytes", "void at::native::copy")


@pytest.mark.parametrize(
    ("report", "cause"), [(READ, "out-of-bounds"), (WRITE, "out-of-bounds"), (ODD, "misaligned-access")]
)
def test_a_wrong_access_fails_the_test(report: Report, cause: str) -> None:
    """`bounds` fails with line, case and cause, though nothing else saw it."""
    record = folded(SPEC, RECORD, [CASE], [Run("memcheck", 1, (report,))])
    assert (record.verdict, record.failed_check, record.cause) == ("fail", "bounds", cause)
    assert "add at k.py:7" in record.message
    assert record.checks["bounds"]["line"] == 7
    assert record.case is not None
    assert record.case["dims"] == {"hidden": 4, "rows": 3}


def test_a_failing_test_gets_the_line() -> None:
    """What failed already keeps its message; the sanitizer's words are a note."""
    before = replace(RECORD, verdict="fail", failed_check="values", message="it failed")
    record = folded(SPEC, before, [CASE], [Run("memcheck", 1, (READ,))])
    assert (record.failed_check, record.message) == ("values", "it failed")
    assert any("k.py:7" in note for note in record.notes)


@pytest.mark.parametrize(("report", "check"), [(UNWRITTEN, "unwritten"), (RACE, "repeat")])
def test_a_doubt_is_unknown(report: Report, check: str) -> None:
    """A read of fresh memory or a race that changed no result accuses nobody, and is no pass either."""
    record = folded(SPEC, RECORD, [CASE], [Run(report.tool, 1, (report,))])
    assert record.verdict == "pass"
    assert record.checks[check]["verdict"] == "unknown"
    assert "k.py" in record.checks[check]["reason"]


@pytest.mark.parametrize(
    "run", [Run("initcheck", 3, (TORCHS,)), Run("memcheck", 3), Run("memcheck", problem="memcheck ran no case")]
)
def test_nothing_of_the_candidates_changes_no_verdict(run: Run) -> None:
    """torch's own kernels, a clean run and a tool that could not run leave verdicts alone; the note says which."""
    record = folded(SPEC, RECORD, [CASE], [run])
    assert (record.verdict, record.checks) == ("pass", PASSED)
    assert [note for note in record.notes if (run.problem or "ran 3 cases") in note]


def test_a_check_that_is_off_stays_off() -> None:
    """Whoever switched `bounds` off is told nothing by memcheck."""
    record = folded(SPEC, replace(RECORD, off={"bounds": "known"}), [CASE], [Run("memcheck", 1, (READ,))])
    assert record.verdict == "pass"


def test_the_cases_are_few_and_small() -> None:
    """Three, the failing one first, one of them padded; each a case of the spec."""
    request = Request("test_it.py::test_it", device="cpu")
    found = list(sanitize.smallest(SPEC, request, Tally()))
    assert len(found) == 3
    assert all(size < 50 for case in found for size in case.sizes.values() if isinstance(size, int))
    assert any(case.tensors["x"].layout.kind == "padded" for case in found)
    failing = Tally(failure=Failure(failed("values", "wrong"), CASE))
    assert next(sanitize.smallest(SPEC, request, failing)) == CASE


def test_without_the_tool_the_note_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said to have been sanitized."""
    monkeypatch.setattr(sanitize.sanitizer, "find", lambda: None)
    record = sanitize.sanitized(SPEC, Request("test_it", device="cuda"), Tally(), RECORD)
    assert any("cuda-sanitizer" in note and note.startswith("not sanitized") for note in record.notes)


FAKE = """#!/bin/sh
# Stands for compute-sanitizer: runs the program, and for memcheck reports one access after it.
tool="$2"
shift 6
"$@"
code=$?
echo "$tool $PYTORCH_NO_CUDA_MEMORY_CACHING" >> "{log}"
if [ "$tool" = memcheck ]; then
  echo "========= Invalid __global__ read of size 4 bytes"
  echo "=========     at add_kernel+0x1b0 in kernels.py:15"
  echo "=========     by thread (96,0,0) in block (3,0,0)"
fi
exit $code
"""

TEST = """
@few
@fused_equivalent(relu_reference, inputs=X)
def test_it(x):
    with open("calls.txt", "a") as stream:
        print(tuple(x.shape), x.untyped_storage().nbytes(), file=stream)
    return relu(x)
"""


@pytest.mark.slow
def test_the_tool_runs_the_test_in_a_process_of_its_own(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tool runs the same few cases without the caching allocator, and what it prints reaches the record."""
    tool, log = tmp_path / "compute-sanitizer", tmp_path / "log.txt"
    tool.write_text(FAKE.format(log=log))
    tool.chmod(0o755)
    project.write(TEST)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    request = Request("test_it.py::test_it", device="cpu", start=project.pytester.path, root=project.pytester.path)
    runs = [sanitize._under(str(tool), name, request, [CASE, CASE.with_(sizes={"rows": 2, "hidden": 5})])
            for name in ("memcheck", "initcheck")]  # fmt: skip
    assert [(run.problem, run.cases, len(run.reports)) for run in runs] == [("", 2, 1), ("", 2, 0)]
    assert runs[0].reports[0].line == 15
    assert log.read_text().splitlines() == ["memcheck 1", "initcheck 1"]
    calls = (project.pytester.path / "calls.txt").read_text().splitlines()
    assert calls == ["(3, 4) 48", "(2, 5) 40"] * 2


def test_a_tool_that_runs_nothing_is_a_problem(project: Project, tmp_path: Path) -> None:
    """A test that cannot be collected there, or a tool that cannot start, is told and is no clean run."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho cannot open the device\nexit 3\n")
    tool.chmod(0o755)
    request = Request("test_it.py::test_it", device="cpu", start=project.pytester.path)
    run = sanitize._under(str(tool), "memcheck", request, [CASE])
    assert (run.cases, run.problem) == (0, "memcheck ran no case (exit 3): cannot open the device")
    assert "could not be started" in sanitize._under(str(tmp_path / "none"), "memcheck", request, [CASE]).problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is not ignored")
@pytest.mark.parametrize("how", ["option", "ini"])
def test_without_a_gpu_the_option_says_so(project: Project, how: str) -> None:
    """On the CPU lane nothing is sanitized, and the test passes as before."""
    project.write(TEST)
    more: Any = ["--fusion-sanitize"] if how == "option" else ["-o", "fusion_sanitize=true"]
    result = project.run(*more)
    result.assert_outcomes(passed=1)
    (test,) = project.report["tests"]
    assert any("compute-sanitizer needs a GPU" in note for note in test["notes"])
