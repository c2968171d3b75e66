"""`Incumbent`: the incumbent of a run, by its name; found once, opened for each test, and closed at the end.

A revision gets a new folder: a repository of its own that borrows the other's objects. ``git archive`` leaves out
``export-ignore`` files, often tests, and ``git worktree`` writes to ``.git``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pytest_fusion.errors import CanaryError, SpecError
from pytest_fusion.spec.wording import did_you_mean

if TYPE_CHECKING:
    from pytest_fusion.canary.offline.incumbent.incumbent_process import Opponent, Process
    from pytest_fusion.checks.context import Context
    from pytest_fusion.spec.fusion_spec import FusionSpec

_LINK, _SUBMODULE = "120000", "160000"
_POINTER = b"version https://git-lfs.github.com/spec/"
# Overrides the revision's attributes: every file as it is stored.
_AS_STORED = "* -text -eol -filter -ident -working-tree-encoding\n"
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


def resolve(called: str, start: Path) -> Revision:
    """The commit that ``called`` names in the repository of the folder ``start``. Raises ``CanaryError``."""
    found = _git(start, "rev-parse", "--show-toplevel")
    if found.returncode:
        raise CanaryError(
            f"the incumbent git:{called}: {start} is not in a git work tree ({_stderr(found)}); run this in one, "
            "or name the incumbent as python:/path/to/python or module:function"
        )
    top = Path(os.fsdecode(found.stdout).rstrip("\n"))
    # A name with a leading dash would be an option; every maintained version of git has --end-of-options.
    commit = _git(start, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{called}^{{commit}}")
    if commit.returncode:
        names = _git(start, "for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/tags", "refs/remotes")
        near = did_you_mean(called, names.stdout.decode(errors="replace").split())
        hint = near if "did you mean" in near else "; a shallow clone may lack it: git fetch --unshallow"
        raise CanaryError(f"the incumbent git:{called}: the repository {top} does not have that commit{hint}")
    return Revision(commit.stdout.decode().strip(), called, top)


def check_out(revision: Revision, folder: Path) -> tuple[str, ...]:
    """Writes the revision's files to the empty ``folder``, and returns a sentence for each kind of missing file.
    Ignores filters and line endings of ``.gitattributes``. Raises ``CanaryError`` for a missing object, ``OSError``."""
    own = folder / ".git"
    form = _text(revision, revision.top, "rev-parse", "--show-object-format")
    _text(revision, folder, "init", "--quiet", "--template=", f"--object-format={form}")
    objects = _text(revision, revision.top, "rev-parse", "--path-format=absolute", "--git-path", "objects")
    (own / "objects" / "info" / "alternates").write_text(f"{objects}\n")
    (own / "info").mkdir(exist_ok=True)
    (own / "info" / "attributes").write_text(_AS_STORED)
    _text(revision, folder, "read-tree", "--reset", "-u", revision.sha)
    listed = _text(revision, folder, "ls-files", "--stage", "-z").split("\0")
    entries = [(about.split()[0], path) for about, _, path in (line.partition("\t") for line in listed if line)]
    files = [path for mode, path in entries if mode not in (_LINK, _SUBMODULE)]
    left = {
        "submodules of the revision are empty folders": [path for mode, path in entries if mode == _SUBMODULE],
        "files of the revision are Git LFS pointers, not their contents": [
            path for path in files if (folder / path).read_bytes().startswith(_POINTER)
        ],
    }
    return tuple(f"{what}: {_listed(names)}" for what, names in left.items() if names)


def _text(revision: Revision, folder: Path, *words: str) -> str:
    """The output of a git command. Raises ``CanaryError`` if it fails."""
    found = _git(folder, *words)
    if found.returncode:
        raise CanaryError(
            f"the incumbent {revision}: git {words[0]} failed ({_stderr(found)}); in a partial clone, check the "
            "revision out once so that git fetches its objects"
        )
    return os.fsdecode(found.stdout).rstrip("\n")


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, **_ENVIRONMENT}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)  # a hook's are those of another repository
    command = ["git", "--no-pager", "-C", os.fspath(folder), *words]
    try:
        return subprocess.run(command, env=environment, capture_output=True, check=False)
    except OSError as error:
        raise CanaryError(f"an incumbent that is a git revision needs git, which cannot be run: {error}") from None


def _stderr(found: subprocess.CompletedProcess[bytes]) -> str:
    return found.stderr.decode(errors="replace").strip().partition("\n")[0]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


Kind = Literal["revision", "python", "function"]

_FORMS = "git:REVISION (or a bare revision), python:/path/to/python, or module:function"
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class IncumbentName:
    """A parsed name: ``target`` is the revision, the interpreter's absolute path, or ``module:function``."""

    kind: Kind
    target: str

    def __str__(self) -> str:
        prefix = {"revision": "git:", "python": "python:", "function": ""}[self.kind]
        return f"{prefix}{self.target}"


