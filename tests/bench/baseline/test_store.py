"""Files of baselines: readable, whole, and never written over what is not theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fusion.bench.baseline import store
from pytest_fusion.bench.baseline.codec import decode, encode
from pytest_fusion.errors import BaselineError
from tests.bench.baseline.made import H200, TEST, baseline, file_of, golden, latency, row

ROOT = Path(__file__).resolve().parents[3]


def _written(folder: Path) -> Path:
    with store.locked(folder):
        return store.write(folder, [baseline(row(latency=latency(), golden=(golden(),)))])[0]


def _full(handle: int) -> None:
    raise OSError(28, "No space left on device")


def _unreadable(path: Path) -> str:
    """What the store says about the file, which it must leave as it is, when reading and when writing."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(BaselineError) as read:
        store.load(path.parent, TEST, H200)
    assert (path.read_bytes() if path.is_file() else None) == before
    assert str(path) in str(read.value)
    return str(read.value)


def test_a_file_is_found_again(tmp_path: Path) -> None:
    """What is written for a test and a device class is what is loaded for them, and nothing else is."""
    path = _written(tmp_path)
    found = store.load(tmp_path, TEST, H200)

    assert found is not None
    assert list(found.rows.values()) == [row(latency=latency(), golden=(golden(),))]
    assert store.load(tmp_path, TEST, "cpu (modelled)") is None
    assert store.load(tmp_path / "none", TEST, H200) is None
    assert store.find(tmp_path) == [path]


def test_names_of_files_can_be_read() -> None:
    """The file's name has the test file, the test and the device in it."""
    assert store.path_of(Path(), TEST, H200).name.startswith("test_norm.test_rms-bf16.NVIDIA-H200-sm_90.")


def test_names_of_files_do_not_collide() -> None:
    """Tests that differ by case, folder, sign, device or beyond any length have files on any file system."""
    tests = [
        "a/test_x.py::test_f[1]",
        "b/test_x.py::test_f[1]",
        "a/test_x.py::test_F[1]",
        "a/test_x.py::test_f[-1]",
        "a/test_x.py::test_f[+1]",
        f"a/test_x.py::test_f[{'y' * 300}1]",
        f"a/test_x.py::test_f[{'y' * 300}2]",
        "a/test_x.py::test_f[\udc80]",
    ]
    names = [store.path_of(Path(), test, device).name for test in tests for device in (H200, "cpu (modelled)")]

    assert len({name.lower() for name in names}) == len(names)
    assert max(map(len, names)) < 200


def test_the_text_shows_in_a_diff_what_changed() -> None:
    """A fact that changed is one line of the file that changed; blocks are one line; equal rows give equal text."""
    one = encode(baseline(row(latency=latency()))).splitlines()
    other = encode(baseline(row({**row().facts, "launches.kernels": 2}, latency=latency()))).splitlines()

    assert [line for line in one if line not in other] == ['    "launches.kernels": 1,']
    assert sum("blocks" in line for line in one) == 1
    assert encode(baseline(row(facts=dict(reversed(row().facts.items())), latency=latency()))).splitlines() == one


def test_the_order_of_rows_is_not_that_of_the_run() -> None:
    """Rows are sorted by case, what is judged first."""
    rows = [row(role="reference"), row(), row(case="rows=1")]

    assert encode(baseline(*rows)) == encode(baseline(*reversed(rows)))
    assert [key.role for key in decode(encode(baseline(*rows)), Path()).rows] == ["fused", "fused", "reference"]


def test_what_this_version_does_not_know_is_kept(tmp_path: Path) -> None:
    """Keys of a file and of its rows that another version or a person wrote are there after an update."""
    path = _written(tmp_path)
    data = json.loads(path.read_text())
    data["owner"] = {"team": "kernels"}
    data["rows"][0] |= {"comment": "two launches would be wrong"}
    data["rows"][0]["latency"]["clock_mhz"] = 1980
    path.write_text(json.dumps(data))
    found = store.load(tmp_path, TEST, H200)
    assert found is not None
    more = row(case="rows=9", made="")
    with store.locked(tmp_path):
        store.write(tmp_path, [replace(found, rows={**found.rows, more.key: more})])
    same = json.loads(path.read_text())
    changed = row({"launches.kernels": 2})
    with store.locked(tmp_path):
        store.write(tmp_path, [replace(found, rows={changed.key: changed})])
    after = json.loads(path.read_text())

    assert (same["owner"], same["rows"][0]["latency"]["clock_mhz"]) == ({"team": "kernels"}, 1980)
    assert (after["owner"], after["rows"][0]["comment"]) == ({"team": "kernels"}, "two launches would be wrong")


