"""Replaces a file as a whole: readers see the old or the new one, even if the writer is killed."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

_PART = ".fusion-"
# Left by killed processes.
PARTS = f"{_PART}*.tmp"


def try_writing(folder: Path) -> None:
    """Make a file there and remove it. Raises ``OSError``."""
    probe = _part(folder)
    with probe.open("xb"):
        pass
    probe.unlink()


def replace_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace ``path`` by ``data``, synced; keeps an old mode, else ``mode`` less the umask. Raises ``OSError``."""
    part = _part(path.parent)
    try:
        # tempfile would leave 0600, which a CI artefact step of another user cannot read.
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            part.chmod(stat.S_IMODE(path.stat().st_mode))
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _part(folder: Path) -> Path:
    """A name that no other process writes to."""
    return folder / f"{_PART}{secrets.token_hex(6)}.tmp"
