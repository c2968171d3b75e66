"""The folder of baselines: one file for each test and device class, read and replaced as a whole, and listed."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from pytest_fusion.bench.baseline.codec import Baseline, decode, encode
from pytest_fusion.errors import BaselineError
from pytest_fusion.run.process.atomic_file import PARTS, replace_whole

FOLDER = Path(".fusion") / "baselines"
# Seconds. A run writes for milliseconds; a lock that is held for longer is stuck.
PATIENCE = 30.0
_LOCK = ".lock"
_IGNORE = (
    f"# The lock of runs that write here, and what a killed one left; the baselines are to be committed.\n/{_LOCK}\n"
)
_IGNORE += f"/{PARTS}\n"
# File systems allow 255 bytes; people do not read names of that length.
_LONGEST = 80


def path_of(folder: Path, test: str, device: str) -> Path:
    """The file of a test and a device class; a digest separates names that are equal once shortened or without case."""
    file, _, name = test.partition("::")
    stem = f"{_slug(Path(file).stem)}.{_slug(name)}"[:_LONGEST].strip("-.")
    digest = hashlib.sha256(f"{test}\0{device}".encode("utf-8", "backslashreplace")).hexdigest()[:10]
    return folder / f"{stem}.{_slug(device)[:40].strip('-.')}.{digest}.json"


def load(folder: Path, test: str, device: str) -> Baseline | None:
    """The baseline of a test, ``None`` where there is none. Raises ``BaselineError``."""
    path = path_of(folder, test, device)
    if not _is_there(folder) or not os.path.lexists(path):
        return None
    found = read(path)
    if (found.test, found.device) != (test, device):
        raise BaselineError(
            f"{path} holds the baseline of {found.test} on {found.device}, and its name that of {test} on {device}; "
            "a copied or renamed file is no baseline: delete it and make one with --fusion-update new"
        )
    return found


def read(path: Path) -> Baseline:
    """The baseline of a file. Raises ``BaselineError`` with the file, what is wrong with it and what to do."""
    try:
        if path.is_dir():
            raise BaselineError(f"{path} is a folder where a baseline file should be; move it away")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BaselineError(
            f"cannot read the baseline {path} ({error.strerror or error}); make it readable, or restore it"
        ) from None
    except UnicodeDecodeError:
        raise BaselineError(
            f"{path} is not text, so it is no baseline of pytest-fusion; restore it from version control, or delete it"
        ) from None
    return decode(text, path)


def find(folder: Path) -> list[Path]:
    """All files that look like baselines, sorted. Raises ``BaselineError`` if ``folder`` is a file."""
    return sorted(path for path in folder.glob("*.json") if path.is_file()) if _is_there(folder) else []


@contextmanager
def locked(folder: Path, patience: float = PATIENCE) -> Iterator[list[Path]]:
    """Locks the folder and removes half-written files of killed runs; yields a new ``.gitignore``. Raises
    ``BaselineError`` if the folder is not writable or another process holds the lock for ``patience`` seconds."""
    from filelock import FileLock, Timeout

    made = _prepare(folder)
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        raise BaselineError(
            f"another run has been writing to {folder} for {patience:.0f} s; wait for it, or end it if it hangs "
            "(the lock ends with its process)"
        ) from None
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        for left in folder.glob(PARTS):
            left.unlink(missing_ok=True)
        yield made
    finally:
        lock.release()


def write(folder: Path, baselines: Sequence[Baseline]) -> list[Path]:
    """Replaces the changed files of these baselines, inside of :func:`locked`, and returns their paths. All targets are
    checked before the first is replaced, each as a whole. Raises ``BaselineError`` with the paths written so far."""
    targets = [(_target(path_of(folder, one.test, one.device)), encode(one).encode()) for one in baselines]
    written: list[Path] = []
    for path, data in targets:
        try:
            if path.exists() and path.read_bytes() == data:
                continue
            replace_whole(path, data)
        except OSError as error:
            raise _unwritable(path, error, written) from None
        written.append(path)
    if written:
        _sync(folder)
    return written


def _target(path: Path) -> Path:
    """The file to replace, behind symbolic links. Raises ``BaselineError`` if it must not be replaced."""
    real = Path(os.path.realpath(path))
    if real.is_dir():
        raise BaselineError(f"{path} is a folder where a baseline file should be; move it away")
    # Renaming over a file needs no permission on it, and root has every permission: only the mode protects it.
    if real.exists() and (not os.access(real, os.W_OK) or not stat.S_IMODE(real.stat().st_mode) & 0o222):
        raise BaselineError(f"{path} is read-only, so it was left as it is; to let it be updated: chmod u+w {path}")
    return real


def _sync(folder: Path) -> None:
    """Syncs the folder, which puts a rename on disk. Where that fails there is still the old file or the new."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _prepare(folder: Path) -> list[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ignore = folder / ".gitignore"
        try:
            with ignore.open("x", encoding="utf-8") as file:
                file.write(_IGNORE)
        except FileExistsError:
            return []
    except OSError as error:
        raise _unwritable(folder, error) from None
    return [ignore]


def _is_there(folder: Path) -> bool:
    if folder.exists() and not folder.is_dir():
        raise BaselineError(f"{folder} is a file, and baselines need a folder; name another with --fusion-baseline DIR")
    return folder.is_dir()


def _unwritable(path: Path, error: OSError, written: Sequence[Path] = ()) -> BaselineError:
    done = f" Written before it: {', '.join(map(str, written))}" if written else ""
    return BaselineError(
        f"cannot write {path} ({error.strerror or error}); what stood there is unchanged. "
        f"Make it writable, free some space, or name another folder with --fusion-baseline DIR.{done}"
    )


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")


def listed(folder: Path, now: datetime) -> list[str]:
    """A line per file: test, device class, cases, age, file; or its error. Raises ``BaselineError`` without files."""
    paths = find(folder)
    if not paths:
        raise BaselineError(f"{folder} has no baselines; make them with: pytest --fusion-bench --fusion-update new")
    table = [("test", "device", "cases", "age", "file")]
    broken = []
    for path in paths:
        try:
            found = read(path)
        except BaselineError as error:
            broken.append(str(error))
            continue
        cases = {key.case for key in found.rows}
        table.append((found.test, found.device, str(len(cases)), _age(found, now), path.name))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [*("  ".join(map(str.ljust, row, widths)).rstrip() for row in table), *broken]


def _age(found: Baseline, now: datetime) -> str:
    """The age of the newest row in days; a file that was written by hand has none."""
    times = []
    for row in found.rows.values():
        try:
            made = datetime.fromisoformat(row.made)
        except ValueError:
            continue
        times.append(made if made.tzinfo else made.replace(tzinfo=UTC))
    if not times:
        return "of unknown age"
    days = max(0, (now - max(times)).days)
    return "today" if days == 0 else f"{days} d"
