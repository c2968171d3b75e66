"""``--fusion-canary``: the tests of a project beside a revision of it, another environment, or a function."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_fusion.plugin import cli
from tests import forked
from tests.canary.offline.repository import git, state
from tests.plugin.conftest import HEAD, Project
from tests.run.process.children import interruptible

KERNELS = """
import torch

def wrong_where_one(x):
    return torch.clamp_min(x, 0) + (x.shape[-1] == 1)

def right(x):
    return torch.clamp_min(x, 0)

worse = right
better = wrong_where_one
known = wrong_where_one
equal = right
"""
NOW = KERNELS.replace("worse = right", "worse = wrong_where_one").replace(
    "better = wrong_where_one", "better = lambda x: torch.relu(x)"
)
TEST = """
import kern

S = {"inputs": {"x": tensor("rows hidden")}, "dims": {"rows": dim(1, 9), "hidden": dim(1, 40)}, "dtypes": "float32"}
"""
CASE = """
@settings(max_examples=24)
@fused_equivalent(relu_reference, **S)
def test_NAME(x):
    return kern.NAME(x)
"""
NAMES = ("worse", "better", "known", "equal")
BEFORE_TEST = HEAD + TEST + "".join(CASE.replace("NAME", name) for name in NAMES)
NOW_TEST = BEFORE_TEST + CASE.replace("test_NAME", "test_new").replace("NAME", "equal")
WITHOUT = ("--fusion-canary-without", "launches,memory,latency")


@pytest.fixture
def temporary(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs put what is to be gone after them."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


@pytest.fixture
def repository(project: Project, temporary: Path) -> Iterator[Path]:
    """Two versions: the first committed and tagged, the second partly staged, partly only in the work tree."""
    folder = project.pytester.path
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = src\n")
    (folder / "src").mkdir()
    (folder / ".gitattributes").write_text("test_*.py export-ignore\n")
    (folder / "src" / "kern.py").write_text(KERNELS)
    (folder / "test_it.py").write_text(BEFORE_TEST)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "before")
    git(folder, "tag", "release-1")
    (folder / "src" / "kern.py").write_text(NOW)
    (folder / "staged.txt").write_text("staged")
    git(folder, "add", "staged.txt")
    (folder / "test_it.py").write_text(NOW_TEST)
    yield folder
    assert list(temporary.glob("pytest-fusion-incumbent-*")) == []


def canaries(project: Project) -> dict[str, str]:
    return {name: test["canary"]["verdict"] for name, test in project.tests.items() if test["canary"]}


# Stays in the fast run at some 10 s: the one comparison with an incumbent of another revision, in a process of its own.
def test_a_revision(project: Project, repository: Path) -> None:
    """Each test has its own verdict; only a rollback fails; the repository is as it was, to the byte."""
    before = state(repository)
    result = project.run("--fusion-canary", "git:release-1", *WITHOUT, "--fusion-report", "fusion.html", fork=True)
    assert canaries(project) == {
        "test_worse": "rollback",
        "test_better": "promote",
        "test_known": "promote",
        "test_equal": "promote",
        "test_new": "nodata",
    }, result.stdout.str()
    assert state(repository) == before
    result.assert_outcomes(failed=1, passed=3, skipped=1)
    worse = project.tests["test_worse"]
    assert worse["case"]["dims"] == {"hidden": 1, "rows": 1}
    assert (repository / worse["replay"]).is_file()
    assert worse["canary"]["incumbent"]["commit"] == git(repository, "rev-parse", "release-1")
    assert project.tests["test_known"]["canary"]["counts"]["known-bad"] > 0
    assert project.tests["test_better"]["canary"]["counts"]["better"] > 0
    assert "that test does not exist there" in project.tests["test_new"]["canary"]["reasons"][0]
    lines = result.stdout.str()
    for words in ("canary against git:release-1", "KNOWN_BAD", "canary: 1 rollback, 1 nodata, 3 promote"):
        assert words in lines
    page = (repository / "fusion.html").read_text()
    assert "Canary" in page
    assert "rollback" in page


@pytest.mark.slow
def test_a_reference_or_inputs_that_changed(project: Project, repository: Path) -> None:
    """Both are judged by the reference of today; where the spec made other inputs of a case, nothing is compared."""
    code = """
