"""Replay files: the printed command shows the same failure in a new process, from any folder; a bad file says so."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.plugin.conftest import HEAD, Project

BUGGY = """
class TestMethods:
    @pytest.mark.parametrize("word", ["a b", "c"])
    @fused_equivalent(relu_reference, inputs={**X, "times": st.sampled_from([1, 3])})
    def test_each(self, x, times, word, tmp_path):
        return relu(x) * (1 + (x.shape[-1] > 2))

@fused_equivalent(relu_reference, inputs=X)
def test_function(x):
    return wrong(x)

def test_other():
    raise AssertionError("not asked for")
"""
# The reference has to take what is drawn.
BUGGY = BUGGY.replace("relu_reference, inputs={**X", "lambda x, times: torch.relu(x), inputs={**X")


def _replays(path: Path) -> dict[str, Path]:
    files = (path / ".fusion" / "failures").glob("*.json")
    return {json.loads(file.read_text())["nodeid"].partition("::")[2]: file for file in files}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves behind in which three tests failed, and what it printed, in `printed`."""
    folder = tmp_path_factory.mktemp("left")
    (folder / "test_it.py").write_text(HEAD + BUGGY)
    (folder / "pytest.ini").write_text("[pytest]\n")
    options = ["-p", "no:cacheprovider", "--fusion-device", "cpu", "--fusion-first", "--fusion-json", "fusion.json"]
    options += ["-k", "not other"]

    def work() -> int:
        os.chdir(folder)
        os.environ.pop("PYTEST_ADDOPTS", None)
        return pytest.main(options)

    result = forked.run(work, ["pytest", *options])
    result.assert_outcomes(failed=3, deselected=1)
    (folder / "printed").write_text(result.stdout.str())
    return folder


@pytest.fixture
def failed(project: Project, left: Path) -> Project:
    """A project after a run in which three tests failed."""
    shutil.copytree(left, project.pytester.path, dirs_exist_ok=True)
    return project


def _commands(printed: str) -> list[list[str]]:
    """The commands that failures print, once each."""
    return [shlex.split(line) for line in dict.fromkeys(re.findall(r"replay: pytest (.*)", printed))]


@pytest.mark.slow
def test_every_printed_command_shows_its_failure(failed: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a function, a method and a parametrized test, from the root and from a folder below it."""
    first = {name: (test["failed_check"], test["case"]) for name, test in failed.tests.items()}
    (failed.pytester.path / "below").mkdir()
    for folder in (".", "below"):
        monkeypatch.chdir(failed.pytester.path / folder)
        printed = (failed.pytester.path / "printed").read_text()
        if folder == "below":  # found again from here, so that the commands are those that are printed here
            printed = failed.run(str(failed.pytester.path / "test_it.py"), "-k", "not other").stdout.str()
        commands = _commands(printed)
        assert len(commands) == 3
        for command in commands:
            result = failed.run(*command)
            result.assert_outcomes(failed=1)
            report = json.loads(Path("fusion.json").read_text())
            (test,) = report["tests"]
            name = test["nodeid"].partition("::")[2]
            assert (test["failed_check"], test["case"]) == first[name]
            assert (test["cases"], test["replay"]) == (1, command[-1])


@pytest.mark.slow
def test_a_replay_in_a_new_process(failed: Project) -> None:
    """A file without the node id is enough: it picks its test out of all, in a process that knows nothing else."""
    replay = _replays(failed.pytester.path)["TestMethods::test_each[a b]"]

    result = failed.run("--fusion-replay", str(replay), subprocess=True)

    result.assert_outcomes(failed=1, deselected=3)
    assert list(failed.tests) == ["TestMethods::test_each[a b]"]


@pytest.mark.slow
def test_the_command_line_replays_from_anywhere(
    failed: Project, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`pytest-fusion replay FILE` finds the test from the project, from below it, and by where the file lies."""
    replay = _replays(failed.pytester.path)["TestMethods::test_each[a b]"]
    (failed.pytester.path / "below").mkdir()

    for folder in (failed.pytester.path / "below", tmp_path_factory.mktemp("elsewhere")):
        monkeypatch.chdir(folder)
        words = ("replay", str(replay), "--", "-p", "no:cacheprovider", "--fusion-device", "cpu")
        # Once as a program of its own, which imports itself before pytest can rewrite it.
        if folder.name == "below":
            result = failed.pytester.run(sys.executable, "-m", "pytest_fusion.plugin.cli", *words)
        else:
            result = forked.run_command(failed.pytester, *words)
        result.assert_outcomes(failed=1)
        assert result.ret == 1
        result.stdout.fnmatch_lines(["*test_each: values failed", "*smallest case: hidden=3 rows=1*"])


def test_a_mended_kernel_passes_its_replay(failed: Project) -> None:
    """Once the bug is gone the replay passes."""
    replay = _replays(failed.pytester.path)["test_function"]
    failed.write(BUGGY.replace("wrong(x)", "relu(x)"))

    failed.run("--fusion-replay", str(replay)).assert_outcomes(passed=1, deselected=3)


def _cut(data: dict[str, Any]) -> str:
    return json.dumps(data)[:40]


def _foreign(data: dict[str, Any]) -> str:
    return json.dumps({"tests": []})


def _later(data: dict[str, Any]) -> str:
    return json.dumps({**data, "schema": 99})


def _headless(data: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in data.items() if key != "nodeid"})


