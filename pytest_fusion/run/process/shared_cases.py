"""`Shared`: which cases of a test the processes that compile ahead have taken, and which are put off until they have.

A test goes on with cases that no other process is compiling. One config of an autotuned kernel may take 50 s (swiglu of
fla-core), so the test of one compiles none itself, where others do.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, Final, TypeVar

from pytest_fusion.interpreter.scoped import holding, replaced
from pytest_fusion.run.process.supervisor import stat_words

T = TypeVar("T")

# Profile `deep` has some 1,500 cases.
_MOST_CASES = 1 << 14
_FREE, _FINISHED = 0, -1
# Of ptxas, in which a kernel is at most a second; with 256 elements in each thread it takes 15 to 50.
PATIENCE_S: Final = 5.0
# So many cases in a row whose kernels are not compiled: neither will be those of the next.
_MISSED = 3
_PAUSE_S = 0.01


class Uncompiled(BaseException):
    """Ends a case at a kernel that Triton's cache lacks: another process can compile it, or it takes too long."""


class Shared:
    """Which numbered cases a process of this test has taken or finished, in memory that forked children share."""

    def __init__(self) -> None:
        # The process that has taken a case, or one of the two states above; last, whether the workers have begun.
        self._states = memoryview(mmap.mmap(-1, 8 * (_MOST_CASES + 1))).cast("q")
        self._workers: Sequence[int] = ()
        self._start: Callable[[], None] = lambda: None
        # Of the case that is yielded: whether it may be put off, and was; and of the test, whether any may.
        self._optional = self.put_off = self._limited = False
        # Whether the block of `leaving` runs, in a case that may be put off.
        self.putting_off = False

    def join(self, workers: Sequence[int], start: Callable[[], None]) -> None:
        """These processes take cases once ``start`` is called."""
        self._workers, self._start = workers, start

    def begin(self) -> None:
        """Let the workers begin, unless they have."""
        if not self._states[_MOST_CASES]:
            self._states[_MOST_CASES] = 1
            self._start()

    def take(self, number: int) -> bool:
        """Whether the case was free. Two processes may both take one at the same moment: it is compiled twice."""
        if free := self._states[number] == _FREE:
            self._states[number] = os.getpid()
        return free

    def finish(self, number: int) -> None:
        self._states[number] = _FINISHED

    def finished_first(
        self, cases: Iterable[T], waited: Callable[[float], bool] | None, *, puts_off: bool = False
    ) -> Iterator[T]:
        """The cases in order; those that workers have taken once these finish, or crash.

        ``waited`` is called with the seconds of each pause, and returns whether to wait longer; cases that are not
        finished then are left out. With ``None`` every case comes. ``puts_off``: a case may be put off until workers
        have compiled it (``leaving``), since one config of a kernel may take 40 s; after a few of these no other is
        tried.
        """
        others: dict[int, T] = {}
        missed, self._limited = 0, puts_off
        for number, case in enumerate(cases):
            yield from self._finished(others)
            limited = puts_off and any(map(_lives, self._workers))
            if limited and missed >= _MISSED and self._states[number] == _FREE:
                others[number] = case
            elif self.take(number) or not self._in_work(number):
                self._optional = limited
                try:
                    yield case
                finally:  # also where the test takes no further case
                    put_off, self.put_off, self._optional = self.put_off, False, False
                missed = missed + 1 if put_off else 0
                if put_off:
                    self._states[number] = _FREE
                    others[number] = case
                    self.begin()
                else:
                    self.finish(number)
            else:
                others[number] = case
        while others and waited is not None and any(map(_lives, self._workers)):
            yield from self._finished(others)
            begun = perf_counter()
            time.sleep(_PAUSE_S)
            if not waited(perf_counter() - begun):
                return
        yield from others.values()

    def _finished(self, others: dict[int, T]) -> Iterator[T]:
        ready = [number for number in others if self._states[number] != _FREE and not self._in_work(number)]
        for number in ready:
            yield others.pop(number)

    def _in_work(self, number: int) -> bool:
        process = self._states[number]
        return process != _FINISHED and _lives(process)

    @contextmanager
    def leaving(self, *, further: bool = False) -> Iterator[None]:
        """Within, ``Uncompiled`` ends a case of a test that puts cases off: one that can be, at the first kernel that
        is not compiled; one of ``further`` cases, for which no worker compiles, where ptxas takes `PATIENCE_S`.

        Touches ``triton.compiler.compiler.ASTSource.make_ir``, called for what the cache lacks, and ``subprocess`` of
        ``triton.backends.nvidia.compiler`` (3.6.0, 3.7.1, 3.9.0).
        """

        def lacking(*_: Any) -> Any:
            raise Uncompiled

        nvidia = sys.modules.get("triton.backends.nvidia.compiler")
        limited: AbstractContextManager[None] = nullcontext()
        if self._optional:
            limited = replaced("triton.compiler.compiler", "ASTSource", "make_ir", lacking)
        elif further and self._limited and nvidia is not None and any(map(_lives, self._workers)):
            limited = holding(nvidia, subprocess=_Impatient())
        self.putting_off = self._optional
        try:
            with limited:
                yield
        except Uncompiled:
            self.put_off = self._optional
            raise
        finally:
            self.putting_off = False


class _Impatient:
    """The module ``subprocess``, whose ``run`` ends the case after `PATIENCE_S`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, *command: Any, check: bool = False, **options: Any) -> Any:
        try:
            return subprocess.run(*command, check=check, **options, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Uncompiled from None


def _lives(process: int) -> bool:
    """Whether a process has not ended: one whose parent does not wait for it stays a zombie."""
    try:
        return stat_words(process)[0] not in ("Z", "X")
    except OSError:
        return False
