"""``--fusion-json`` keeps its schema, is strict JSON, and reads back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_fusion.errors import FusionError
from pytest_fusion.report.json_file import document, read_json, write_json
from pytest_fusion.report.record import TestRecord

Make = Callable[..., TestRecord]
PROMISED = {
    "nodeid",
    "verdict",
    "cases",
    "judged",
    "rejected",
    "failed_check",
    "cause",
    "case",
    "replay",
    "checks",
    "seconds",
}


def test_the_promised_keys_are_there(passing: Make, failing: Make, environment: dict[str, Any]) -> None:
    """The document has the schema number, the environment and every promised key of each test."""
    found = document([passing(), failing()], environment)

    assert found["schema"] == 1
    assert found["environment"] == environment
    assert all(set(test) >= PROMISED for test in found["tests"])
    assert found["tests"][1]["checks"]["values"]["verdict"] == "fail"


def test_what_is_written_reads_back(tmp_path: Path, passing: Make, failing: Make, environment: dict[str, Any]) -> None:
    """Records and environment survive the file."""
    path = tmp_path / "fusion.json"
    write_json(path, [passing(), failing()], environment)

    assert read_json(path) == ([passing(), failing()], environment)


def test_non_finite_and_foreign_numbers_are_strict_json(tmp_path: Path, failing: Make) -> None:
    """NaN, infinity and numpy scalars in the evidence do not spoil the file for strict readers."""
    path = tmp_path / "fusion.json"
    worst = {"ratio": np.float64("inf"), "case": {"scale": float("nan")}}
    write_json(path, [failing(worst=worst)], {})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    test = json.loads(path.read_text(), parse_constant=refuse)["tests"][0]
    assert test["worst"] == {"ratio": "inf", "case": {"scale": "nan"}}


def test_keys_of_a_newer_version_are_dropped(tmp_path: Path, passing: Make) -> None:
    """A file of the same schema with keys added later is still read."""
    path = tmp_path / "fusion.json"
    data = document([passing()], {})
    data["tests"][0]["added_later"] = 1
    path.write_text(json.dumps(data))

    assert read_json(path)[0] == [passing()]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"schema": 1, "tests": [', "is not JSON"),
        ("[]", 'no "schema" key'),
        ('{"schema": 2, "environment": {}, "tests": []}', "schema 2, and this version reads 1"),
        ('{"schema": 1, "environment": {}, "tests": [{"verdict": "pass"}]}', "not its shape"),
        ('{"schema": 1, "environment": {}}', "not its shape"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    """A cut, foreign, newer or misshapen file is an error that names the file and what is wrong."""
    path = tmp_path / "fusion.json"
    path.write_text(text)

    with pytest.raises(FusionError, match=said) as caught:
        read_json(path)

    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A path that does not exist is a FusionError, not a traceback."""
    with pytest.raises(FusionError, match="cannot read"):
        read_json(tmp_path / "none.json")