def _edited(data: dict[str, Any]) -> str:
    return json.dumps({**data, "case": {"dims": 3}})


def _moved(data: dict[str, Any]) -> str:
    return json.dumps({**data, "nodeid": "test_it.py::test_gone"})


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (_cut, "*is not JSON (*was it cut off?"),
        (_foreign, "*is not a replay file of pytest-fusion; those are in .fusion/failures/"),
        (_later, "*has schema 99, this version reads 1"),
        (_headless, "*has no 'nodeid'; was it edited?"),
        (_edited, "*this is not a case (*was the file edited?"),
        (_moved, "*belongs to test_it.py::test_gone, which was not collected*"),
    ],
)
def test_a_file_that_cannot_be_replayed(damage: Callable[[dict[str, Any]], str], line: str, project: Project) -> None:
    """A file that is cut, foreign, of a later version, edited or of a test that is gone is an error of use."""
    project.write(BUGGY)
    case = {"dims": {"rows": 1, "hidden": 1}, "dtype": "float32", "inputs": {}, "absent": [], "drawn": {}, "seed": 0}
    data = {"schema": 1, "tool": "pytest-fusion", "nodeid": "test_it.py::test_function", "spec": "test_function"}
    (project.pytester.path / "bad.json").write_text(damage({**data, "check": "values", "cause": None, "case": case}))

    result = project.run("--fusion-replay", "bad.json")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("*test_it.py [.F]*")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ('{"x": tensor("rows columns")}', "*it has no size for 'columns'*"),
        ('{"x": tensor("rows hidden"), "y": tensor("rows")}', "*it has no tensor for 'y'*"),
        (
            '{"x": tensor("rows hidden", dtype=torch.float64)}',
            "*'x' has the dtype float32; that of 'x' is one of float64*",
        ),
        ('X, dims={"hidden": dim(4)}', "*hidden=? is outside of its bounds, Dim(min=4*"),
        ('X, dims={"hidden": dim(0, 8)}', None),
    ],
)
def test_a_file_of_another_spec_is_refused(change: str, line: str | None, failed: Project) -> None:
    """A case that today's spec does not allow is not run; one that it still allows is."""
    replay = _replays(failed.pytester.path)["test_function"]
    changed = BUGGY.replace("relu_reference, inputs=X", f"lambda x, y=None: torch.relu(x), inputs={change}")
    failed.write(changed.replace("def test_function(x):", "def test_function(x, y=None):"))

    result = failed.run("--fusion-replay", str(replay))

    result.assert_outcomes(failed=1, deselected=3)
    written = "*the replay file was written for another spec than today's: "
    result.stdout.fnmatch_lines([written + line[1:] if line else "test_function: structure failed"])


