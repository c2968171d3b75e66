"""The same launch once more: its loads and stores alone, as long as all that it loads is what it was.

Half the launches of a case have the arguments and the values that an earlier one had: in memory with another fill, for
gradients, to see whether the result stays the same. Interpreted arithmetic has one answer, so of such a launch only
what it does to memory is done again, with every check of it, at the addresses of its own tensors; that takes a sixth
to a third of the time. Whatever else it loads, it is run as any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, bits
from pytest_fusion.interpreter.control import batch, tape
from pytest_fusion.interpreter.control.batch import Batch
from pytest_fusion.interpreter.control.fingerprint import Fingerprint
from pytest_fusion.interpreter.control.tape import Tape
from pytest_fusion.interpreter.memory import memory_findings

# Of all tapes together. Those of the launches of a usual case take a hundredth of it.
_ROOM = 1 << 27
# So often in a row may a launch load other values before no tape is kept of it any more.
_MOST_MISSED = 3


@dataclass(slots=True)
class _Kept:
    """Tapes by what their launches are compared by, each with the functions that are known there by their addresses."""

    tapes: dict[Hashable, tuple[Tape, tuple[object, ...]]] = field(default_factory=dict)
    nbytes: int = 0
    missed: Counter[Hashable] = field(default_factory=Counter)

    def drop(self, key: Hashable) -> None:
        if (found := self.tapes.pop(key, None)) is not None:
            self.nbytes -= found[0].nbytes


_kept: _Kept | None = None


@contextmanager
def kept() -> Iterator[None]:
    """Launches of the body may be replayed from earlier ones of it."""
    global _kept
    before, _kept = _kept, _Kept()
    try:
        yield
    finally:
        _kept = before


def keeps() -> bool:
    """Whether launches are compared with earlier ones now."""
    return _kept is not None


@contextmanager
def recorded(launch: Fingerprint | None) -> Iterator[None]:
    """Keep what the body does as this launch, unless it does what no tape says."""
    if launch is None or _kept is None or _kept.missed[launch.key] >= _MOST_MISSED:
        yield
        return
    _kept.drop(launch.key)
    new = Tape({view: position for position, view in enumerate(launch.views)}, _ROOM - _kept.nbytes)
    with tape.recording(new):
        yield
    if not new.spoilt:
        _kept.tapes[launch.key] = new, launch.held
        _kept.nbytes += new.nbytes


def replayed(launch: Fingerprint | None) -> bool | None:
    """Do to the memory of this launch what an earlier one did to its own; ``None`` where no such one is known.

    ``False`` where it loads something else. Stores may have been made then: the caller puts back what was there, and
    runs the launch.
    """
    if launch is None or _kept is None or (known := _kept.tapes.get(launch.key)) is None:
        return None
    alike = _played(known[0], launch)
    if alike:
        _kept.missed.pop(launch.key, None)
    else:
        _kept.missed[launch.key] += 1
        _kept.drop(launch.key)
    return alike


def _played(played: Tape, launch: Fingerprint) -> bool:
    origins = [frozenset({view}) for view in launch.views]
    addresses = [np.uint64(view.region.address) for view in launch.views]
    with memory_findings.deferring() as held, memory_findings.standing() as standing:
        for part in played.parts:
            with batch.running(Batch(part.programs, part.first, turned=part.turned)) as now:
                for step in part.steps:
                    now.active = step.active
                    standing(step.site)
                    argument = step.argument
                    found = step.transfer(step.offsets + addresses[argument], origins[argument])
                    if held or not _is(found, step.found):
                        return False
    return True


def _is(found: Array | None, before: Array | None) -> bool:
    return found is None or before is None or np.array_equal(bits(found), before)
