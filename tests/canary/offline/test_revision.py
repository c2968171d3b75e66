"""Revisions written into folders of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pytest_fusion.canary.offline.incumbent.incumbents import check_out, resolve
from pytest_fusion.errors import CanaryError
from tests.canary.offline.repository import git, state


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "below").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / "below" / "naïve name.py").write_bytes(b"one\r\n\x00\xff")
    (folder / "empty.py").write_bytes(b"")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("below/naïve name.py")
    (folder / ".gitattributes").write_text("*.sh export-ignore\n*.py text eol=lf\n*.bin filter=shout\n")
    (folder / "model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    git(folder, "add", "-A")
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},vendored")
    git(folder, "commit", "-q", "-m", "one")
    git(folder, "rm", "-q", "run.sh")
    git(folder, "config", "filter.shout.smudge", "tr a-z A-Z")
    return folder


def test_all_files_as_they_were_committed(repository: Path, tmp_path: Path) -> None:
    """Bytes, modes and links, whatever ``.gitattributes`` makes of them; the repository is not written to."""
    before = state(repository)
    folder = tmp_path / "there"
    folder.mkdir()
    notes = check_out(resolve("main", repository / "below"), folder)
    assert (folder / "below" / "naïve name.py").read_bytes() == b"one\n\x00\xff"  # normalised when it was added
    assert (folder / "empty.py").read_bytes() == b""
    assert os.access(folder / "run.sh", os.X_OK)
    assert (folder / "link").readlink() == Path("below/naïve name.py")
    assert (folder / "model.bin").read_text().startswith("version")
    assert (folder / "vendored").is_dir()
    assert state(repository) == before
    assert [note.partition(":")[0] for note in notes] == [
        "submodules of the revision are empty folders",
        "files of the revision are Git LFS pointers, not their contents",
    ]


def test_what_it_is_called(repository: Path) -> None:
    """A commit has its hash and its name; a name that begins with a dash is no option."""
    revision = resolve("main", repository)
    assert revision.sha == git(repository, "rev-parse", "main")
    assert str(revision) == f"main ({revision.sha[:12]})"
    assert str(resolve(revision.sha[:10], repository)) == revision.sha[:12]
    with pytest.raises(CanaryError, match="does not have that commit"):
        resolve("--help", repository)


def test_a_missing_object_is_told(repository: Path, tmp_path: Path) -> None:
    """In a damaged or partial clone the file is named, and nothing is fetched."""
    revision = resolve("main", repository)
    blob = git(repository, "rev-parse", "main:run.sh")
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(CanaryError, match=r"unable to read .* of run\.sh.*partial clone"):
        check_out(revision, tmp_path)


def test_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no git, the message says that it is needed."""

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(CanaryError, match="needs git"):
        resolve("main", repository)
