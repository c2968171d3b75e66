"""Runs of pytest and of the command line in a fork of this process, which has torch and the package imported by this.

A process of its own costs 3 s of imports, a fork some 50 ms. It inherits what this process imported and learnt; where
the start of a process is the fact under test, `runpytest_subprocess` stays.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

import pytest
import torch._dynamo  # pytester undoes the imports of a run in this process, and torch allows one only
from _pytest.pathlib import make_numbered_dir

import pytest_fusion

# As for torch: a module that is imported twice has two of every class.
for _module in pkgutil.walk_packages(pytest_fusion.__path__, "pytest_fusion."):
    if _module.name != "pytest_fusion.interpreter.session":  # importing it switches Triton's interpreter on
        importlib.import_module(_module.name)


def run_pytest(pytester: pytest.Pytester, *options: str | Path) -> pytest.RunResult:
    """As `pytester.runpytest_subprocess`."""
    base = make_numbered_dir(root=pytester.path, prefix="runpytest-", mode=0o700)
    words = [f"--basetemp={base}", *map(str, options)]
    if _compiles():
        return pytester.run(sys.executable, "-m", "pytest", *words)
    return run(lambda: pytest.main(words), ["pytest", *words])


def run_command(pytester: pytest.Pytester, *words: str | Path) -> pytest.RunResult:
    """As `pytester.run(sys.executable, "-m", "pytest_fusion.plugin.cli", ...)`."""
    argv = ["pytest-fusion", *map(str, words)]
    if _compiles():
        return pytester.run(sys.executable, "-m", "pytest_fusion.plugin.cli", *argv[1:])
    return run(lambda: pytest_fusion.plugin.cli.main(argv[1:]), argv)


def _compiles() -> bool:
    """Whether this process may have Triton imported to compile for a GPU: its forks cannot interpret kernels then."""
    return torch.cuda.device_count() > 0 and os.environ.get("TRITON_INTERPRET") != "1"


def run(work: Callable[[], int | None], argv: list[str]) -> pytest.RunResult:
    """What ``work`` printed in a fork of this process, and the exit status that it returned or left with."""
    began = time.perf_counter()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads, from Python 3.12 on
            pid = os.fork()
        if pid == 0:
            _live(work, argv, out, err)
        try:
            _, status = os.waitpid(pid, 0)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise
        code = os.waitstatus_to_exitcode(status)
        ret = pytest.ExitCode(code) if code in set(pytest.ExitCode) else code
        return pytest.RunResult(ret, _lines(out), _lines(err), time.perf_counter() - began)


def _nothing() -> None:
    pass


def _live(work: Callable[[], int | None], argv: list[str], out: IO[bytes], err: IO[bytes]) -> NoReturn:
    code = 70
    try:
        nowhere = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nowhere, 0), (out.fileno(), 1), (err.fileno(), 2)):
            os.dup2(source, target)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as this process lives
        sys.stdout, sys.stderr = (open(fd, "w", closefd=False, buffering=1) for fd in (1, 2))  # noqa: SIM115
        sys.argv[:] = argv
        sys.path.insert(0, str(Path.cwd()))
        # What the test's own run made of warnings is not this one's; Python's default is.
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        gc.freeze()
        torch.set_num_threads(1)  # its other threads are not in this process
        # Nor is the one that ends a test by faulthandler_timeout: stopping it would wait for ever.
        faulthandler.cancel_dump_traceback_later = _nothing
        code = int(work() or 0)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - this process must not return into the test's own run
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode("utf-8", "replace").splitlines()
