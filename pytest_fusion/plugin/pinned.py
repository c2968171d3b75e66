"""Pinned replays: failing cases and recorded calls in folders named ``fusion_replays``, which tests run first."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_fusion.case.stated import misfit
from pytest_fusion.diagnosis.repro import replay_file as replays
from pytest_fusion.engine.request import Pinned
from pytest_fusion.errors import ReplayError
from pytest_fusion.spec.fusion_spec import FusionSpec

FOLDER = "fusion_replays"
# Folders of other people's files: walking them costs seconds and finds nothing.
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})


@dataclass(frozen=True, slots=True)
class Pin:
    """A file in a folder ``fusion_replays``, and its test."""

    path: Path
    nodeid: str
    spec: str

    def belongs_to(self, nodeid: str, spec: str, folder: Path, root: Path) -> bool:
        """Whether this is a case of the test ``nodeid`` in ``folder``: by node id; or by the names of test and spec, if
        the named file is gone from ``root`` (the test moved) or the pin names only a spec."""
        if self.nodeid == nodeid or (self.path.is_relative_to(folder) and same_test(self.nodeid, nodeid)):
            return True
        path, _, name = self.nodeid.partition("::")
        gone = not name or not (root / path).is_file()
        return gone and self.spec == spec and name in ("", nodeid.partition("::")[2])


def names_only_spec(nodeid: str) -> bool:
    """Whether a file belongs to any test of its spec: a serving process knows no test."""
    return "::" not in nodeid


def same_test(a: str, b: str) -> bool:
    """Whether node ids are equal; their paths may start at different folders if the root differs."""
    (file_a, _, name_a), (file_b, _, name_b) = a.partition("::"), b.partition("::")
    parts_a, parts_b = Path(file_a).parts, Path(file_b).parts
    common = min(len(parts_a), len(parts_b))
    return name_a == name_b and parts_a[-common:] == parts_b[-common:]


def find(folders: Iterable[Path], root: Path) -> list[Pin]:
    """Pinned files beside or below ``folders`` and ``root/tests``, or up to ``root``. Raises ``ReplayError``."""
    files: dict[Path, None] = {}
    starts = {*folders, root / "tests"}
    tops = [start for start in starts if not any(start != other and start.is_relative_to(other) for other in starts)]
    for top in sorted(tops):
        between = [parent for parent in top.parents if parent.is_relative_to(root)]
        for folder in [*_below(top), *(parent / FOLDER for parent in between)]:
            files.update(dict.fromkeys(sorted(folder.glob("*.json"))))
    return [Pin(path, *replays.names(path)) for path in files]


def _below(top: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(top):
        if "pyvenv.cfg" in files:
            names.clear()
            continue
        names[:] = sorted(name for name in names if name not in _SKIPPED and not name.startswith("."))
        if Path(folder).name == FOLDER:
            yield Path(folder)


def orphans(pins: Iterable[Pin], items: Iterable[Any], config: pytest.Config) -> list[str]:
    """A sentence for each pin whose test's file is among those of ``items`` and which none of these tests runs."""
    known = [(item.nodeid, item.obj.fusion_spec.name, item.path.parent, config.rootpath) for item in items]
    files = {nodeid.partition("::")[0] for nodeid, *_ in known}
    return [
        f"pinned replay {os.path.relpath(pin.path, config.invocation_params.dir)} was not run: no test {pin.nodeid} is "
        'left in its file; rename "nodeid" in it, or delete it'
        for pin in pins
        if pin.nodeid.partition("::")[0] in files and not any(pin.belongs_to(*test) for test in known)
    ]


def tests_of(replay: replays.Replay, items: Iterable[Any]) -> list[pytest.Item]:
    """The collected items of a replay file, by node id or by spec."""
    if names_only_spec(replay.nodeid):
        specs = [(item, getattr(getattr(item, "obj", None), "fusion_spec", None)) for item in items]
        return [item for item, spec in specs if spec is not None and spec.name == replay.spec]
    return [item for item in items if same_test(item.nodeid, replay.nodeid)]


def load(pin: Pin, spec: FusionSpec, shown: str) -> Pinned:
    """The case of a pin, ready to run. Raises ``ReplayError`` if it does not fit today's spec."""
    try:
        replay = replays.read(pin.path)
        wrong = misfit(spec, replay.case)
    except ReplayError as error:
        raise ReplayError(f"{error}. {_REFRESH.format(path=shown)}") from None
    if wrong is not None:
        raise ReplayError(
            f"{spec.name}: the pinned replay {shown} was written for another spec than today's: {wrong}. "
            + _REFRESH.format(path=shown)
        )
    return Pinned(shown, replay.case, replay.made, replay.check, recorded=replay.check == replays.RECORDED)


_REFRESH = (
    'To keep guarding against its bug, edit "case" in {path} to fit the spec of today, or pin a new failing case '
    "(pytest-fusion pin FILE); to give it up, delete the file"
)
