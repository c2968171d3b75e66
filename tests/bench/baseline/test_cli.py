"""`pytest-fusion baseline`: what there is."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from pytest_fusion.bench.baseline.store import FOLDER, listed
from pytest_fusion.bench.baseline.update import update
from pytest_fusion.plugin.cli import main
from tests.bench.baseline.made import file_of, row


def test_a_list_has_each_test_with_its_age(tmp_path: Path) -> None:
    """Test, device class, cases, age and file on a line; a file that cannot be read is a line too."""
    update(tmp_path, [row(), row(case="rows=9"), row(role="reference"), row(test="a.py::test_a", made="?")], "new")
    file_of(tmp_path, row(test="b.py::test_b")).write_text("{")
    lines = listed(tmp_path, datetime(2026, 12, 1, tzinfo=UTC))

    assert lines[0].split() == ["test", "device", "cases", "age", "file"]
    assert lines[1].startswith("a.py::test_a")
    assert "of unknown age" in lines[1]
    assert lines[2].startswith("tests/test_norm.py::test_rms[bf16]  NVIDIA H200 (sm_90)  2      8 d")
    assert lines[2].endswith(file_of(tmp_path, row()).name)
    assert "is not JSON" in lines[3]


def test_the_default_folder_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an argument it is .fusion/baselines of the current folder."""
    monkeypatch.chdir(tmp_path)
    update(tmp_path / FOLDER, [row()], "new")

    assert main(["baseline", "list"]) == 0
    assert "tests/test_norm.py::test_rms[bf16]" in capsys.readouterr().out


def test_what_is_not_there_is_an_error_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No folder is an error with what helps, and leaves pytest's status for an error of use."""
    monkeypatch.chdir(tmp_path)

    assert main(["baseline", "list", "nowhere"]) == 4
    assert "nowhere" in capsys.readouterr().err
