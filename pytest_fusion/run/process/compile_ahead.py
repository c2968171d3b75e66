"""Workers that compile a test's kernels ahead of it, in forked children.

They take the launches of the covering phase and of the search's first half. A row-wise kernel has some hundred
specialisations (block size, dtype, divisibility of sizes, strides, addresses), at 0.1-0.3 s each. Triton's disk cache
is shared and written atomically. All workers of all tests together have the machine's cores.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from pytest_fusion.interpreter.scoped import replaced
from pytest_fusion.run.process.shared_cases import Shared, Uncompiled

# Each worker starts a CUDA context: about half a second and half a gigabyte of device memory. Two for each core that
# tests leave: a test that compiles nothing leaves its own to others.
_MOST_WORKERS, _TIMES = 12, 2
# Seconds between two looks, and that another process may take to fetch a kernel from the cache.
_PAUSE_S, _FETCH_S, _NUMBER = 0.01, 0.1, 8
_FEW_ENTRIES = 8
# Tests go before cache filling: several runs side by side had 28 processes at work on 16 cores.
_NICE = 10


def cache_is_empty() -> bool:
    """Whether Triton's disk cache is nearly empty, so that waiting for the first miss only loses time."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return len(list(itertools.islice(folder.glob("*"), _FEW_ENTRIES))) < _FEW_ENTRIES


def workers() -> int:
    """How many processes may compile beside the test; 0 where the tests themselves take every core."""
    share = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(0, min(_MOST_WORKERS, _TIMES * (len(os.sched_getaffinity(0)) - share) // share))


def _folder() -> Path:
    """Where the locks of all runs of this user are."""
    folder = Path(tempfile.gettempdir()) / f"pytest-fusion-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def _opened(name: str) -> int:
    """The descriptor of a file of locks: closing any other of the same file would release them all."""
    return os.open(_folder() / name, os.O_RDWR | os.O_CREAT, 0o600)


@contextmanager
def _locked(name: str, numbers: Sequence[int], until: float = math.inf) -> Iterator[None]:
    """Lock one of the numbers against other processes. Raises ``Uncompiled`` if none is free in time."""
    import fcntl

    file = _opened(name)
    for number in itertools.cycle(numbers):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            if time.monotonic() > until:
                raise Uncompiled from None
            if number == numbers[-1]:
                time.sleep(_PAUSE_S)
            continue
        try:
            yield
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, number)
        return


def compiled_once(shared: Shared | None = None) -> AbstractContextManager[None]:
    """A kernel that another process compiles is waited for: Triton's disk cache has it then.

    Where ``shared`` lets its case be put off, it is not waited for. With twelve workers 36 % of the compilations of a
    product of low rank were done twice. Touches
    ``triton.runtime.jit.JITFunction._do_compile``, whose first argument is the key of the specialisation (3.6.0, 3.7.1
    and 3.9.0).
    """

    def compiling(upstream: Callable[..., Any], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = f"{kernel.fn.__module__}.{kernel.fn.__qualname__} {args[0]}"
        fetched = shared is not None and shared.putting_off
        with _locked("kernels", [crc32(named.encode())], time.monotonic() + _FETCH_S if fetched else math.inf):
            return upstream(kernel, *args, **kwargs)

    return replaced("triton.runtime.jit", "JITFunction", "_do_compile", compiling)


@contextmanager
def compiling_ahead(work: Callable[[Iterator[int]], None], shared: Shared) -> Iterator[None]:
    """Prepare forked children for ``work(turns)`` while the body runs; end them with it.

    ``turns`` are 0, 1, 2, ..., each for one of the children, which has a core until it takes the next. They wait until
    ``shared.begin()``, which a child of the body may call too: a warm cache needs no call and no CUDA context. The
    children only fill a cache: their errors and output are dropped.
    """
    children: list[int] = []
    reader, writer = os.pipe()

    try:
        for _ in range(workers()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
                pid = os.fork()
            if pid == 0:
                _child(work, reader, writer)
            children.append(pid)
        shared.join(children, lambda: _put(writer, 0))
        yield
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def _put(writer: int, number: int) -> None:
    os.write(writer, number.to_bytes(_NUMBER))


def _turns(reader: int, writer: int) -> Iterator[int]:
    """The next number in the pipe, which holds one at a time, until this process ends."""
    while True:
        number = int.from_bytes(os.read(reader, _NUMBER))
        _put(writer, number + 1)
        # One core of this machine, as far as processes that compile ahead go, of other tests and runs too.
        with _locked("cores", sorted(os.sched_getaffinity(0))):
            yield number


def _child(work: Callable[[Iterator[int]], None], reader: int, writer: int) -> None:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.nice(_NICE)
        os.environ["TRITON_CACHE_AUTOTUNING"] = "0"  # nothing is launched here: what tuning "finds" must not be stored
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)
        work(_turns(reader, writer))
    finally:
        os._exit(0)
