"""Runs the programs of a launch: all at once, in batches, or one after the other (docs/internals/interpreter.md).

Batches follow the order of the launch (the last dimension of the grid is the fastest), as do an atomic's lanes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pytest_fusion.errors import MemoryFinding, TooManyProgramsError
from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.control import batch, launch_replay, tape
from pytest_fusion.interpreter.control.batch import Batch, NotBatchedError
from pytest_fusion.interpreter.control.fingerprint import fingerprint
from pytest_fusion.interpreter.memory import access, memory_findings
from pytest_fusion.interpreter.memory.regions import Regions
from pytest_fusion.interpreter.scoped import holding, listed
from pytest_fusion.spec.wording import not_modelled

Mode = Literal["batched", "serial"]
# The order of programs: as launched, the last one first, or shuffled by a seed.
Order = Literal["launched", "reversed"] | int

# Programs of a launch's first batch, whose widest block sizes the others. Earlier launches have no influence: a launch
# must always perform its atomics in the same order.
_FIRST = 128
# Elements of a batch's widest array: below, Python's 20-40 us an operation show; above, it leaves the L2 cache.
_ELEMENTS = 1 << 18
_MOST = 1 << 14

# In another order programs run one by one, or in so many batches: in one batch all would load before any stores.
_PARTS = 32

# "serial" switches batches off for a whole process and its children.
ENVIRONMENT = "PYTEST_FUSION_EXECUTOR"


@dataclass(slots=True)
class _Settings:
    """How launches run now. ``mode``: ``None`` for the environment's. ``most_alone``: see that function."""

    mode: Mode | None = None
    order: Order = "launched"
    most_alone: int | None = None
    skipping: bool = False


_settings = _Settings()
_fallbacks: dict[tuple[str, str], int] = {}


@dataclass(frozen=True, slots=True)
class Execution:
    """How a launch ran, with the ``reason`` for a fallback to serial; ``replayed``: only its loads and stores ran."""

    kernel: str
    grid: tuple[int, int, int]
    executor: Mode
    reason: str = ""
    replayed: bool = False


_listeners: list[Callable[[Execution], None]] = []


def executing(wanted: Mode) -> AbstractContextManager[None]:
    return holding(_settings, mode=wanted)


def ordered(wanted: Order) -> AbstractContextManager[None]:
    """Run the programs of each launch in this order, and the lanes of each in reverse. A device guarantees no order.

    Programs run one after the other, or in `_PARTS` equal shares. A kernel that waits for programs with lower ids runs
    as one batch, and may raise when they come later.
    """
    return holding(_settings, order=wanted)


def most_alone(programs: int) -> AbstractContextManager[None]:
    """Raise ``TooManyProgramsError`` for a launch of more programs that cannot run as a batch."""
    return holding(_settings, most_alone=programs)


def skipped() -> AbstractContextManager[None]:
    """Announce and bind launches without running them: memory stays as it is. For counting at full sizes."""
    return holding(_settings, skipping=True)


def fallbacks() -> dict[tuple[str, str], int]:
    """How often each kernel could not run as a batch, by kernel and reason, since the process began."""
    return dict(_fallbacks)


def listening(listener: Callable[[Execution], None]) -> AbstractContextManager[object]:
    """Call ``listener`` after each launch, with how it ran."""
    return listed(_listeners, listener)


@dataclass(frozen=True, slots=True)
class Program:
    """What each program of a launch runs; ``reason``: why alone; ``options``: all else that changes its result."""

    kernel: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    grid: tuple[int, int, int]
    regions: Regions
    reason: str = ""
    options: Hashable = None


class ProgramError(Exception):
    """An error raised by a program, with the program's id; the cause is the original exception."""

    def __init__(self, error: Exception, program: tuple[int, ...]) -> None:
        super().__init__(str(error))
        self.program = program


def mode() -> Mode:
    if _settings.mode is not None:
        return _settings.mode
    return "serial" if os.environ.get(ENVIRONMENT) == "serial" else "batched"


