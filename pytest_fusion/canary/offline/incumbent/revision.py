"""`check_out`: writes the files of a git revision to a new folder, without writing to the repository.

Neither ``git archive`` (it leaves out what ``export-ignore`` names, often tests) nor ``git worktree`` (it writes to
``.git``) does this: the tree is listed, and its blobs are written as they are stored.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.wording import did_you_mean

_LINK, _SUBMODULE = "120000", "160000"
_POINTER = b"version https://git-lfs.github.com/spec/"
_SHOWN = 3
# Refreshing the index or fetching a missing object would write into .git.
_ENVIRONMENT = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit: its full hash, the name it was given by, and the top folder of its work tree."""

    sha: str
    called: str
    top: Path

    def __str__(self) -> str:
        return self.sha[:12] if self.sha.startswith(self.called) else f"{self.called} ({self.sha[:12]})"


class _Entry(NamedTuple):
    mode: str
    blob: str
    path: str


def resolve(called: str, start: Path) -> Revision:
    """The commit that ``called`` names in the repository of the folder ``start``.

    Raises ``CanaryError`` where there is no git, no repository or no such commit.
    """
    found = _git(start, "rev-parse", "--show-toplevel")
    if found.returncode:
        raise CanaryError(
            f"the incumbent git:{called}: {start} is not in a git work tree ({_stderr(found)}); run this in one, "
            "or name the incumbent as python:/path/to/python or module:function"
        )
    top = Path(os.fsdecode(found.stdout).rstrip("\n"))
    # A name that begins with a dash would be an option; every maintained version of git has --end-of-options.
    commit = _git(start, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{called}^{{commit}}")
    if commit.returncode:
        names = _git(start, "for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/tags", "refs/remotes")
        near = did_you_mean(called, names.stdout.decode(errors="replace").split())
        hint = near if "did you mean" in near else "; a shallow clone may lack it: git fetch --unshallow"
        raise CanaryError(f"the incumbent git:{called}: the repository {top} does not have that commit{hint}")
    return Revision(commit.stdout.decode().strip(), called, top)


def check_out(revision: Revision, folder: Path) -> tuple[str, ...]:
    """Writes the revision's files to the empty ``folder``, and returns a sentence for each kind of missing file.

    Filters and line endings of ``.gitattributes`` are not applied. Raises ``CanaryError`` where an object is missing,
    ``OSError`` where the folder cannot be written.
    """
    submodules: list[str] = []
    pointers: list[str] = []
    files = []
    for entry in _tree(revision):
        if entry.mode == _SUBMODULE:
            submodules.append(entry.path)
            (folder / entry.path).mkdir(parents=True, exist_ok=True)
        else:
            files.append(entry)
    for entry, data in _blobs(revision, files):
        _write(folder, entry, data)
        if data.startswith(_POINTER):
            pointers.append(entry.path)
    left = {
        "submodules of the revision are empty folders": submodules,
        "files of the revision are Git LFS pointers, not their contents": pointers,
    }
    return tuple(f"{what}: {_listed(names)}" for what, names in left.items() if names)


def _tree(revision: Revision) -> Iterator[_Entry]:
    found = _git(revision.top, "ls-tree", "-r", "-z", "--full-tree", revision.sha)
    if found.returncode:
        raise CanaryError(f"the incumbent {revision}: its tree cannot be read ({_stderr(found)})")
    for line in filter(None, found.stdout.split(b"\0")):
        about, _, path = line.partition(b"\t")
        mode, _, blob = about.decode().split()[:3]
        yield _Entry(mode, blob, os.fsdecode(path))


def _blobs(revision: Revision, files: list[_Entry]) -> Iterator[tuple[_Entry, bytes]]:
    blobs = b"".join(entry.blob.encode() + b"\n" for entry in files)
    found = _git(revision.top, "cat-file", "--batch", feed=blobs)
    data, at = found.stdout, 0
    for entry in files:
        end = data.find(b"\n", at)
        words = data[at:end].split() if end >= 0 else []
        if len(words) != 3:
            raise CanaryError(
                f"the incumbent {revision}: the object of {entry.path} is not here ({_stderr(found) or 'missing'}); "
                "in a partial clone, check the revision out once so that git fetches it"
            )
        size = int(words[2])
        yield entry, data[end + 1 : end + 1 + size]
        at = end + 1 + size + 1


def _write(folder: Path, entry: _Entry, data: bytes) -> None:
    path = folder / entry.path
    path.parent.mkdir(parents=True, exist_ok=True)
    if entry.mode == _LINK:
        path.symlink_to(os.fsdecode(data))
        return
    path.write_bytes(data)
    if entry.mode == "100755":
        path.chmod(0o755)


def _git(folder: Path, *words: str, feed: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, **_ENVIRONMENT}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)  # a hook's are those of another repository
    try:
        return subprocess.run(
            ["git", "--no-pager", "-C", os.fspath(folder), *words],
            env=environment,
            input=feed,
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise CanaryError(f"an incumbent that is a git revision needs git, which cannot be run: {error}") from None


def _stderr(found: subprocess.CompletedProcess[bytes]) -> str:
    return found.stderr.decode(errors="replace").strip().partition("\n")[0]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
