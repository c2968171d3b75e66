"""The files of reports: refused before the run if they cannot be written, replaced as a whole after it."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_fusion.errors import FusionError
from pytest_fusion.run.process.atomic_file import replace_whole, try_writing


def check_writable(path: str | os.PathLike[str], option: str) -> Path:
    """The absolute ``path`` of ``option`` (``"--fusion-json"``), after a trial write in its folder, which is made.
    Raises :class:`FusionError` now: a run of an hour must not end in "permission denied"."""
    text = os.fspath(path)
    if not text.strip():
        raise FusionError(f"{option} was given an empty path; name a file, for example {option} fusion.out")
    target = Path(os.path.realpath(Path(text).expanduser()))
    if target.is_dir():
        example = "fusion.json" if "json" in option else "fusion.html"
        raise FusionError(f"{option} {text}: that is a folder, and a file is needed; try {option} {target / example}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if _is_special(target):
            with target.open("ab"):
                return target
        try_writing(target.parent)
    except OSError as error:
        raise FusionError(
            f"{option} {text}: cannot write in {target.parent} ({error.strerror or error}); "
            f"make that folder writable or give {option} a path elsewhere"
        ) from None
    return target


def replace_text(path: Path, text: str) -> None:
    """Writes ``text`` as UTF-8 so that a reader sees the old file or the new one, through symbolic links. A device or
    pipe (``/dev/stdout``) is written to: a rename would replace the device. Raises :class:`FusionError`."""
    data = text.encode("utf-8")
    path = Path(os.path.realpath(path))
    try:
        if _is_special(path):
            path.write_bytes(data)
        else:
            replace_whole(path, data)
    except OSError as error:
        raise FusionError(
            f"cannot write the report {path} ({error.strerror or error}); what stood there is unchanged. "
            "Free some space or make the folder writable, then run again"
        ) from error


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
