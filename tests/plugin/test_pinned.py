"""Pinned replays: a failing case in a folder `fusion_replays` runs first in its test, for ever."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_fusion.plugin.pinned import FOLDER, Pin, find
from tests.plugin.conftest import Project
from tests.sweeps import sweep

# Right but where a case is larger than what a run of one case draws first.
TEST = """
@few
@fused_equivalent(relu_reference, inputs=X)
def test_function(x):
    return FUSED(x)
"""
RIGHT, WRONG = TEST.replace("FUSED", "relu"), TEST.replace("FUSED", "wrong")
LARGE_ONLY = TEST.replace("FUSED(x)", "relu(x) + (x.numel() == 7 * 333)")


def case(**sizes: int) -> dict[str, Any]:
    tensors = {"x": {"dtype": "float32", "layout": "step", "variant": 0, "offset": 1, "values": "unit"}}
    return {"dims": sizes, "dtype": "float32", "inputs": tensors, "absent": [], "drawn": {}, "seed": 3}


def pin(project: Project, where: str = FOLDER, **changes: Any) -> Path:
    """A pinned file as an older version may have written it, by hand."""
    folder = project.pytester.path / where
    folder.mkdir(parents=True, exist_ok=True)
    data = {"schema": 1, "tool": "pytest-fusion", "nodeid": "test_it.py::test_function", "spec": "test_function"}
    data |= {"check": "values", "cause": None, "case": case(rows=7, hidden=333)}
    path = folder / "large.json"
    path.write_text(json.dumps({**data, **changes}))
    return path


@sweep("where", [FOLDER, "below/deeper/fusion_replays", "tests/fusion_replays"])
def test_a_bug_that_comes_back_fails_by_its_pinned_case(where: str, project: Project) -> None:
    """Beside the test, below it or in tests/, the file is found and its case fails first, named, as it stands."""
    project.write(LARGE_ONLY)
    pin(project, where)

    result = project.run()

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*pinned replay {where}/large.json fails again*"])
    test = project.tests["test_function"]
    assert (test["cases"], test["case"]["dims"]) == (1, {"rows": 7, "hidden": 333})
    assert test["replay"] == f"{where}/large.json"


def test_another_bug_of_a_pinned_case_is_not_the_one_that_was_fixed(project: Project) -> None:
    """The file names the check that failed: a failure of another one is no bug that came back."""
    project.write(LARGE_ONLY)
    pin(project, check="bounds")

    project.run().assert_outcomes(failed=1)

    message = project.tests["test_function"]["message"]
    assert "fails another check than the one it was pinned for, bounds" in message


def test_a_pinned_case_that_passes_is_told_and_costs_no_budget(project: Project) -> None:
    """The user's number of cases stays that of the generated ones."""
    project.write(RIGHT)
    pin(project)

    project.run().assert_outcomes(passed=1)

    test = project.tests["test_function"]
    assert test["cases"] == 4
    assert "1 pinned replay(s) were run first and pass" in test["notes"]


@pytest.mark.slow
def test_a_pinned_failure_leaves_other_known_failures_alone(project: Project) -> None:
    """A case remembered from an earlier run is tried again once the pinned one passes."""
    # Where CI is detected, Hypothesis loads a profile that keeps no database.
    local = ("--hypothesis-profile", "default")
    project.write(WRONG)
    project.run(*local).assert_outcomes(failed=1)
    project.write(LARGE_ONLY)
    path = pin(project)
    project.run(*local).assert_outcomes(failed=1)
    path.unlink()
    project.write(WRONG)

    project.run("-v", *local).stdout.fnmatch_lines(["*failed in an earlier run*tried first*"])


def test_a_stale_pin_is_an_error_that_names_the_file(project: Project) -> None:
    """A file of another spec is not skipped: the test fails with the file, what is off, and what to do."""
    project.write(RIGHT)
    pin(project, case=case(rows=7, columns=333))

    result = project.run()

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*the pinned replay fusion_replays/large.json was written for another spec*'hidden'*delete the file*"]
    )


def test_a_damaged_pin_ends_the_run(project: Project) -> None:
    """A file there that is no replay file is an error of use."""
    project.write(RIGHT)
    pin(project).write_text("{")

    result = project.run()

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*fusion_replays/large.json is not JSON*"])


def test_a_pin_of_a_test_that_is_gone_is_told(project: Project) -> None:
    """Where a whole file was collected, a pinned case of a test that it lacks is told of."""
    project.write(RIGHT)
    pin(project, nodeid="test_it.py::test_renamed")

    told = "*pinned replay fusion_replays/large.json was not run: no test test_it.py::test_renamed is left*"
    project.run().stdout.fnmatch_lines([told])
    project.run("-k", "function").stdout.fnmatch_lines([told])
    project.run("test_it.py::test_function").stdout.no_fnmatch_line(told)


