"""Replay files: one failing case as JSON, named after its test, good in any process on any machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_fusion.case.model import Case
from pytest_fusion.errors import ReplayError

SCHEMA = 1
FOLDER = Path(".fusion") / "failures"
_TOOL = "pytest-fusion"


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay file holds."""

    nodeid: str
    spec: str
    check: str
    cause: str | None
    case: Case

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "tool": _TOOL,
            "nodeid": self.nodeid,
            "spec": self.spec,
            "check": self.check,
            "cause": self.cause,
            "case": self.case.as_json(),
        }


def file_name(replay: Replay) -> str:
    """Stable for equal failures of one test, so that repeated runs overwrite instead of piling up."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", replay.nodeid.rpartition("/")[2]).strip("-")[:80]
    digest = hashlib.sha256(json.dumps(replay.as_json(), sort_keys=True).encode()).hexdigest()[:8]
    return f"{stem}-{digest}.json"


def write(replay: Replay, root: Path) -> Path:
    """Write the file under ``root/.fusion/failures`` at once or not at all; raises ``OSError``."""
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text("# Failing cases of this machine's runs; copy one elsewhere to keep it.\n*\n")
    path = folder / file_name(replay)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    with os.fdopen(handle, "w") as stream:
        json.dump(replay.as_json(), stream, indent=2, sort_keys=True, allow_nan=False)
        stream.write("\n")
    Path(temporary).replace(path)
    return path


def read(path: Path) -> Replay:
    """Raises ``ReplayError`` naming what is wrong with the file. Drawn functions and enums of the case are imported."""
    data = _load(path)
    try:
        return Replay(data["nodeid"], data["spec"], data["check"], data["cause"], Case.from_json(data["case"]))
    except ReplayError as error:
        raise ReplayError(f"the replay file {path}: {error}") from None


def owner(path: Path) -> str:
    """The node id of the test that the file belongs to. Raises ``ReplayError``; imports nothing that the case names."""
    return str(_load(path)["nodeid"])


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReplayError(f"cannot read the replay file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ReplayError(f"the replay file {path} is not JSON ({error}); was it cut off?") from None
    if not isinstance(data, dict) or data.get("tool") != _TOOL:
        raise ReplayError(f"{path} is not a replay file of {_TOOL}; those lie in {FOLDER}/")
    if data.get("schema") != SCHEMA:
        raise ReplayError(f"{path} has schema {data.get('schema')!r}, this version reads {SCHEMA}")
    for key in ("nodeid", "spec", "check", "cause", "case"):
        if key not in data:
            raise ReplayError(f"the replay file {path} has no {key!r}; was it edited?")
    return data
