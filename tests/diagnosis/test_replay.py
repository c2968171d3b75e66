"""Replay files: written at once, read by anyone, refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.diagnosis.repro.replay_file import Replay, elsewhere, lane_of, made_here, names, read, write
from pytest_fusion.errors import ReplayError

CASE = Case({"n": 3, "batch": (2,)}, "float16", {"x": TensorCase("float16", Layout("step", 1), "nan")}, seed=7)
REPLAY = Replay("tests/test_k.py::test_norm[a/b c]", "test_norm", "values", "tail-mask", CASE)


def test_a_replay_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Writing and reading gives the same replay; equal failures share a file, which git ignores."""
    path = write(REPLAY, tmp_path)
    assert read(path) == REPLAY
    assert write(REPLAY, tmp_path) == path
    other = write(Replay(REPLAY.nodeid, "test_norm", "values", None, CASE.with_(seed=8)), tmp_path)
    assert other != path
    folder = path.parent
    assert {entry.name for entry in folder.iterdir()} == {path.name, other.name, ".gitignore"}
    assert "*" in (folder / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is not JSON"),
        (json.dumps(REPLAY.as_json())[:-20], "was it cut off"),
        ("[1, 2]", "is not a replay file"),
        (json.dumps({"tool": "another"}), "is not a replay file"),
        (json.dumps({**REPLAY.as_json(), "schema": 99}), "has schema 99"),
        (json.dumps({key: value for key, value in REPLAY.as_json().items() if key != "check"}), "has no 'check'"),
        (json.dumps({**REPLAY.as_json(), "case": {"dims": 3}}), "not a case"),
        (json.dumps({**REPLAY.as_json(), "case": None}), "not a case"),
    ],
    ids=["empty", "cut", "list", "foreign", "schema", "edited", "case", "no case"],
)
def test_a_damaged_or_foreign_file_is_refused_with_its_reason(tmp_path: Path, text: str, part: str) -> None:
    """Each way for a file to be wrong raises ``ReplayError`` that names it."""
    path = tmp_path / "case.json"
    path.write_text(text)
    with pytest.raises(ReplayError, match=part):
        read(path)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    """What cannot be opened or is no text raises ``ReplayError`` as well."""
    with pytest.raises(ReplayError, match="cannot read the replay file"):
        read(tmp_path / "nowhere.json")
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReplayError, match="is not JSON"):
        read(path)


GPU = {"lane": "cuda", "device": "cuda:0", "device_name": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0"}
CPU = {
    "lane": "cpu-interpreter",
    "device": "cpu",
    "device_name": "some processor",
    "torch": "2.13.0",
    "triton": "3.7.1",
}


def test_a_file_tells_where_it_was_made_and_an_older_one_is_read_without(tmp_path: Path) -> None:
    """Device and versions travel with the case, and do not make another file of the same failure."""
    made = made_here({**GPU, "platform": "Linux", "driver": None})
    assert made == GPU
    path = write(replace(REPLAY, made=made), tmp_path)
    assert read(path).made == GPU
    assert (lane_of(path), names(path)) == ("cuda", (REPLAY.nodeid, REPLAY.spec))
    assert write(REPLAY, tmp_path) == path
    assert (read(path).made, lane_of(path)) == ({}, None)


@pytest.mark.parametrize(
    ("made", "here", "said"),
    [
        ({}, CPU, None),
        (CPU, {**CPU, "device_name": "another processor", "device": "cpu"}, None),
        (GPU, {**GPU, "device": "cuda:3"}, None),
        (
            GPU,
            CPU,
            (
                "a GPU (NVIDIA H200), torch 2.11.0, triton 3.6.0; here it runs on the CPU lane (interpreted Triton), "
                "torch 2.13.0, triton 3.7.1"
            ),
        ),
        (GPU, {**GPU, "device_name": "NVIDIA H100"}, "NVIDIA H200; here it runs on NVIDIA H100"),
        (CPU, {**CPU, "triton": None}, "triton 3.7.1; here it runs on no triton"),
    ],
    ids=["old file", "another processor", "another GPU index", "GPU to CPU", "another GPU", "no triton"],
)
def test_another_place_is_told_where_it_may_matter(
    made: dict[str, str], here: dict[str, str], said: str | None
) -> None:
    """A lane, a GPU's model and versions are compared; a processor's name and a GPU's index are not."""
    found = elsewhere(made, here)
    assert found == (None if said is None else f"the replay was made on {said}")