def test_a_file_that_would_not_change_is_not_written(tmp_path: Path) -> None:
    """Only files whose text changes are replaced and listed."""
    path = _written(tmp_path)
    inode = path.stat().st_ino
    found = store.load(tmp_path, TEST, H200)
    assert found is not None

    with store.locked(tmp_path):
        assert store.write(tmp_path, [found]) == []
    assert path.stat().st_ino == inode


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ('{"tool": "pytest-fusion baseline", "sche', "was it cut off"),
        ("<<<<<<< HEAD\n{}\n", "merge conflict"),
        ('{"a": 1, "a": 2}', "'a' stands there twice"),
        pytest.param("[" * 100_000, "is not JSON", id="deep"),
        ("[]", "is not a baseline of pytest-fusion"),
        ('{"schema": 1, "tests": []}', "is not a baseline of pytest-fusion"),
        ('{"tool": "pytest-fusion baseline"}', "has schema None, and this version reads 1; restore it"),
        ('{"tool": "pytest-fusion baseline", "schema": true}', "has schema True"),
        ('{"tool": "pytest-fusion baseline", "schema": 2}', "schema 2, and this version reads 1; use the version"),
        ('{"tool": "pytest-fusion baseline", "schema": 1}', "has no 'test'"),
    ],
)
def test_what_is_no_baseline_is_refused_and_left(tmp_path: Path, text: str, said: str) -> None:
    """Corrupt, foreign and newer files are told by name with what to do, and stay as they are."""
    path = _written(tmp_path)
    path.write_text(text)

    assert said in _unreadable(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(rows=3),
        lambda data: data.update(rows=[3]),
        lambda data: data["rows"].append(data["rows"][0]),
        lambda data: data["rows"][0].update(facts={"launches.kernels": 1.5}),
        lambda data: data["rows"][0].update(facts=[]),
        lambda data: data["rows"][0].update(latency={}),
        lambda data: data["rows"][0]["latency"].update(blocks=["x"]),
        lambda data: data["rows"][0].update(environment="nowhere"),
        lambda data: data["rows"][0].pop("case"),
        lambda data: data["rows"][0].update(golden=[{}]),
    ],
    ids="no-list no-row twice float list latency text environment case golden".split(),
)
def test_a_file_of_another_shape_is_refused_and_left(tmp_path: Path, change: object) -> None:
    """A file of this schema that someone bent is not taken for one with less in it."""
    path = _written(tmp_path)
    data = json.loads(path.read_text())
    change(data)  # type: ignore[operator]
    path.write_text(json.dumps(data))

    assert "but not its shape" in _unreadable(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """A binary file in the place of a baseline is left as it is."""
    path = _written(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")

    assert "is not text" in _unreadable(path)


def test_the_file_of_another_test_is_refused(tmp_path: Path) -> None:
    """A file copied to another test's name would be a baseline that nobody measured."""
    other = row(test="tests/test_norm.py::test_other")
    with store.locked(tmp_path):
        source = store.write(tmp_path, [baseline(other)])[0]
    path = file_of(tmp_path, row())
    path.write_bytes(source.read_bytes())

    assert "holds the baseline of tests/test_norm.py::test_other" in _unreadable(path)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """Neither reading nor writing touches a folder that has the name of a baseline."""
    path = file_of(tmp_path, row())
    path.mkdir(parents=True)

    assert "is a folder where a baseline file should be" in _unreadable(path)
    with store.locked(tmp_path), pytest.raises(BaselineError, match="is a folder"):
        store.write(tmp_path, [baseline(row())])
    assert path.is_dir()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """The folder of baselines cannot be a file."""
    folder = tmp_path / "baselines"
    folder.write_text("mine")

    with pytest.raises(BaselineError, match=r"is a file, and baselines need a folder"):
        store.load(folder, TEST, H200)
    with pytest.raises(BaselineError, match="cannot write"), store.locked(folder):
        pass
    assert folder.read_text() == "mine"


def test_a_read_only_file_is_left_and_so_are_the_others(tmp_path: Path) -> None:
    """Renaming asks for no permission on the file; the mode is obeyed, by root too, before any file is replaced."""
    path = _written(tmp_path)
    path.chmod(0o444)
    before = path.read_bytes()
    first = row(test="tests/test_a.py::test_a")

    with store.locked(tmp_path), pytest.raises(BaselineError, match=r"is read-only.*chmod u\+w"):
        store.write(tmp_path, [baseline(first), baseline(row({"launches.kernels": 9}))])

    assert path.read_bytes() == before
    assert store.find(tmp_path) == [path]


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves the file as it was, nothing beside it, and a message that names it."""
    path = _written(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", _full)
    with store.locked(tmp_path), pytest.raises(BaselineError, match=r"No space left on device.*unchanged"):
        store.write(tmp_path, [baseline(row({"launches.kernels": 9}))])

    assert path.read_bytes() == before
    assert list(tmp_path.glob(".fusion-*")) == []


def test_what_was_written_before_an_error_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path that was written is told, also where a later one could not be."""
    calls: list[int] = []

    def full_later(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 1:
            _full(handle)

    monkeypatch.setattr(os, "fsync", full_later)
    first, second = (row(test=f"{name}.py::test") for name in "ab")

    with store.locked(tmp_path), pytest.raises(BaselineError) as told:
        store.write(tmp_path, [baseline(first), baseline(second)])

    assert f"cannot write {file_of(tmp_path, second)}" in str(told.value)
    assert f"Written before it: {file_of(tmp_path, first)}" in str(told.value)


_KILLED = """
import os, signal, sys
from pathlib import Path
from pytest_fusion.bench.baseline import store
from tests.bench.baseline.made import baseline, row

step, folder = sys.argv[1], Path(sys.argv[2])
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
if step == "sync":
    os.fsync = die
elif step == "rename":
    Path.replace = die
elif step == "renamed":
    store._sync = die
with store.locked(folder):
    store.write(folder, [baseline(row({"launches.kernels": 9}))])
"""


@pytest.mark.parametrize(("step", "is_new"), [("sync", False), ("rename", False), ("renamed", True)])
def test_a_run_that_is_killed_leaves_a_whole_file(tmp_path: Path, step: str, is_new: bool) -> None:
    """Killed before the rename, the old file is whole; after it, the new one is; the next run writes and cleans up."""
    path = _written(tmp_path)
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, step, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = store.load(tmp_path, TEST, H200)

    assert done.returncode == -9, done.stderr
    assert found is not None
    assert (path.read_bytes() != before) is is_new
    assert len(list(tmp_path.glob(".fusion-*.tmp"))) == (0 if is_new else 1)
    with store.locked(tmp_path):
        store.write(tmp_path, [baseline(row({"launches.kernels": 3}))])
    assert list(tmp_path.glob(".fusion-*.tmp")) == []
    assert json.loads(path.read_text())["rows"][0]["facts"] == {"launches.kernels": 3}


def test_who_holds_the_lock_is_waited_for_and_then_told(tmp_path: Path) -> None:
    """A second writer gets an error that names the folder, not the first one's half-written files."""
    said: list[str] = []

    def second() -> None:
        try:
            with store.locked(tmp_path, patience=0.05):
                said.append("entered")
        except BaselineError as error:
            said.append(str(error))

    with store.locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    assert len(said) == 1
    assert f"another run has been writing to {tmp_path}" in said[0]


def test_the_lock_is_hidden_from_git_and_the_baselines_are_not(tmp_path: Path) -> None:
    """The first writer leaves a .gitignore, lists it, and never touches it again."""
    with store.locked(tmp_path) as made:
        assert made == [tmp_path / ".gitignore"]
    (tmp_path / ".gitignore").write_text("mine")
    with store.locked(tmp_path) as made:
        assert made == []

    assert (tmp_path / ".gitignore").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} <= {".gitignore", ".lock"}


def test_a_link_is_followed(tmp_path: Path) -> None:
    """A baseline behind a symbolic link is replaced where it lies, and the link stays."""
    path = _written(tmp_path)
    real = tmp_path / "elsewhere.json.kept"
    path.rename(real)
    path.symlink_to(real)

    with store.locked(tmp_path):
        assert store.write(tmp_path, [baseline(row({"launches.kernels": 9}))]) == [real]
    assert path.is_symlink()
    assert json.loads(real.read_text())["rows"][0]["facts"] == {"launches.kernels": 9}
