"""Run the programs of a launch: all at once, in batches, or one after the other.

Batches follow the order of the launch (the last dimension of the grid is the fastest). Within one, an instruction is
executed for all its programs before the next one is; an atomic takes its lanes program by program. Whatever cannot run
so is undone and run one program at a time, and the reason is told.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import ExitStack, contextmanager
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
from pytest_fusion.spec.wording import not_modelled

Mode = Literal["batched", "serial"]
# In which order programs take their turns: as launched, the last one first, or shuffled by a seed.
Order = Literal["launched", "reversed"] | int

# The first batch of a launch. What is learned from it, the widest block, decides about the others, and nothing that
# earlier launches showed: one launch must take its atomics in one order always.
_FIRST = 128
# Elements of a batch's widest array: below, Python's own cost of 20-40 us an operation shows; above, arrays leave
# the second-level cache.
_ELEMENTS = 1 << 18
_MOST = 1 << 14

# "serial" switches batches off for a whole process and its children.
ENVIRONMENT = "PYTEST_FUSION_EXECUTOR"

_mode: Mode | None = None
_order: Order = "launched"
_most_alone: int | None = None
_skipping = False
_fallbacks: dict[tuple[str, str], int] = {}


@dataclass(frozen=True, slots=True)
class Execution:
    """How a launch was run: ``executor`` and, for a serial one that was not asked for, the ``reason``.

    ``replayed``: as `replay` has it, since all that it loads is what it was.
    """

    kernel: str
    grid: tuple[int, int, int]
    executor: Mode
    reason: str = ""
    replayed: bool = False


_listeners: list[Callable[[Execution], None]] = []


@contextmanager
def executing(wanted: Mode) -> Iterator[None]:
    """Run launches in this mode."""
    global _mode
    before, _mode = _mode, wanted
    try:
        yield
    finally:
        _mode = before


@contextmanager
def ordered(wanted: Order) -> Iterator[None]:
    """Run the programs of each launch in this order, and the lanes of each back to front. A device promises none.

    A kernel that waits for programs with lower ids may raise when they come later.
    """
    global _order
    before, _order = _order, wanted
    try:
        yield
    finally:
        _order = before


@contextmanager
def most_alone(programs: int) -> Iterator[None]:
    """Refuse, with ``TooManyProgramsError``, a launch of more programs that turns out to need them one by one."""
    global _most_alone
    before, _most_alone = _most_alone, programs
    try:
        yield
    finally:
        _most_alone = before


@contextmanager
def skipped() -> Iterator[None]:
    """Launches are announced and bound and not run: their memory stays as it is. For counting at full sizes."""
    global _skipping
    before, _skipping = _skipping, True
    try:
        yield
    finally:
        _skipping = before


def fallbacks() -> dict[tuple[str, str], int]:
    """Kernels that could not run as a batch, with the reason: how often since the process began."""
    return dict(_fallbacks)


@contextmanager
def listening(listener: Callable[[Execution], None]) -> Iterator[None]:
    """Tell ``listener`` how each launch was run, after it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@dataclass(frozen=True, slots=True)
class Program:
    """What every program of a launch runs: ``function(**arguments)``; ``reason`` says why it must run alone.

    ``options`` are all that changes what a launch of these arguments computes.
    """

    kernel: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    grid: tuple[int, int, int]
    regions: Regions
    reason: str = ""
    options: Hashable = None


class ProgramError(Exception):
    """What a program raised, with the program's id; the cause is the original."""

    def __init__(self, error: Exception, program: tuple[int, ...]) -> None:
        super().__init__(str(error))
        self.program = program


def mode() -> Mode:
    """How launches are run now."""
    if _mode is not None:
        return _mode
    return "serial" if os.environ.get(ENVIRONMENT) == "serial" else "batched"


