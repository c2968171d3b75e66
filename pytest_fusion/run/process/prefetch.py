"""A fast path: forked workers compile ahead what the covering phase and the search's first half will launch.

A row-wise kernel meets some hundred specialisations (block size, dtype, divisibility of sizes, strides, addresses), at
0.1-0.3 s each. Triton's disk cache is shared and written atomically, so workers fill it and the test finds it warm.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Each worker starts a CUDA context of its own: about half a second and half a gigabyte of device memory.
_MOST_WORKERS = 12
_FEW_ENTRIES = 8
# What fills a cache gives way to what tests: several runs side by side had 28 processes at work on 16 cores.
_NICE = 10


def cache_is_empty() -> bool:
    """Whether Triton's disk cache is nearly empty, so that waiting for the first miss would only lose time."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return len(list(itertools.islice(folder.glob("*"), _FEW_ENTRIES))) < _FEW_ENTRIES


def workers() -> int:
    """How many processes may compile beside the test itself; 0 where there is only a core for the test."""
    share = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(0, min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // share - 2))


@contextmanager
def compiling_ahead(work: Callable[[int, int], None]) -> Iterator[Callable[[], None]]:
    """Prepare forked children for ``work(worker, workers)`` while the body runs; end them with it.

    Yields the call that starts them, good once and from a child of the body too: with a warm cache nobody calls it, and
    no context is made. The children only fill a cache: what they raise, print or die of is dropped.
    """
    count = workers()
    children: list[int] = []
    reader, writer = os.pipe()

    def start() -> None:
        os.write(writer, b"!" * count)

    try:
        for worker in range(count):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
                pid = os.fork()
            if pid == 0:
                os.close(writer)
                _child(work, worker, count, reader)
            children.append(pid)
        yield start
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def _child(work: Callable[[int, int], None], worker: int, count: int, reader: int) -> None:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        if not os.read(reader, 1):
            return
        os.nice(_NICE)
        os.environ["TRITON_CACHE_AUTOTUNING"] = "0"  # nothing is launched here: what tuning "finds" must not be kept
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)
        work(worker, count)
    finally:
        os._exit(0)
