"""Where the kernels of this folder are registered: honest ones, and ones with a bug at a marked line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.interpreter.planted.model import Memory, Pairs

EXECUTORS = ("batched", "serial")


@dataclass(frozen=True)
class Honest:
    """``run`` launches kernels in which nothing is wrong and returns what they computed and what they should have."""

    run: Callable[[Memory], Pairs]
    executor: str


@dataclass(frozen=True)
class Bug:
    """``run`` launches a kernel that errs, as one of ``kinds``, at a line that ends in ``# BUG``."""

    run: Callable[[Memory], object]
    executor: str
    kinds: frozenset[str]
    lines: frozenset[int]


HONEST: list[Honest] = []
BUGS: list[Bug] = []


def honest(*executors: str) -> Callable[[Callable[[Memory], Pairs]], Callable[[Memory], Pairs]]:
    """Register an honest launcher for these executors (both)."""

    def register(run: Callable[[Memory], Pairs]) -> Callable[[Memory], Pairs]:
        HONEST.extend(Honest(run, executor) for executor in executors or EXECUTORS)
        return run

    return register


def bug(kernel: Any, *kinds: str, executors: tuple[str, ...] = EXECUTORS) -> Callable[[Any], Any]:
    """Register a launcher of ``kernel``, one line of which is marked."""

    def register(run: Callable[[Memory], object]) -> Callable[[Memory], object]:
        source, start = inspect.getsourcelines(inspect.unwrap(kernel.fn))
        lines = frozenset(start + i for i, line in enumerate(source) if line.rstrip().endswith("# BUG"))
        assert lines
        BUGS.extend(Bug(run, executor, frozenset(kinds), lines) for executor in executors)
        return run

    return register
