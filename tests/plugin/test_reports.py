"""What a run says: the header, the section at the end, the JSON file, and all of it after Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from pytest_fusion.checks import registry
from tests.plugin.conftest import Project
from tests.run.process.children import interruptible

RIGHT = """
@fused_equivalent(relu_reference, inputs={"x": tensor("rows")}, dtypes=[torch.float32])
@settings(max_examples=80)
def test_right(x):
    return relu(x)
"""
# The keys that the documentation promises, with the types of their values in a failing test.
PROMISED = {
    "nodeid": str,
    "verdict": str,
    "cases": int,
    "judged": int,
    "rejected": dict,
    "failed_check": str,
    "cause": str,
    "case": dict,
    "replay": str,
    "checks": dict,
    "seconds": float,
}


def test_the_json_file_is_as_promised(project: Project) -> None:
    """Schema 1, an environment, and for each test every promised key; every check has one of three verdicts."""
    project.write(
        RIGHT
        + """
@settings(max_examples=40)
@fused_equivalent(relu_reference, inputs={"x": tensor("rows")}, rejects=ValueError, without={"repeat": "atomics"})
def test_fails(x):
    if x.dtype == torch.float16:
        raise ValueError("no half")
    return relu(x) + (x.numel() == 0) if x.numel() else torch.ones(1)

@fused_equivalent(relu_reference, inputs=X, requires="cuda")
def test_unknown(x):
    raise AssertionError
"""
    )

    project.run()

    report = project.report
    assert report["schema"] == 1
    assert {"torch", "triton", "device", "python", "profile"} <= set(report["environment"])
    fails = project.tests["test_fails"]
    assert {key: type(fails[key]) for key in PROMISED} == PROMISED
    assert (fails["verdict"], fails["failed_check"], fails["cause"]) == ("fail", "structure", "zero-size")
    assert set(fails["checks"]) == set(registry.names())
    assert {check["verdict"] for check in fails["checks"].values()} <= {"pass", "fail", "unknown"}
    assert "atomics" in fails["checks"]["repeat"]["reason"]
    right = project.tests["test_right"]
    assert {right[key] for key in ("failed_check", "cause", "replay")} == {None}
    assert right["case"] is None
    assert (right["verdict"], right["cases"]) == ("pass", 80)
    assert project.tests["test_unknown"]["verdict"] == "unknown"


def test_the_header_is_one_line(project: Project) -> None:
    """Device, versions, profile and its budget, on one line."""
    project.write("def test_it():\n    pass\n")

    lines = [line for line in project.run().outlines if line.startswith("fusion:")]

    assert len(lines) == 1
    assert lines[0].startswith("fusion: cpu (Triton interpreter), torch 2.")
    assert lines[0].endswith(", profile dev, 6 s of CPU time for each test")


def test_nothing_to_say_is_not_said(project: Project) -> None:
    """Without fused tests there is no section, and at -q passing ones have none either."""
    project.write("def test_it():\n    pass\n")

    options = ("-p", "no:cacheprovider", "--fusion-device", "cpu")
    project.pytester.runpytest_inprocess(*options).stdout.no_fnmatch_line("*= fusion =*")
    project.write(RIGHT)
    project.pytester.runpytest_inprocess(*options, "-q").stdout.no_fnmatch_line("*= fusion =*")


def test_a_pass_says_what_it_rests_on(project: Project) -> None:
    """At -v a pass has cases, pairs, error and grade; a thin one says so without being asked."""
    project.write(
        RIGHT
        + """
@settings(max_examples=2)
@fused_equivalent(relu_reference, inputs=X)
def test_thin(x):
    return relu(x)
"""
    )

    verbose = project.run("-v")
    plain = project.run()

    verbose.stdout.fnmatch_lines(["pass test_it.py::test_right", "  80 cases, * of pairs covered, *grade A*"])
    verbose.stdout.fnmatch_lines(["  rests on little: *2 cases*"])
    plain.stdout.fnmatch_lines(["thin pass test_it.py::test_thin: *2 cases*"])
    plain.stdout.no_fnmatch_line("*thin pass test_it.py::test_right*")


def test_reports_follow_nobody_who_changes_folders(project: Project) -> None:
    """A test that leaves the process in another folder does not take the reports along."""
    project.write("""
import os

def test_leaves(tmp_path):
    os.chdir(tmp_path)
""")

    project.run("--fusion-report", "page.html")

    assert (project.pytester.path / "fusion.json").is_file()
    assert (project.pytester.path / "page.html").is_file()


def test_a_run_inside_a_test_keeps_its_records_apart(project: Project) -> None:
    """A test that runs pytest in the same process leaves the records of the outer run alone."""
    project.pytester.makeconftest("pytest_plugins = ['pytester']")
    project.write(
        RIGHT
        + """