import kern

def mistaken(x):
    return kern.wrong_where_one(x)
""" + TEST.replace("import kern", "")
    case = CASE.replace("kern.NAME", "kern.KERNEL").replace("relu_reference", "REFERENCE")

    def test(name: str, kernel: str, reference: str = "relu_reference", spec: str = "**S") -> str:
        words = {"NAME": name, "KERNEL": kernel, "REFERENCE": reference, "**S": spec}
        text = case
        for word, value in words.items():
            text = text.replace(word, value)
        return text

    other = '**{**S, "inputs": {"x": tensor("rows hidden", values=values.positive())}}'
    (repository / "test_it.py").write_text(
        HEAD
        + code
        + test("random", "right", "lambda x: torch.rand_like(x)")
        + test("followed", "wrong_where_one", "mistaken")
        + test("ahead", "right", "mistaken")
        + test("inputs", "right", spec=other)
    )
    git(repository, "commit", "-q", "-am", "mistaken")
    now = test("random", "right") + test("followed", "right") + test("ahead", "right") + test("inputs", "right")
    (repository / "test_it.py").write_text(HEAD + code + now)
    project.run("--fusion-canary", "HEAD", *WITHOUT, fork=True).assert_outcomes(passed=2, skipped=1, failed=1)
    verdicts = canaries(project)
    assert verdicts.pop("test_random") == "error"  # and the process serves those after it
    assert verdicts == {"test_followed": "promote", "test_ahead": "promote", "test_inputs": "nodata"}
    told = {name: test["canary"] for name, test in project.tests.items()}
    assert told["test_followed"]["counts"]["better"] > 0
    assert "better" not in told["test_ahead"]["counts"]
    assert told["test_inputs"]["counts"] == {"foreign": told["test_inputs"]["counts"]["foreign"]}
    for name in ("test_followed", "test_ahead"):
        assert "its results were judged by today's" in " ".join(told[name]["notes"])


@pytest.mark.slow
def test_an_incumbent_that_dies(project: Project, repository: Path) -> None:
    """The case that ends its process counts for the candidate, and a new one answers the rest; by the ini file."""
    dies = "import os\ndef dies(x):\n    if x.shape == (2, 2):\n        os.kill(os.getpid(), 9)\n    return right(x)\n"
    (repository / "src" / "kern.py").write_text(KERNELS + dies)
    pinned = "@example(rows=2, hidden=2)\n@example(rows=3, hidden=2)" + CASE.replace("NAME", "dies")
    (repository / "test_it.py").write_text(HEAD + TEST + pinned)
    (repository / "pytest.ini").write_text("[pytest]\npythonpath = src\nfusion_canary = HEAD\n")
    git(repository, "commit", "-q", "-am", "dies")
    (repository / "src" / "kern.py").write_text(KERNELS + "dies = right\n")
    project.run(*WITHOUT, fork=True).assert_outcomes(passed=1)
    told = project.tests["test_dies"]["canary"]
    assert (told["verdict"], told["counts"]["better"]) == ("promote", 1), told["reasons"]
    (better,) = [pair for pair in told["pairs"] if pair["standing"] == "better"]
    assert better["incumbent"]["check"] == "crash"


@pytest.mark.slow
def test_two_workers(project: Project, repository: Path) -> None:
    """With pytest-xdist each worker has an incumbent of its own, and all verdicts arrive."""
    selected = ("-k", "worse or equal", "-n", "2")
    project.run("--fusion-canary", "release-1", *WITHOUT, *selected, fork=True).assert_outcomes(failed=1, passed=1)
    assert canaries(project) == {"test_worse": "rollback", "test_equal": "promote"}


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(project: Project, repository: Path, temporary: Path) -> None:
    """SIGINT in the middle of a comparison ends the run, its incumbent's process, and the checkout."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--fusion-device", "cpu", "-k", "equal"]
    command += ["--fusion-canary", "release-1"]
    child = interruptible(command, cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        served = _process_of(temporary)
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == pytest.ExitCode.INTERRUPTED, output
    # A signal that comes before the run knows of the process it has just started leaves it to notice by itself.
    _assert_gone(served, temporary)


@pytest.mark.slow
def test_a_killed_run_leaves_nothing(project: Project, repository: Path, temporary: Path) -> None:
    """After SIGKILL, which no process survives to clean up, the incumbent itself ends and removes its folder."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--fusion-device", "cpu", "-k", "equal"]
    command += ["--fusion-canary", "release-1"]
    child = subprocess.Popen(
        command, cwd=repository, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    served = _process_of(temporary)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    _assert_gone(served, temporary)


def _assert_gone(served: int, temporary: Path) -> None:
    """Within a minute there is neither the incumbent's process nor its folder."""
    for _ in range(600):
        if not Path(f"/proc/{served}").exists() and not list(temporary.glob("pytest-fusion-incumbent-*")):
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{served}").exists()
    assert list(temporary.glob("pytest-fusion-incumbent-*")) == []


def _process_of(temporary: Path) -> int:
    """The id of the incumbent's process, once it has something to do."""
    for _ in range(1200):
        for status in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = status.read_bytes().split(b"\0")
            except OSError:
                continue
            if words and any(
                word.startswith(os.fsencode(temporary)) and word.endswith(b"serve.json") for word in words
            ):
                return int(status.parent.name)
        time.sleep(0.1)
    raise AssertionError("no incumbent was started")


@pytest.mark.slow
def test_another_environment(project: Project, temporary: Path) -> None:
    """An interpreter that has another version installed serves the same test file with that version."""
    folder = project.pytester.path
    installed = temporary / "installed" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "kern.py").write_text(KERNELS)
    python = temporary / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={installed} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / "mine").mkdir()
    (folder / "mine" / "kern.py").write_text(NOW)
    (folder / "test_it.py").write_text(NOW_TEST)
    os.environ["PYTHONPATH"], before = os.pathsep.join([str(folder / "mine"), *sys.path]), os.environ.get("PYTHONPATH")
    try:
        result = project.run("--fusion-canary", f"python:{python}", *WITHOUT, "-k", "worse or better", subprocess=True)
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ.update({"PYTHONPATH": before} if before is not None else {})
    assert canaries(project) == {"test_worse": "rollback", "test_better": "promote"}, result.stdout.str()
    assert list(temporary.glob("pytest-fusion-incumbent-*")) == []