def run(program: Program) -> None:
    """Run every program of the grid. Raises ``ProgramError``, or ``MemoryFinding`` unless findings are collected."""
    if _settings.skipping:
        return
    launch = again = None
    if launch_replay.is_allowed():
        order, tracking = _settings.order, memory_findings.current().tracking
        how = program.grid, program.options, program.reason, order, mode(), tracking
        launch = fingerprint(program.function, program.arguments, program.regions, how)
        with _launching(program):
            again = launch_replay.replayed(launch)
    if again:
        _report(program, "batched", "", replayed=True)
        return
    if again is False:
        program.regions.restore()
    with launch_replay.recorded(launch):
        _compute(program)


def _compute(program: Program) -> None:
    total = program.grid[0] * program.grid[1] * program.grid[2]
    reason = program.reason
    batched = mode() == "batched"
    sizes = [-(-total // _PARTS), total] if _settings.order != "launched" else [total]
    for most in sizes if total > 1 and batched and not reason else ():
        before = list(memory_findings.current().found)
        try:
            _run(program, most)
            _report(program, "batched", "")
            return
        except MemoryFinding:
            raise
        except NotBatchedError as error:
            reason = str(error)
        except Exception as error:
            if not_modelled(error) is not None:
                raise  # one by one the programs would need it too
            # The serial run finds the program; if none raises there, the batch is at fault.
            reason = f"as one batch it raised {type(error).__name__}: {error}"
        tape.spoil()
        program.regions.restore()
        memory_findings.current().found[:] = before
    if reason or not batched:
        tape.spoil()
    if reason:
        key = (program.kernel, reason)
        _fallbacks[key] = _fallbacks.get(key, 0) + 1
        if _settings.most_alone is not None and total > _settings.most_alone:
            raise TooManyProgramsError(
                f"{program.kernel} launches {total} programs; one by one, the CPU lane runs at most "
                f"{_settings.most_alone} ({reason})"
            )
    _run(program, 1)
    _report(program, "batched" if total <= 1 and batched and not reason else "serial", reason)


def _report(program: Program, executor: Mode, reason: str, *, replayed: bool = False) -> None:
    for listener in tuple(_listeners):
        listener(Execution(program.kernel, program.grid, executor, reason, replayed))


def _run(program: Program, most: int) -> None:
    """Run the programs in batches of at most ``most``; the widest block met so far sets the size of the next."""
    x, y, z = program.grid
    total = x * y * z
    turns = _turns(total)
    # Slightly more programs than the first batch holds do not need a second one.
    size = total if total <= _FIRST * 3 // 2 else _FIRST
    first, widest = 0, 1
    with _launching(program):
        while first < total:
            numbers = turns[first : first + min(size, most)]
            ids = np.stack([numbers // (y * z), numbers // z % y, numbers % z])
            with batch.running(Batch(ids, first, turned=_settings.order != "launched")) as now:
                tape.part(now)
                try:
                    program.function(**program.arguments)
                except (MemoryFinding, NotBatchedError):
                    raise
                except Exception as error:
                    raise ProgramError(error, tuple(int(n) for n in ids[:, 0])) from error
                widest = max(widest, now.widest)
            first += len(numbers)
            size = max(_FIRST, min(_MOST, _ELEMENTS // widest))


@contextmanager
def _launching(program: Program) -> Iterator[None]:
    # A device raises no floating-point warning, so code under `-W error` must not see one either.
    quiet = np.errstate(all="ignore")
    with access.launching(program.regions, program.grid), memory_findings.launching(program.kernel), quiet:
        yield


def _turns(total: int) -> Array:
    """The programs' numbers as launched, in the order in which they run."""
    if isinstance(_settings.order, int):
        return np.random.default_rng(_settings.order).permutation(total)
    numbers = np.arange(total, dtype=np.int64)
    return numbers[::-1] if _settings.order == "reversed" else numbers