def test_runs_another(pytester):
    pytester.makepyfile("def test_inner(): pass")
    pytester.runpytest_inprocess("--fusion-device", "cpu").assert_outcomes(passed=1)
"""
    )

    project.run(fork=True).assert_outcomes(passed=2)

    assert project.verdicts == {"test_right": "pass"}


def test_collecting_writes_no_report(project: Project) -> None:
    """--collect-only leaves the report of the last run as it is."""
    project.write(RIGHT)
    project.run()

    project.run("--collect-only")

    assert project.verdicts == {"test_right": "pass"}


def test_a_report_that_cannot_be_written_in_the_end(project: Project) -> None:
    """When the folder is gone after the run, the section says so and the exit status is not 0."""
    project.write("""
import shutil

def test_removes():
    shutil.rmtree("out")
""")

    result = project.run("--fusion-json", "out/fusion.json")

    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
    result.stdout.fnmatch_lines(["cannot write the report *fusion.json*"])
    result.stdout.no_fnmatch_line("*Traceback*")


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_done(project: Project) -> None:
    """SIGINT while a kernel runs ends the run at once, with whole reports of the tests before it."""
    project.write(
        RIGHT
        + """
from pathlib import Path

@fused_equivalent(relu_reference, inputs=X)
def test_slow(x):
    Path("reached").touch()
    while True:
        pass
"""
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--fusion-device=cpu"]
    options = ["--fusion-json=fusion.json", "--fusion-report=page.html"]
    path = project.pytester.path
    child = interruptible([*command, *options], cwd=path, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not (path / "reached").exists() and time.monotonic() < end:
        time.sleep(0.05)

    os.kill(child.pid, signal.SIGINT)
    out, _ = child.communicate(timeout=60)

    assert child.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in out
    assert project.verdicts == {"test_right": "pass"}
    assert (path / "page.html").read_text().rstrip().endswith("</html>")


def test_properties_for_junit_are_there_once(project: Project) -> None:
    """The teardown's report, which JUnit reads, has each property of the test's record once."""
    project.pytester.makeconftest("""
def pytest_runtest_logreport(report):
    if report.when == "teardown":
        print("properties", sorted(name for name, _ in report.user_properties))
""")
    project.write(RIGHT)

    result = project.run("-s")

    (line,) = [line for line in result.outlines if "properties [" in line]
    assert line.count("'fusion_verdict'") == 1
    assert "'fusion_cases'" in line


@pytest.mark.slow
def test_workers_change_nothing(project: Project) -> None:
    """With -n 2 the records and the exit status are those of one process."""
    project.write(
        RIGHT
        + """
@settings(max_examples=8)
@fused_equivalent(relu_reference, inputs=X)
def test_wrong(x):
    return wrong(x)

@pytest.mark.xfail
@few
@fused_equivalent(relu_reference, inputs=X)
def test_expected(x):
    return wrong(x)

@fused_equivalent(relu_reference, inputs=X, requires="cuda")
def test_cuda(x):
    raise AssertionError

def test_call(fusion):
    fusion(relu, relu_reference, torch.ones(2, 3))
"""
    )
    found = []
    for options in ((), ("-n", "2")):
        # In a process of its own: a forked one has this repository's example database, with what other tests failed at.
        result = project.run(*options, "-p", "no:randomly", subprocess=True)
        changing = ("seconds", "phases", "notes", "message", "worst")
        records = {n: {k: v for k, v in t.items() if k not in changing} for n, t in project.tests.items()}
        for record in records.values():
            record["checks"] = {name: check["verdict"] for name, check in record["checks"].items()}
            record["case"] = None if record["case"] is None else record["case"]["text"]
        found.append((result.ret, result.parseoutcomes(), dict(sorted(records.items()))))
        # Else the second run would begin with what failed in the first.
        subprocess.run(["rm", "-rf", ".hypothesis"], cwd=project.pytester.path, check=True)

    assert found[0] == found[1]
    assert found[0][0] == 1
    assert len(found[0][2]) == 5


@pytest.mark.parametrize("ini", [True, False])
def test_what_a_run_leaves_stays_in_its_project(ini: bool, project: Project, tmp_path_factory: Any) -> None:
    """Without an ini file pytest's root is what `--fusion-json FILE` and the tests share; `.fusion` is not there."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "found.json"
    elsewhere.touch()
    project.write("@few\n@fused_equivalent(relu_reference, inputs=X)\ndef test_it(x):\n    return wrong(x)\n")
    if ini:
        project.pytester.makeini("[pytest]")

    result = project.run("--fusion-json", str(elsewhere))

    result.assert_outcomes(failed=1)
    assert (project.pytester.path / ".fusion" / "failures").is_dir()