def test_a_function(project: Project, temporary: Path) -> None:
    """``module:function`` is imported here; latency and memory that were not measured hold it, and nothing fails."""
    (project.pytester.path / "rivals.py").write_text("import torch\ndef relu(x):\n    return torch.relu(x)\n")
    project.write(CASE.replace("kern.NAME", "relu").replace("NAME", "it").replace("**S", 'inputs=X, dtypes="float32"'))
    result = project.run("--fusion-canary", "rivals:relu")
    result.assert_outcomes(passed=1)
    assert canaries(project) == {"test_it": "hold"}
    told = result.stdout.str()
    assert "latency was not measured: interpreted kernels have none" in told
    assert "--fusion-canary-without launches,memory,latency" in told


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("release-2", "does not have that commit; did you mean 'release-1'?"),
        ("git:", "has no name"),
        ("python:/nowhere/python", "there is no program /nowhere/python"),
        ("python:.", "is a folder"),
        ("kern/relu", "does not have that commit"),
        ("a b:c", "cannot be read"),
        ("nowhere.kern:relu", "there is no module 'nowhere'"),
        ("kern:rigth", "has no 'rigth'; did you mean 'right'?"),
        ("kern:torch", "cannot be called"),
    ],
)
def test_a_name_that_leads_nowhere(project: Project, repository: Path, name: str, words: str) -> None:
    """Every wrong incumbent is refused before a test runs, with what is wrong and what is near."""
    result = project.run("--fusion-canary", name)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in result.stderr.str()


