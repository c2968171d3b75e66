"""What CI systems get: JUnit scalars and GitHub's step summary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_fusion.errors import FusionError
from pytest_fusion.report import github, junit
from pytest_fusion.report.record import TestRecord

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
