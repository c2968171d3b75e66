"""Plugins add checks, value profiles and reports: the example of ``docs/extending.md``, and names that are taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plugin.conftest import Project

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
BLOCKS = dict(re.findall(r"^```python\n# ([\w.]+)\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL))

TAKEN = {
    "pytest_fusion_checks gives values": (
        "def pytest_fusion_checks():\n    return [Check('values', lambda trial: passed('values'))]",
        "*another check has the name 'values'*",
    ),
    "pytest_fusion_checks gives one twice": (
        "def pytest_fusion_checks():\n    return [Check('mine', lambda trial: passed('mine'))] * 2",
        "*another check has the name 'mine'*",
    ),
    "pytest_fusion_checks gives no check": (
        "def pytest_fusion_checks():\n    return [passed]",
        "*it must give Check objects*",
    ),
    "pytest_fusion_value_profiles gives normal": (
        "def pytest_fusion_value_profiles():\n    return {'normal': passed}",
        "*another profile has the name 'normal'*",
    ),
    "pytest_fusion_value_profiles gives a number": (
        "def pytest_fusion_value_profiles():\n    return {'seven': 7}",
        "*'seven' is neither a profile*",
    ),
}


def test_the_example_finds_draws_and_reports(project: Project) -> None:
    """Its check fails one test and is accepted by the other, its profile is drawn from, its report has both tests."""
    path = project.pytester.path
    for name, code in BLOCKS.items():
        (path / name).write_text(code)

    result = project.run(fork=True)

    result.assert_outcomes(failed=1, passed=1)
    failing, accepted = project.tests["test_square"], project.tests["test_accepted"]
    assert (failing["failed_check"], failing["cause"]) == ("limit", "above-limit")
    assert failing["checks"]["limit"]["output"] == "out"
    assert failing["replay"] is not None
    assert "an output exceeds what the next layer takes" in failing["message"]
    assert accepted["checks"]["limit"]["reason"] == "switched off: the next layer clamps"
    assert (path / "fusion.txt").read_text().split("\n")[:2] == [
        "test_square.py::test_square fail limit",
        "test_square.py::test_accepted pass -",
    ]


@pytest.mark.parametrize("name", TAKEN)
def test_a_name_that_is_taken_is_an_error(name: str, project: Project) -> None:
    """The run ends before collection, and the message says whose name it is."""
    code, said = TAKEN[name]
    head = "from pytest_fusion.checks.check import Check\nfrom pytest_fusion.checks.verdict import passed\n\n"
    project.pytester.makeconftest(head + code)
    project.write("def test_it():\n    pass")

    result = project.run(fork=True)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([said])


def test_a_profile_that_nobody_gives_is_an_error(project: Project) -> None:
    """The message names the nearest one that exists."""
    project.pytester.makeconftest("def pytest_fusion_value_profiles():\n    return {'spiky': lambda *_: None}")
    project.write("tensor('rows', values='spikey')")

    result = project.run(fork=True)

    result.stdout.fnmatch_lines(["*did you mean 'spiky'?*"])


def test_a_report_that_raises_fails_the_run(project: Project) -> None:
    """Its error is printed, and the tests keep their verdicts."""
    project.pytester.makeconftest(
        "def broken(*_):\n    raise KeyError('x')\n\ndef pytest_fusion_reports():\n    return [broken]"
    )
    project.write("def test_it():\n    pass")

    result = project.run(fork=True)

    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
    result.stdout.fnmatch_lines(["*the report broken raised KeyError: 'x'*"])