def test_wrong_use(project: Project) -> None:
    """A metric that does not exist and a replay beside a canary are refused; so is a revision outside of git."""
    project.write(CASE.replace("kern.NAME", "relu").replace("NAME", "it").replace("**S", "inputs=X"))
    for options, words in (
        (("kern:x", "--fusion-canary-without", "latancy"), "did you mean 'latency'?"),
        (("kern:x", "--fusion-replay", "x.json"), "give one of them"),
        (("HEAD",), "is not in a git work tree"),
    ):
        result = project.run("--fusion-canary", *options)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert words in result.stderr.str()


@pytest.mark.slow
def test_a_revision_that_cannot_be_imported(project: Project, repository: Path) -> None:
    """Tests whose file does not import in that revision have no data, and its error is told."""
    git(repository, "commit", "-q", "-am", "after")
    (repository / "src" / "kern.py").write_text("import nowhere_at_all\n")
    git(repository, "commit", "-q", "-am", "broken")
    (repository / "src" / "kern.py").write_text(NOW)
    project.run("--fusion-canary", "HEAD", "-k", "equal", fork=True).assert_outcomes(skipped=1)
    assert "nowhere_at_all" in project.tests["test_equal"]["canary"]["reasons"][0]


@pytest.mark.slow
def test_an_incumbent_that_is_the_work_tree_is_an_error(project: Project, repository: Path) -> None:
    """A test that reaches into the work tree by an absolute path has compared today's kernel with itself."""
    code = f"import sys\nsys.path.insert(0, {str(repository / 'src')!r})\n" + BEFORE_TEST
    (repository / "pytest.ini").write_text("[pytest]\n")
    (repository / "test_it.py").write_text(code)
    git(repository, "commit", "-q", "-am", "absolute")
    result = project.run("--fusion-canary", "HEAD", *WITHOUT, "-k", "equal", fork=True)
    result.assert_outcomes(failed=1)
    assert canaries(project) == {"test_equal": "error"}
    assert "imported 1 file(s) of the work tree" in project.tests["test_equal"]["message"]


@pytest.mark.slow
def test_the_command(project: Project, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``canary compare`` leaves an exit status for each verdict, and writes JSON and HTML."""
    done = compare(
        project, "--incumbent", "release-1", "--spec", "test_it:test_worse", "--json", "out.json", "--html", "out.html"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((repository / "out.json").read_text())
    assert (report["schema"], report["tests"][0]["canary"]["verdict"]) == (1, "rollback")
    assert "rollback" in (repository / "out.html").read_text()
    assert "canary: 1 rollback" in done.stdout
    assert "replay file:" in done.stdout
    few = compare_here(
        "--incumbent",
        "kern:right",
        "--candidate",
        "kern:equal",
        "--spec",
        "test_it:test_equal",
        "--cases",
        "3",
    )
    assert few.ret == 5, few.outlines + few.errlines
    wrong = compare_here("--incumbent", "kern:right", "--spec", "test_it:right")
    assert wrong.ret == 4
    assert "test_it has no 'right'" in wrong.stderr.str()


def compare(project: Project, *options: str) -> Any:
    """A program of its own."""
    command = [sys.executable, "-m", "pytest_fusion.plugin.cli", "canary", "compare", "--device", "cpu", *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", ".", *sys.path])}
    return subprocess.run(command, cwd=project.pytester.path, env=env, capture_output=True, text=True, check=False)


def compare_here(*options: str) -> pytest.RunResult:
    """The same in a fork of this process."""
    words = ["canary", "compare", "--device", "cpu", *options]

    def work() -> int:
        os.environ["PYTHONPATH"] = os.pathsep.join(["src", ".", *sys.path])
        sys.path[:0] = ["src", "."]
        return cli.main(words)

    return forked.run(work, ["pytest-fusion", *words])