@pytest.mark.slow
def test_workers_tell_of_lost_pins_once(project: Project) -> None:
    """With -n 2 the sentence is printed by the process that prints, once."""
    project.write(RIGHT)
    pin(project, nodeid="test_it.py::test_renamed")

    lines = project.run("-n", "2", subprocess=True).outlines

    assert sum("was not run: no test" in line for line in lines) == 1


def test_a_case_too_large_for_this_lane_is_told(project: Project) -> None:
    """A pinned case that is refused here is neither passed over nor a failure."""
    project.write(
        RIGHT.replace("inputs=X)", "inputs=X, rejects=ValueError)")
        .replace("return relu(x)", "return relu(x) if x.numel() < 2000 else [][x.numel()]")
        .replace("[][x.numel()]", "refuse()")
        + "\ndef refuse():\n    raise ValueError('too large')\n"
    )
    pin(project)

    project.run("-v").assert_outcomes(passed=1)

    notes = project.tests["test_function"]["notes"]
    assert any("fusion_replays/large.json was not judged here: 1 x ValueError" in note for note in notes)


def test_a_crash_of_a_pinned_case_is_that_case(project: Project) -> None:
    """A pinned case that kills its process is not shrunk away from its file."""
    project.write("import os\n" + RIGHT.replace("return relu(x)", "return relu(x) if x.numel() < 2000 else os.abort()"))
    pin(project, check="crash")

    result = project.run()

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["test_function: crash failed", "*pinned replay fusion_replays/large.json fails again*"]
    )
    assert project.tests["test_function"]["case"]["dims"] == {"rows": 7, "hidden": 333}


@pytest.mark.parametrize("wrong", [LARGE_ONLY, RIGHT.replace("relu(x)", "relu(x) if x.numel() < 2000 else 1 / 0")])
def test_a_recorded_call_that_fails_is_no_old_bug(wrong: str, project: Project) -> None:
    """What nobody has seen fail is told as a call of somebody's, whatever check it fails."""
    project.write(wrong)
    pin(project, check="recorded", nodeid="test_function")

    result = project.run()

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a recorded call fails, pinned in fusion_replays/large.json*"])
    result.stdout.no_fnmatch_line("*fails again*")


@pytest.mark.slow
def test_pin_copies_a_failure_beside_its_test(project: Project) -> None:
    """`pytest-fusion pin FILE` is all that it takes to guard against a bug."""
    project.write(WRONG)
    project.run().assert_outcomes(failed=1)
    replay = project.pytester.path / project.tests["test_function"]["replay"]

    done = project.pytester.run(sys.executable, "-m", "pytest_fusion.plugin.cli", "pin", str(replay))

    assert done.ret == 0
    done.stdout.fnmatch_lines([f"pinned: fusion_replays/{replay.name}"])
    shutil.rmtree(project.pytester.path / ".hypothesis", ignore_errors=True)
    project.run().stdout.fnmatch_lines([f"*pinned replay fusion_replays/{replay.name} fails again*"])


def test_a_pin_goes_with_its_own_test(tmp_path: Path) -> None:
    """By node id; by its end for a file below the test's folder; by name and spec where the test's file moved."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "test_k.py").touch()
    here = tmp_path / "a" / FOLDER / "x.json"

    def belongs(named: str, nodeid: str, spec: str = "norm", folder: str = "a") -> bool:
        return Pin(here, named, "norm").belongs_to(nodeid, spec, tmp_path / folder, tmp_path)

    assert belongs("a/test_k.py::test_n[1]", "a/test_k.py::test_n[1]")
    assert not belongs("a/test_k.py::test_n[1]", "a/test_k.py::test_n[2]")
    assert belongs("test_k.py::test_n", "a/test_k.py::test_n")
    assert not belongs("test_k.py::test_n", "b/test_k.py::test_n", "other", folder="b")
    assert belongs("old/test_k.py::test_n", "a/test_m.py::test_n")
    assert not belongs("old/test_k.py::test_n", "a/test_m.py::test_n", "another spec")
    assert not belongs("a/test_k.py::test_n", "a/test_m.py::test_n")
    assert belongs("norm", "a/test_m.py::test_anything")


def test_folders_of_other_people_are_not_searched(tmp_path: Path) -> None:
    """Environments, hidden folders and packages installed in the tree are left out."""
    text = json.dumps(
        {"schema": 1, "tool": "pytest-fusion", "nodeid": "n", "spec": "s", "check": "", "cause": None, "case": {}}
    )
    for folder in ("", ".venv", "env", "node_modules/x", "kernels"):
        (tmp_path / folder / FOLDER).mkdir(parents=True)
        (tmp_path / folder / FOLDER / "case.json").write_text(text)
    (tmp_path / "env" / "pyvenv.cfg").touch()

    found = {str(pin.path.relative_to(tmp_path)) for pin in find([tmp_path], tmp_path)}

    assert found == {f"{FOLDER}/case.json", f"kernels/{FOLDER}/case.json"}
    assert {pin.path for pin in find([tmp_path / "kernels"], tmp_path)} == {
        tmp_path / FOLDER / "case.json",
        tmp_path / "kernels" / FOLDER / "case.json",
    }