def parse(text: str, start: Path) -> IncumbentName:
    """Parses a name, with paths relative to ``start``. Raises ``CanaryError`` for an invalid one."""
    text = text.strip()
    prefix, colon, rest = text.partition(":")
    if not text or (colon and not rest):
        raise CanaryError(f"the incumbent {text!r} has no name; expected {_FORMS}")
    if prefix == "git" and colon:
        return IncumbentName("revision", rest)
    if prefix == "python" and colon:
        return IncumbentName("python", _interpreter(rest, start))
    if not colon:
        if os.sep in text and os.access(start / Path(text).expanduser(), os.X_OK):
            raise CanaryError(f"the incumbent {text!r} is a program; for an environment's interpreter: python:{text}")
        return IncumbentName("revision", text)
    if _FUNCTION.fullmatch(text):
        return IncumbentName("function", text)
    hint = did_you_mean(prefix, ("git", "python"))
    raise CanaryError(f"the incumbent {text!r} cannot be read; expected {_FORMS}{hint if '?' in hint else ''}")


def _interpreter(text: str, start: Path) -> str:
    # Not resolved: the link in an environment's bin points to the interpreter without the environment.
    path = start.absolute() / Path(text).expanduser()
    if path.is_dir():
        inside = path / "bin" / "python"
        hint = f"; did you mean python:{inside}?" if inside.exists() else "; name the interpreter in it"
        raise CanaryError(f"the incumbent python:{text} is a folder{hint}")
    if not os.access(path, os.X_OK):
        raise CanaryError(f"the incumbent python:{text}: there is no program {path}; name an environment's bin/python")
    return str(path)


# Times the limit of a call: configs, gradients and invariance make more calls per case.
_PATIENCE = 3.0
# For a kernel that is compiled for a GPU.
_COMPILING_S = 300.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How the incumbent's process runs the project; with ``spec`` it serves specs by name instead of tests."""

    root: Path
    start: Path
    device: str
    files: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    inifile: Path | None = None
    spec: bool = False


