"""A checkout takes the place of the work tree in whatever a process imports from."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from pytest_fusion.canary.offline.incumbent.serving import caches, imported_from, moved, redirect


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    top, checkout = tmp_path / "work", tmp_path / "tree"
    for folder in (top / "src", top / ".venv" / "lib" / "site-packages", checkout):
        folder.mkdir(parents=True)
    return top, checkout


def test_what_moves(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of the work tree and editable installs move; installed packages and everything else stay."""
    top, checkout = folders
    installed = str(top / ".venv" / "lib" / "site-packages")
    finder = ModuleType("__editable___kern_1_0_finder")
    finder.MAPPING = {"kern": str(top / "src" / "kern"), "other": "/elsewhere"}  # type: ignore[attr-defined]
    finder.NAMESPACES = {"spaces": [str(top / "src")]}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    monkeypatch.setattr(sys, "path", ["", str(top), str(top / "src"), installed, "/elsewhere"])
    redirect(top, checkout)
    assert sys.path == ["", str(checkout), str(checkout / "src"), installed, "/elsewhere"]
    assert {"kern": str(checkout / "src" / "kern"), "other": "/elsewhere"} == finder.MAPPING  # type: ignore[attr-defined]
    assert {"spaces": [str(checkout / "src")]} == finder.NAMESPACES  # type: ignore[attr-defined]
    assert moved(str(checkout / "src"), top, checkout) == str(checkout / "src")


def test_what_slipped_through(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the work tree is named; installed, compiled and left out ones, and those without a file, are not."""
    top, _ = folders
    for name, file in (
        ("planted_a", top / "src" / "a.py"),
        ("planted_b", top / ".venv" / "lib" / "site-packages" / "b.py"),
        ("planted_c", top / "left_out" / "c.py"),
        ("planted_d", None),
        ("planted_e", top / ".triton" / "cache" / "KEY" / "launcher.so"),
    ):
        module = ModuleType(name)
        module.__file__ = str(file) if file is not None else None
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("TRITON_HOME", str(top))
    assert imported_from(top, [top / "left_out", *caches()]) == [str(top / "src" / "a.py")]
