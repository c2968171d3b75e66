"""Runs one test once more, in a process of its own under one of NVIDIA's tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_fusion.run.process.supervisor import kill_group, last_line

# Report files in a project's settings belong to the outer run.
_FILES = ("fusion-json", "fusion-report", "junit-xml")
_TOOLKITS = ("/usr/local/cuda", "/opt/cuda")


@dataclass(frozen=True, slots=True)
class Again:
    """A test as a command line names it in the folder ``start``, and the device of its kernels."""

    test: str
    start: Path
    device: str

    def program(self, folder: Path) -> list[str]:
        """The command that runs the test in one process and writes its reports into ``folder``."""
        program = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider"]
        program += [f"--fusion-device={self.device}", "--fusion-isolate=off", "--fusion-update=none"]
        program += [f"--{name}={folder}/{name}" for name in _FILES]
        return [*program, self.test]


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit status of a process and its output on both streams."""

    code: int
    output: str

    @property
    def last_line(self) -> str:
        """The last non-empty line, cut at 200 characters."""
        return (last_line(self.output) or "no output")[:200]


def installed(name: str, below: Sequence[str], environment: Mapping[str, str], more: Sequence[Path] = ()) -> str | None:
    """The path of a tool: on PATH, ``below`` a CUDA toolkit, or one of ``more``; ``None`` if there is none."""
    if (found := shutil.which(name, path=environment.get("PATH"))) is not None:
        return found
    homes = [*filter(None, map(environment.get, ("CUDA_HOME", "CUDA_PATH"))), *_TOOLKITS]
    paths = [*(Path(home) / place for home in homes for place in below), *more]
    return next((str(path) for path in paths if path.is_file() and os.access(path, os.X_OK)), None)


def environment(**more: str) -> dict[str, str]:
    """This process's environment without the variables of pytest and pytest-xdist, and ``more``."""
    usual = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST_")}
    for name in ("PYTEST_CURRENT_TEST", "GITHUB_STEP_SUMMARY"):
        usual.pop(name, None)
    return {**usual, **more}


def ended(command: Sequence[str], *, start: Path, env: Mapping[str, str], seconds: float) -> Ended:
    """The end of ``command``, run in the folder ``start``. Raises ``OSError`` if it cannot start, ``TimeoutExpired``
    after ``seconds``, killing all that it started: a hanging kernel would occupy the GPU."""
    process = subprocess.Popen(
        command,
        cwd=start,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except BaseException:
        kill_group(process.pid)
        process.communicate()
        raise
    return Ended(process.returncode, f"{stdout}\n{stderr}")
