"""Where reports go: refused before the run when they cannot be written, replaced whole after it."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_fusion.errors import FusionError
from pytest_fusion.run.process.atomic_file import replace_whole, try_writing


def check_writable(path: str | os.PathLike[str], option: str) -> Path:
    """The absolute path behind ``path``, its folder made, after a trial write in that folder.

    ``option`` (``"--fusion-json"``) is who asked. Raises :class:`FusionError` now, since a run of an hour must not
    end in "permission denied".
    """
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
    """Write ``text`` as UTF-8 so that a reader sees the old file or the new one, never a part.

    The new file is written beside the old one, synced and renamed over it; a symbolic link is followed. A device or
    pipe (``/dev/stdout``) is written to instead, since a rename would replace the device itself. Raises
    :class:`FusionError`.
    """
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
