"""A file replaced as a whole: a reader sees the old one or the new one, also where the writer is killed."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

PART = ".fusion-"


def part_of(path: Path) -> Path:
    """A name beside ``path`` that nobody else writes to; what a killed process left is ``.fusion-*.tmp``."""
    return path.with_name(f"{PART}{secrets.token_hex(6)}.tmp")


def replace_whole(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path``, sync it, and rename it over; an old file's mode is kept. Raises ``OSError``."""
    part = part_of(path)
    try:
        # "x" gives the user's umask; tempfile would leave 0600, which a CI artefact step of another user cannot read.
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            part.chmod(stat.S_IMODE(path.stat().st_mode))
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