def run(program: Program) -> None:
    """Every program of the grid. Raises ``ProgramError``, or ``MemoryFinding`` where findings are raised at once."""
    if _skipping:
        return
    launch = again = None
    if launch_replay.keeps():
        how = program.grid, program.options, program.reason, _order, mode(), memory_findings.current().tracking
        launch = fingerprint(program.function, program.arguments, program.regions, how)
        with _launching(program):
            again = launch_replay.replayed(launch)
    if again:
        _tell(program, "batched", "", replayed=True)
        return
    if again is False:
        program.regions.restore()
    with launch_replay.recorded(launch):
        _compute(program)


def _compute(program: Program) -> None:
    total = program.grid[0] * program.grid[1] * program.grid[2]
    reason = program.reason
    batched = mode() == "batched"
    if total > 1 and batched and not reason:
        before = list(memory_findings.current().found)
        try:
            _run(program, _batches(total))
            _tell(program, "batched", "")
            return
        except MemoryFinding:
            raise
        except NotBatchedError as error:
            reason = str(error)
        except Exception as error:
            if not_modelled(error) is not None:
                raise  # one by one the programs would ask for it too
            # The serial run says which program it was; if none raises there, the fault is the batch's.
            reason = f"as one batch it raised {type(error).__name__}: {error}"
        program.regions.restore()
        memory_findings.current().found[:] = before
    if reason or not batched:
        tape.spoil()
    if reason:
        key = (program.kernel, reason)
        _fallbacks[key] = _fallbacks.get(key, 0) + 1
        if _most_alone is not None and total > _most_alone:
            raise TooManyProgramsError(
                f"{program.kernel} asks for {total} programs; one by one, this lane runs {_most_alone} ({reason})"
            )
    _run(program, _one_by_one(total))
    _tell(program, "batched" if total <= 1 and batched and not reason else "serial", reason)


def _tell(program: Program, executor: Mode, reason: str, *, replayed: bool = False) -> None:
    for listener in tuple(_listeners):
        listener(Execution(program.kernel, program.grid, executor, reason, replayed))


def _batches(total: int) -> Generator[tuple[int, int], int, None]:
    """First program and number of programs of each batch; is sent the widest block that was met."""
    # A little more than the first batch is not worth a second one.
    size = total if total <= _FIRST * 3 // 2 else _FIRST
    first = 0
    while first < total:
        size = min(size, total - first)
        widest = yield first, size
        first += size
        size = max(_FIRST, min(_MOST, _ELEMENTS // widest))


def _one_by_one(total: int) -> Generator[tuple[int, int], int, None]:
    for first in range(total):
        yield first, 1


def _run(program: Program, parts: Generator[tuple[int, int], int, None]) -> None:
    widest = 1
    turns = _turns(program.grid[0] * program.grid[1] * program.grid[2])
    with _launching(program):
        part = next(parts, None)
        while part is not None:
            first, count = part
            ids = _ids(program.grid, turns[first : first + count])
            with batch.running(Batch(ids, first, turned=_order != "launched")) as now:
                tape.part(now)
                try:
                    program.function(**program.arguments)
                except (MemoryFinding, NotBatchedError):
                    raise
                except Exception as error:
                    raise ProgramError(error, tuple(int(n) for n in ids[:, 0])) from error
                widest = max(widest, batch.current.widest)
            try:
                part = parts.send(widest)
            except StopIteration:
                return


@contextmanager
def _launching(program: Program) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(access.launching(program.regions, program.grid))
        stack.enter_context(memory_findings.launching(program.kernel))
        # The device raises no floating-point warning; nor may code under `-W error`.
        stack.enter_context(np.errstate(all="ignore"))
        yield


def _turns(total: int) -> Array:
    """The programs, numbered as launched, in the order of their turns."""
    if isinstance(_order, int):
        return np.random.default_rng(_order).permutation(total)
    numbers = np.arange(total, dtype=np.int64)
    return numbers[::-1] if _order == "reversed" else numbers


def _ids(grid: tuple[int, int, int], numbers: Array) -> Array:
    _, y, z = grid
    return np.stack([numbers // (y * z), numbers // z % y, numbers % z])
