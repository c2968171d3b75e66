"""Replay files: one failing case as JSON, named after its test, valid in any process on any machine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_fusion.case.case_model import Case
from pytest_fusion.errors import ReplayError
from pytest_fusion.run.process.atomic_file import replace_whole

SCHEMA = 1
FOLDER = Path(".fusion") / "failures"
# The check of a file without a failure: a recorded call.
RECORDED = "recorded"
_TOOL = "pytest-fusion"
# The parts of an environment that may decide whether a failure shows: where it ran, and on which versions.
_MADE = ("lane", "device", "device_name", "torch", "triton", "cuda", "python", "pytest_fusion")
_MADE_ON = "the replay was made on"
_LANES = {"cpu-interpreter": "the CPU lane (interpreted Triton)", "cuda": "a GPU"}


@dataclass(frozen=True, slots=True)
class Replay:
    """The content of a replay file. ``made``: device and versions of the failure; old files lack it."""

    nodeid: str
    spec: str
    check: str
    cause: str | None
    case: Case
    made: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "tool": _TOOL,
            "nodeid": self.nodeid,
            "spec": self.spec,
            "check": self.check,
            "cause": self.cause,
            "case": self.case.as_json(),
            **({"made": dict(self.made)} if self.made else {}),
        }


def made_here(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a report's environment that a replay file stores."""
    return {key: environment.get(key) for key in _MADE if environment.get(key) is not None}


def elsewhere(made: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """How device and versions of a failure differ from these, as a sentence, or ``None``; processors do not count."""
    lane, ours = made.get("lane"), here.get("lane")
    keys = ["torch", "triton"]
    if lane == ours == "cuda":
        keys.insert(0, "device_name")
    other = [key for key in keys if made.get(key) is not None and made.get(key) != here.get(key)]
    if (lane is None or lane == ours) and not other:
        return None
    there = [place(made)] if lane != ours else []
    now = [place(here)] if lane != ours else []
    there += [_named(key, made.get(key)) for key in other]
    now += [_named(key, here.get(key)) for key in other]
    return f"{_MADE_ON} {', '.join(there)}; here it runs on {', '.join(now)}"


def names_elsewhere(note: str) -> bool:
    """Whether a record's note is one of :func:`elsewhere`."""
    return note.startswith(_MADE_ON)


def place(found: Mapping[str, Any]) -> str:
    """The lane of a failure and the GPU's name, as text."""
    lane = str(found.get("lane"))
    name = found.get("device_name") if lane == "cuda" else None
    return f"{_LANES.get(lane, lane)}{f' ({name})' if name else ''}"


def _named(key: str, value: Any) -> str:
    if key == "device_name":
        return str(value or "another GPU")
    return f"{key} {value}" if value else f"no {key}"


def file_name(replay: Replay) -> str:
    """A name that is equal for equal failures of one test, so that repeated runs overwrite it."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", replay.nodeid.rpartition("/")[2]).strip("-")[:80]
    known = {key: value for key, value in replay.as_json().items() if key != "made"}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]
    return f"{stem}-{digest}.json"


def write(replay: Replay, root: Path) -> Path:
    """Write the file atomically under ``root/.fusion/failures``; raises ``OSError``."""
    path = folder(root) / file_name(replay)
    replace_whole(path, text(replay))
    return path


def text(replay: Replay) -> bytes:
    """What its file holds."""
    return (json.dumps(replay.as_json(), indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def folder(root: Path) -> Path:
    """``root/.fusion/failures``, made if missing, and hidden from git; raises ``OSError``."""
    made = root / FOLDER
    made.mkdir(parents=True, exist_ok=True)
    ignore = made / ".gitignore"
    if not ignore.exists():
        ignore.write_text("# Failing cases of this machine's runs; copy one elsewhere to keep it.\n*\n")
    return made


def read(path: Path) -> Replay:
    """The replay in a file; imports drawn functions and enums of its case. Raises ``ReplayError`` with the fault."""
    data = _load(path)
    made = data.get("made")
    try:
        case = Case.from_json(data["case"])
    except ReplayError as error:
        raise ReplayError(f"the replay file {path}: {error}") from None
    return Replay(
        data["nodeid"], data["spec"], data["check"], data["cause"], case, made if isinstance(made, dict) else {}
    )


def names(path: Path) -> tuple[str, str]:
    """Node id and spec of the file's test. Raises ``ReplayError``; imports nothing that the case names."""
    data = _load(path)
    return str(data["nodeid"]), str(data["spec"])


def owner(path: Path) -> str:
    """The node id of the file's test. Raises ``ReplayError``; imports nothing that the case names."""
    return names(path)[0]


def lane_of(path: Path) -> str | None:
    """The lane of the failure, ``"cuda"`` or ``"cpu-interpreter"``, if the file names it. Raises as ``owner``."""
    made = _load(path).get("made")
    return str(made["lane"]) if isinstance(made, dict) and made.get("lane") else None


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReplayError(f"cannot read the replay file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ReplayError(f"the replay file {path} is not JSON ({error}); was it cut off?") from None
    if not isinstance(data, dict) or data.get("tool") != _TOOL:
        raise ReplayError(f"{path} is not a replay file of {_TOOL}; those are in {FOLDER}/")
    if data.get("schema") != SCHEMA:
        raise ReplayError(f"{path} has schema {data.get('schema')!r}, this version reads {SCHEMA}")
    for key in ("nodeid", "spec", "check", "cause", "case"):
        if key not in data:
            raise ReplayError(f"the replay file {path} has no {key!r}; was it edited?")
    return data
