"""Replays an earlier, equal launch in a sixth to a third of its time (docs/internals/interpreter.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import bits
from pytest_fusion.interpreter.control import batch, tape
from pytest_fusion.interpreter.control.batch import Batch
from pytest_fusion.interpreter.control.fingerprint import Fingerprint
from pytest_fusion.interpreter.control.tape import Tape
from pytest_fusion.interpreter.memory import memory_findings
from pytest_fusion.interpreter.scoped import listed

# Bytes of all tapes together. Those of a usual case take a hundredth of it.
_ROOM = 1 << 27
# After so many replays in a row with other values, a launch is no longer recorded.
_MOST_MISSED = 3


@dataclass(slots=True)
class _Store:
    """Tapes by the keys of their fingerprints, each with the functions that the key identifies by address."""

    tapes: dict[Hashable, tuple[Tape, tuple[object, ...]]] = field(default_factory=dict)
    nbytes: int = 0
    missed: Counter[Hashable] = field(default_factory=Counter)

    def drop(self, key: Hashable) -> None:
        if (found := self.tapes.pop(key, None)) is not None:
            self.nbytes -= found[0].nbytes


_stores: list[_Store] = []


def allowed() -> AbstractContextManager[object]:
    """Let launches of the block be replayed from earlier ones of it."""
    return listed(_stores, _Store())


def is_allowed() -> bool:
    """Whether launches are compared with earlier ones now."""
    return bool(_stores)


@contextmanager
def recorded(launch: Fingerprint | None) -> Iterator[None]:
    """Record the block as this launch, unless it does something that no tape describes."""
    store = _stores[-1] if _stores else None
    if launch is None or store is None or store.missed[launch.key] >= _MOST_MISSED:
        yield
        return
    store.drop(launch.key)
    new = Tape({view: position for position, view in enumerate(launch.views)}, _ROOM - store.nbytes)
    with tape.recording(new):
        yield
    if not new.spoilt:
        store.tapes[launch.key] = new, launch.held
        store.nbytes += new.nbytes


def replayed(launch: Fingerprint | None) -> bool | None:
    """Repeat an earlier, equal launch on the memory of this one; ``None`` if there was none.

    ``False`` if a load gives other values, possibly after stores: the caller restores memory and runs the launch.
    """
    store = _stores[-1] if _stores else None
    if launch is None or store is None or (known := store.tapes.get(launch.key)) is None:
        return None
    alike = _played(known[0], launch)
    if alike:
        store.missed.pop(launch.key, None)
    else:
        store.missed[launch.key] += 1
        store.drop(launch.key)
    return alike


def _played(played: Tape, launch: Fingerprint) -> bool:
    origins = [frozenset({view}) for view in launch.views]
    addresses = [np.uint64(view.region.address) for view in launch.views]
    with memory_findings.deferring() as held, memory_findings.replaying():
        for part in played.parts:
            with batch.running(Batch(part.programs, part.first, turned=part.turned)) as now:
                for step in part.steps:
                    now.active = step.active
                    memory_findings.replay_at(step.site)
                    argument = step.argument
                    found = step.transfer(step.offsets + addresses[argument], origins[argument])
                    if held:
                        return False
                    if found is not None and step.found is not None and not np.array_equal(bits(found), step.found):
                        return False
    return True
