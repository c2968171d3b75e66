"""What a launch does to memory, step by step: all of it that cannot be told from what was loaded before.

Whatever else a program does (it prints, it computes with an address, it reaches memory of no argument, something is
found) spoils the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from pytest_fusion.interpreter.bridge import observers
from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, bits
from pytest_fusion.interpreter.control import batch
from pytest_fusion.interpreter.memory import memory_findings
from pytest_fusion.interpreter.memory.memory_findings import Site
from pytest_fusion.interpreter.memory.regions import Origin, View

# Addresses that are equal modulo so many bytes are alike: descriptors ask for 16, and a hint for more spoils a tape.
ALIGNMENT = 64
# What a step takes beside its arrays, measured over 20,000 of them.
_STEP_BYTES = 760
# What it does with pointers into the tensors of an origin, and what it gives.
Transfer: TypeAlias = Callable[[Array, Origin], Array | None]


@dataclass(frozen=True, slots=True)
class Step:
    """One load, store or atomic of a batch, at a line of the kernel.

    ``argument`` is the position of the view that its pointers lead to, ``offsets`` (uint64) what is left of them
    without the address of its region. ``found`` are the bits that it gave, ``None`` for a store. ``active`` is the
    batch's.
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
    """The batches of one launch; without any once it is ``spoilt``.

    ``arguments`` are the positions of its views, for as long as it is recorded; ``room`` the bytes that it may keep.
    """

    arguments: dict[View, int]
    room: int
    parts: list[Part] = field(default_factory=list)
    spoilt: bool = False
    nbytes: int = 0

    def spoil(self) -> None:
        """Let go of it all: the launch did what no step says."""
        self.spoilt = True
        self.nbytes = 0
        self.parts.clear()

    def add(self, transfer: Transfer, pointers: Array, origin: Origin | None, arrays: tuple[Array | None, ...]) -> None:
        """A step; ``arrays`` are what it gave, and then what it was given."""
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
        step = Step(transfer, argument, offsets, active, found, memory_findings.site())
        self.parts[-1].steps.append(step)


_running: Tape | None = None


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Steps of the body go to ``tape``; it is spoilt by an error, a finding or a note."""
    global _running
    before, _running = _running, tape
    told = _told()
    try:
        yield
    except BaseException:
        tape.spoil()
        raise
    finally:
        _running = before
        if _told() != told:
            tape.spoil()
        tape.arguments = {}


def running() -> Tape | None:
    """The tape of the launch that runs now."""
    return _running


def part(now: batch.Batch) -> None:
    """The steps that follow are this batch's."""
    if _running is not None and not _running.spoilt:
        _running.parts.append(Part(now.programs, now.first, now.turned))


def spoil() -> None:
    """The program does what no step says."""
    if _running is not None:
        _running.spoil()


def _told() -> tuple[int, int]:
    return memory_findings.reported(), observers.noted()
