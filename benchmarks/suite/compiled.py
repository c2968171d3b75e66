"""``torch.compile`` within a time limit: what it raises, or that it took too long, becomes words."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from benchmarks.suite.model import Call

MODE = "max-autotune-no-cudagraphs"


class OutOfTime(BaseException):
    """Not an `Exception`: the compiler turns those into its own, or goes on without what raised them."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the body once ``seconds`` are over, then each second again, since what waits for a worker or
    runs a destructor may swallow one. Only in the main thread, and where there are signals; else no limit."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    over = False

    def ring(_: int, __: FrameType | None) -> None:
        if not over:
            raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 1.0)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compiled(call: Call, mode: str = MODE) -> Call:
    """``call`` as torch.compile makes it for one set of sizes; compiles where it is first called."""
    import torch._inductor.config as inductor

    if hasattr(inductor, "autotune_num_choices_displayed"):
        inductor.autotune_num_choices_displayed = 0  # a table of tiles on stderr for each product
    made: Any = torch.compile(call, mode=mode, dynamic=False, fullgraph=True)
    return made  # type: ignore[no-any-return]


def forget() -> None:
    """Drop what was compiled, with the memory that it holds."""
    import torch._dynamo

    torch._dynamo.reset()
