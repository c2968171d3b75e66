"""Reports of real runs: every file is there and agrees, in one process, in two, and after Ctrl-C."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.forked import run_command, run_pytest
from tests.sweeps import sweep

CONFTEST = """
from hypothesis import settings
settings.register_profile("short", max_examples=12)
settings.load_profile("short")
"""
TESTS = """
import torch
from tests.sweeps import sweep
from pytest_fusion import fused_equivalent, tensor

@fused_equivalent(torch.relu, inputs={"input": tensor("rows hidden")})
def test_right(input):
    return torch.clamp_min(input, 0)

@fused_equivalent(torch.relu, inputs={"input": tensor("rows hidden")})
def test_wrong(input):
    return input.abs()

def test_other():
    pass
"""
INTERRUPTED = """
import torch
from pytest_fusion import fused_equivalent, tensor

@fused_equivalent(torch.relu, inputs={"input": tensor("rows hidden")})
def test_a_right(input):
    return torch.clamp_min(input, 0)

def test_b_interrupted():
    raise KeyboardInterrupt
"""


def _run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return run_pytest(
        pytester,
        *("-p", "no:cacheprovider", "--fusion-device", "cpu", "--fusion-first"),
        *("--fusion-json", "out/fusion.json", "--fusion-report", "out/fusion.html", "--junit-xml", "out/junit.xml"),
        *options,
    )


def _verdicts(path: Path) -> dict[str, str]:
    return {test["nodeid"]: test["verdict"] for test in json.loads((path / "out/fusion.json").read_text())["tests"]}


@sweep("options", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_all_reports_of_a_run_agree(
    options: tuple[str, ...], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON, HTML, JUnit, step summary and terminal tell the same verdicts, and leave out tests that are not fused."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TESTS)

    result = _run(pytester, *options)

    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["FAIL test_it.py::test_wrong: values*", "*fusion.html"])
    assert _verdicts(pytester.path) == {"test_it.py::test_right": "pass", "test_it.py::test_wrong": "fail"}
    html = (pytester.path / "out/fusion.html").read_text()
    assert ("test fail" in html, "test pass" in html, "test_other" in html) == (True, True, False)
    rows = (pytester.path / "summary.md").read_text().splitlines()
    assert [row.split(" | ")[:2] for row in rows if row.startswith(("| fail", "| pass"))] == [
        ["| fail", "`test_it.py::test_wrong`"],
        ["| pass", "`test_it.py::test_right`"],
    ]
    cases = ET.parse(pytester.path / "out/junit.xml").iter("testcase")
    properties = {
        case.attrib["name"]: {found.attrib["name"]: found.attrib["value"] for found in case.iter("property")}
        for case in cases
    }
    assert properties["test_wrong"]["fusion_verdict"] == "fail"
    assert properties["test_wrong"]["fusion_failed_check"] == "values"
    assert properties["test_right"]["fusion_verdict"] == "pass"
    assert properties["test_other"] == {}


def test_after_ctrl_c_the_files_hold_what_was_done(pytester: pytest.Pytester) -> None:
    """An interrupted run leaves whole files with the records of the tests that had ended."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=INTERRUPTED)

    result = _run(pytester)

    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert _verdicts(pytester.path) == {"test_it.py::test_a_right": "pass"}
    assert (pytester.path / "out/fusion.html").read_text().rstrip().endswith("</html>")


def test_an_unwritable_report_stops_the_run_before_it_starts(pytester: pytest.Pytester) -> None:
    """A report path that is a folder is an error of use, and no test runs."""
    pytester.makepyfile(test_it=TESTS)

    result = run_pytest(pytester, "--fusion-json", ".")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fusion-json .: that is a folder*"])


def test_the_command_line_renders_a_stored_run(pytester: pytest.Pytester) -> None:
    """`pytest-fusion report` makes the page from the JSON file of an earlier run."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TESTS)
    _run(pytester, "-k", "right")

    done = run_command(pytester, "report", "out/fusion.json", "again.html")

    assert done.ret == 0
    assert "test_right" in (pytester.path / "again.html").read_text()