class Incumbent:
    """The incumbent of a run. ``without`` are metrics to leave out; ``recording`` is a file of recorded traffic."""

    def __init__(
        self, named: IncumbentName, setting: Setting, *, without: Sequence[str] = (), recording: Path | None = None
    ) -> None:
        self.named, self.setting = named, setting
        self.without, self.recording = tuple(without), recording
        self._function: Any = None
        self._revision: Revision | None = None
        self._process: Process | None = None
        self._opened: dict[str, Any] = {}
        # Whether a test is open, and whether the process knows its test files.
        self._is_open = self._has_files = False
        self.notes: tuple[str, ...] = ()
        if named.kind == "revision":
            self._revision = resolve(named.target, setting.start)
            top = Path(os.path.realpath(self._revision.top))
            for path in (setting.root, setting.start):
                if not Path(os.path.realpath(path)).is_relative_to(top):
                    raise CanaryError(
                        f"the incumbent {named} is a revision of {top}, and {path} is outside of it; run this inside"
                    )

    @property
    def about(self) -> dict[str, Any]:
        """A description of the incumbent for reports."""
        found: dict[str, Any] = {"text": str(self.named), "kind": self.named.kind}
        if self._revision is not None:
            found["commit"] = self._revision.sha
        return found

    @property
    def elsewhere(self) -> bool:
        """Whether it runs in its own process."""
        return self.named.kind != "function"

    def find(self) -> None:
        """Imports the incumbent if it is a function. Raises ``CanaryError``."""
        if self.named.kind == "function" and self._function is None:
            from pytest_fusion.spec.importable import named_kernel

            folders = (os.fspath(self.setting.start), os.fspath(self.setting.root))
            self._function = named_kernel(self.named.target, folders=folders)

    def begin(self) -> None:
        """Starts the process, which imports torch while this one collects its tests. Raises ``CanaryError``."""
        if self.elsewhere:
            self._running()

    def open(self, nodeid: str, spec: FusionSpec, context: Context, seconds: float) -> Opponent:
        """Opens the incumbent of one test. Raises ``NoOpponentError`` if there is none, ``CanaryError`` if it fails."""
        from pytest_fusion.canary.offline.incumbent.incumbent_process import NoOpponentError, Remote
        from pytest_fusion.canary.offline.kernel import contract, kernel_beside

        if not self.elsewhere:
            self.find()
            try:
                return kernel_beside(spec, context, self._function)
            except SpecError as error:
                raise NoOpponentError(f"{self.named} does not take the inputs of this test: {error}") from None
        facts = {"programs": context.programs, "deep": context.deep}
        self._opened = {"nodeid": nodeid, "contract": contract(spec), **facts}
        process = self._running()
        self._request_open(process)
        least = 0.0 if context.device.type == "cpu" else _COMPILING_S
        return Remote(process, context.device, max(_PATIENCE * seconds, least))

    def reopen(self) -> None:
        """Restarts the process and opens the same test again."""
        if not self.elsewhere:
            return
        if self._process is not None:
            self._process.stop()
        self._request_open(self._running())

    def close(self) -> list[str]:
        """Closes the open test and returns notes on it. ``CanaryError`` if it imported files of the work tree."""
        from pytest_fusion.run.process.worker import WorkerLost

        process = self._process
        if process is None or not self._is_open:
            return []
        self._is_open = False
        try:
            answer = process.request("close", seconds=60.0)
        except WorkerLost:
            process.stop()
            return []
        foreign = answer.get("foreign", [])
        if foreign:
            raise CanaryError(
                f"the incumbent imported {len(foreign)} file(s) of the work tree, as {foreign[0]}, so it is not "
                f"{self.named} alone: install the package from the revision into another environment, and compare "
                "with python:/path/to/its/python"
            )
        return [*self.notes, *_shared_files(answer.get("shared", []), self.setting)]

    def let_go(self) -> None:
        """Stops the process if a test ended in the middle of a request."""
        if self._is_open and self._process is not None:
            self._process.stop()
        self._is_open = False

    def end(self) -> None:
        """Removes the process and its folder."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _running(self) -> Process:
        from pytest_fusion.canary.offline.incumbent.incumbent_process import Process

        if self._process is None:
            self._process = Process(Path(tempfile.mkdtemp(prefix="pytest-fusion-incumbent-")))
            try:
                if self._revision is not None:
                    checkout = self._checkout()
                    checkout.mkdir()
                    self.notes = check_out(self._revision, checkout)
            except BaseException:
                self.end()
                raise
        if not self._process.running:
            foreign = self.named.kind == "python"
            python = self.named.target if foreign else sys.executable
            start = self._there(self.setting.start)
            start = start if start.is_dir() else self._there(self._top())
            self._process.start(python, self._settings(), start=start, foreign=foreign)
            self._has_files = self.setting.spec
        return self._process

    def _request_open(self, process: Process) -> None:
        from pytest_fusion.canary.offline.incumbent.incumbent_process import START_S
        from pytest_fusion.run.process.worker import WorkerLost

        self._is_open = False
        try:
            if not self._has_files:
                process.request("collect", seconds=START_S, files=self._files())
                self._has_files = True
            process.request("open", seconds=START_S, **self._opened)
            self._is_open = True
        except WorkerLost as lost:
            words = process.last_output()
            process.stop()
            raise CanaryError(
                f"the incumbent {self.named} could not be started ({lost}); its last output:\n{words}"
            ) from None

    def _settings(self) -> dict[str, Any]:
        setting, checkout = self.setting, self._revision is not None
        words = [*setting.arguments, f"--rootdir={self._there(setting.root)}"]
        if setting.inifile is not None:
            there = self._there(setting.inifile)
            words += ["-c", os.fspath(there)] if there.is_file() else []
        return {
            "spec": setting.spec,
            "device": setting.device,
            "asker": os.getpid(),
            "top": os.path.realpath(self._top()),
            "checkout": os.path.realpath(self._checkout()) if checkout else "",
            "arguments": words,
        }

    def _files(self) -> list[str]:
        root = self._there(self.setting.root)
        return [os.fspath(root / file) for file in self.setting.files if (root / file).exists()]

    def _top(self) -> Path:
        return self._revision.top if self._revision is not None else self.setting.root

    def _checkout(self) -> Path:
        assert self._process is not None
        return self._process.folder / "tree"

    def _there(self, path: Path) -> Path:
        """A path of the project in the incumbent's checkout."""
        if self._revision is None:
            return path
        return self._checkout() / Path(os.path.realpath(path)).relative_to(os.path.realpath(self._revision.top))


def _shared_files(files: Sequence[str], setting: Setting) -> list[str]:
    """A note if the incumbent's environment imports files of the work tree besides tests: they are not compared."""
    tests = {os.path.realpath(setting.root / file) for file in setting.files}
    rest = [file for file in files if file not in tests and Path(file).name != "conftest.py"]
    if not rest:
        return []
    return [f"the incumbent's environment imports {len(rest)} file(s) of this project, as {rest[0]}: same in both"]
