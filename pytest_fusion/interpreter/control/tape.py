"""A record of a launch's loads, stores and atomics, to repeat them; a print, a finding or the like spoils it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from pytest_fusion.interpreter.bridge import lane_state
from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, bits
from pytest_fusion.interpreter.control import batch
from pytest_fusion.interpreter.memory import memory_findings
from pytest_fusion.interpreter.memory.memory_findings import Site
from pytest_fusion.interpreter.memory.regions import Origin, View

# Addresses that are equal modulo this many bytes are alike: descriptors need 16, and a hint for more spoils a tape.
ALIGNMENT = 64
# Bytes of a step without its arrays, measured over 20,000 of them.
_STEP_BYTES = 760
# A memory operation: pointers and the tensors that they came from -> the loaded values.
Transfer: TypeAlias = Callable[[Array, Origin], Array | None]


@dataclass(frozen=True, slots=True)
class Step:
    """One load, store or atomic of a batch, at a line of the kernel.

    ``argument`` is the position of the view that its pointers are in, ``offsets`` (uint64) are relative to the address
    of that view's region. ``found`` are the result's bits, ``None`` for a store. ``active`` is the batch's.
    """

    transfer: Transfer
    argument: int
    offsets: Array
    active: Array | None
    found: Array | None
    site: Site


@dataclass(frozen=True, slots=True)
class Part:
    """One batch: ``programs``, ``first`` and ``turned`` are those of ``Batch``."""

    programs: Array
    first: int
    turned: bool
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class Tape:
    """The batches of one launch, none if ``spoilt``. ``arguments``: positions of its views; ``room``: most bytes."""

    arguments: dict[View, int]
    room: int
    parts: list[Part] = field(default_factory=list)
    spoilt: bool = False
    nbytes: int = 0

    def spoil(self) -> None:
        """Drop all steps: the launch did something that no step describes."""
        self.spoilt = True
        self.nbytes = 0
        self.parts.clear()

    def add(self, transfer: Transfer, pointers: Array, origin: Origin | None, arrays: tuple[Array | None, ...]) -> None:
        """Add a step; ``arrays`` are its result, then its operands."""
        if self.spoilt:
            return
        active = batch.current.active
        self.nbytes += _STEP_BYTES + sum(a.nbytes for a in (pointers, active, *arrays) if a is not None)
        view = next(iter(origin)) if origin is not None and len(origin) == 1 else None
        argument = self.arguments.get(view) if view is not None else None
        if view is None or argument is None or self.nbytes > self.room or not self.parts:
            self.spoil()
            return
        found = None if arrays[0] is None else bits(arrays[0])
        offsets = pointers - np.uint64(view.region.address)
        self.parts[-1].steps.append(Step(transfer, argument, offsets, active, found, memory_findings.site()))


_running: Tape | None = None


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Record the steps of the block on ``tape``; an error, a finding or a note spoils it."""
    global _running
    before, _running = _running, tape
    before_it = _reports()
    try:
        yield
    except BaseException:
        tape.spoil()
        raise
    finally:
        _running = before
        if _reports() != before_it:
            tape.spoil()
        tape.arguments = {}


def running() -> Tape | None:
    """The tape of the current launch, if it is recorded."""
    return _running


def part(now: batch.Batch) -> None:
    """Begin the steps of the batch ``now``."""
    if _running is not None and not _running.spoilt:
        _running.parts.append(Part(now.programs, now.first, now.turned))


def spoil() -> None:
    """Spoil the tape of the current launch, if there is one."""
    if _running is not None:
        _running.spoil()


def _reports() -> tuple[int, dict[str, int]]:
    return memory_findings.reported(), lane_state.counted_notes()
