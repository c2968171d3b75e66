"""Report files: refused before the run or written whole after it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pytest_fusion.errors import FusionError
from pytest_fusion.report import report_paths


def test_missing_folders_are_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    """The check makes the folder, returns the absolute path and leaves no trial file."""
    target = tmp_path / "a" / "b" / "fusion.json"

    assert report_paths.check_writable(target, "--fusion-json") == target
    assert list(target.parent.iterdir()) == []


def test_a_folder_is_refused_with_a_path_that_works(tmp_path: Path) -> None:
    """The message for a folder proposes a file inside it."""
    with pytest.raises(FusionError, match=r"--fusion-json .* is a folder") as caught:
        report_paths.check_writable(tmp_path, "--fusion-json")

    assert str(tmp_path / "fusion.json") in str(caught.value)


def test_an_empty_path_is_refused() -> None:
    """An empty path would be the working directory."""
    with pytest.raises(FusionError, match="empty path"):
        report_paths.check_writable("  ", "--fusion-report")


def test_a_file_in_the_way_of_the_folder_is_refused(tmp_path: Path) -> None:
    """A path below a regular file names the folder that cannot be made."""
    (tmp_path / "file").write_text("")

    with pytest.raises(FusionError, match=r"cannot write in .*file"):
        report_paths.check_writable(tmp_path / "file" / "fusion.html", "--fusion-report")


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial file that cannot be made is found before the run, not after it."""

    def denied(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)

    with pytest.raises(FusionError, match="Permission denied"):
        report_paths.check_writable(tmp_path / "fusion.html", "--fusion-report")


def test_a_new_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    """Another user can read the report when the umask lets them."""
    before = os.umask(0o022)
    try:
        report_paths.replace_text(tmp_path / "new", "text")
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o644


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    """Replacing does not change who may read the file."""
    target = tmp_path / "old"
    target.write_text("old")
    target.chmod(0o640)

    report_paths.replace_text(target, "new")

    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk costs the new report, not the old one, and leaves no part behind."""
    target = tmp_path / "fusion.json"
    target.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(FusionError, match="No space left"):
        report_paths.replace_text(target, "new")

    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """A pipe given as the path stays a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        report_paths.replace_text(report_paths.check_writable(pipe, "--fusion-json"), "text")

        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_is_followed(tmp_path: Path) -> None:
    """A report path that is a symbolic link replaces the file behind it."""
    real = tmp_path / "real.html"
    link = tmp_path / "link.html"
    link.symlink_to(real)

    assert report_paths.check_writable(link, "--fusion-report") == real
    report_paths.replace_text(link, "text")

    assert link.is_symlink()
    assert real.read_text() == "text"