def test_the_command_line_says_what_is_wrong(project: Project) -> None:
    """`pytest-fusion replay` of a missing file, or of a project that is not here, is one sentence and exit 2."""
    project.pytester.makefile(".json", bad=json.dumps({"schema": 1, "tool": "pytest-fusion", "nodeid": "gone.py::t"}))
    data = {"schema": 1, "tool": "pytest-fusion", "nodeid": "gone.py::t", "spec": "t", "check": "values"}
    project.pytester.makefile(".json", lost=json.dumps({**data, "cause": None, "case": {}}))

    for name, line in (("absent", "*cannot read*"), ("bad", "*has no 'spec'*"), ("lost", "*with the file gone.py*")):
        result = forked.run_command(project.pytester, "replay", f"{name}.json")
        assert result.ret == 2
        result.stderr.fnmatch_lines([f"pytest-fusion: {line[1:]}" if line[1:].startswith("cannot") else line])


def _replay_of(project: Project, file: Path) -> pytest.RunResult:
    return forked.run_command(project.pytester, "replay", file, "--", "-p", "no:cacheprovider")


@pytest.mark.slow
def test_the_exit_status_says_what_became_of_the_failure(failed: Project) -> None:
    """0 when the case passes now, 1 while it fails, 2 when it cannot be judged: a spec that changed, a skipped test."""
    replay = _replays(failed.pytester.path)["test_function"]

    assert _replay_of(failed, replay).ret == 1
    failed.write(BUGGY.replace("wrong(x)", "relu(x)"))
    assert _replay_of(failed, replay).ret == 0
    failed.write(BUGGY.replace("inputs=X)\ndef test_f", 'inputs={"y": tensor("rows")})\ndef test_f'))
    assert _replay_of(failed, replay).ret == 2
    failed.write(BUGGY.replace("inputs=X)\ndef test_f", 'inputs=X, requires="no_such_package")\ndef test_f'))
    assert _replay_of(failed, replay).ret == 2


def _as_made_on_a_gpu(replay: Path) -> None:
    data = json.loads(replay.read_text())
    data["made"] = {"lane": "cuda", "device": "cuda:0", "device_name": "NVIDIA H200", "torch": "2.11.0"}
    replay.write_text(json.dumps(data))


@pytest.mark.slow
def test_a_replay_of_a_gpu_says_so_here(failed: Project) -> None:
    """The note on the other device and versions stands with the failure, and with the pass once it is mended."""
    replay = _replays(failed.pytester.path)["test_function"]
    _as_made_on_a_gpu(replay)
    note = "*the replay was made on a GPU (NVIDIA H200), torch 2.11.0*; here it runs on the CPU lane*"

    result = failed.run("--fusion-replay", str(replay))
    result.assert_outcomes(failed=1, deselected=3)
    result.stdout.fnmatch_lines([note])
    failed.write(BUGGY.replace("wrong(x)", "relu(x)"))
    _as_made_on_a_gpu(replay)
    result = failed.run("--fusion-replay", str(replay))
    result.assert_outcomes(passed=1, deselected=3)
    result.stdout.fnmatch_lines([f"pass test_it.py::test_function: {note}"])


def test_a_case_that_cannot_be_judged_here_is_no_verdict(failed: Project) -> None:
    """A kernel that refuses the case here is neither a pass nor a failure, and the reason is told."""
    replay = _replays(failed.pytester.path)["test_function"]
    refusing = BUGGY.replace("inputs=X)", "inputs=X, rejects=ValueError)").replace(
        "    return wrong(x)", "    raise ValueError('only on sm_90')"
    )
    failed.write(refusing)

    result = failed.run("--fusion-replay", str(replay))

    result.assert_outcomes(skipped=1, deselected=3)
    result.stdout.fnmatch_lines(["*cannot be judged here: 1 x ValueError, as in 'only on sm_90'*"])
    assert failed.verdicts == {"test_function": "unknown"}
    assert _replay_of(failed, replay).ret == 2


def test_a_folder_that_cannot_be_written_is_told_in_place_of_the_command(project: Project) -> None:
    """A read-only checkout has no replay file; the failure says why, with its case."""
    project.write("@few\n@fused_equivalent(relu_reference, inputs=X)\ndef test_it(x):\n    return wrong(x)\n")
    (project.pytester.path / ".fusion").write_text("a file where the folder would be")

    result = project.run()

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["  smallest case: *", "  replay: none could be written (*); run the test again for*"])
    assert project.report["tests"][0]["replay"] is None
