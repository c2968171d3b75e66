"""The same launch once more: its loads and stores alone, as long as all that it loads is what it was.

Half the launches of a case have the arguments and the values that an earlier one had: in memory with another fill, for
gradients, to see whether the result stays the same. Interpreted arithmetic has one answer, so of such a launch only
what it does to memory is done again, with every check of it, at the addresses of its own tensors; that takes a sixth
to a third of the time. Whatever else it loads, it is run as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np

from pytest_fusion.run.interpreter import batch, findings, tape
from pytest_fusion.run.interpreter.batch import Batch
from pytest_fusion.run.interpreter.dtypes import Array
from pytest_fusion.run.interpreter.regions import Region, Regions, View
from pytest_fusion.run.interpreter.tape import Tape

# Of all tapes together. Pointers, masks and values of the launches of a usual case are a hundredth of it.
_ROOM = 1 << 27
# No promise of a kernel about an address asks for more: descriptors ask for 16 bytes, hints of pointers for nothing.
_ALIGNMENT = 64
_PLAIN = bool | int | float | str | None


@dataclass(slots=True)
class _Kept:
    """Tapes by launch, each with the objects that its key knows by their addresses."""

    tapes: dict[Hashable, tuple[Tape, tuple[object, ...]]] = field(default_factory=dict)

    def room(self) -> int:
        return _ROOM - sum(one.nbytes for one, _ in self.tapes.values())


@dataclass(frozen=True, slots=True)
class Recognised:
    """A launch: ``key`` is equal for those whose programs do the same as long as they load the same.

    ``held`` are the objects that the key knows by their addresses.
    """

    key: Hashable
    views: tuple[View, ...]
    held: tuple[object, ...]


class _Unknown(Exception):
    """An argument that cannot be compared."""


_kept: _Kept | None = None
_constants: dict[FunctionType, list[Callable[[], object]]] = {}


@contextmanager
def kept() -> Iterator[None]:
    """Launches of the body may be replayed from earlier ones of it."""
    global _kept
    before, _kept = _kept, _Kept()
    try:
        yield
    finally:
        _kept = before


def recognised(
    kernel: Callable[..., Any], arguments: Mapping[str, Any], regions: Regions, how: Hashable
) -> Recognised | None:
    """A launch of ``kernel``, run as ``how`` says; ``None`` where nothing is kept, or arguments cannot be compared."""
    if _kept is None or not isinstance(kernel, FunctionType):
        return None
    held: list[object] = [kernel]
    try:
        given = tuple(_argument(value, held) for value in arguments.values())
    except _Unknown:
        return None
    constants = [read() for read in _constants_of(kernel)]
    held += constants
    places = tuple(_place(region) for region in regions)
    views = tuple(view for region in regions for view in region.views)
    key = id(kernel), given, tuple(map(id, constants)), places, how, findings.current().tracking
    return Recognised(key, views, tuple(held))


@contextmanager
def recorded(launch: Recognised | None) -> Iterator[None]:
    """Keep what the body does as this launch, unless it does what no tape says."""
    if launch is None or _kept is None:
        yield
        return
    _kept.tapes.pop(launch.key, None)
    new = Tape({view: position for position, view in enumerate(launch.views)}, _kept.room())
    with tape.recording(new):
        yield
    if not new.spoilt:
        _kept.tapes[launch.key] = new, launch.held


def known(launch: Recognised | None) -> Tape | None:
    """What was recorded of this launch."""
    if launch is None or _kept is None:
        return None
    tape_and_held = _kept.tapes.get(launch.key)
    return tape_and_held[0] if tape_and_held is not None else None


def replayed(played: Tape, launch: Recognised) -> bool:
    """Do what ``played`` says to the memory of this launch; whether all was as it says.

    Where it was not, stores may have been made: the caller puts back what was there and runs the launch.
    """
    origins = [frozenset({view}) for view in launch.views]
    addresses = [np.uint64(view.region.address) for view in launch.views]
    with findings.deferring() as held, findings.standing() as standing:
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
    return found is None or before is None or np.array_equal(tape.bits(found), before)


def _argument(value: Any, held: list[object]) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, tuple):
        return tuple(_argument(one, held) for one in value)
    handle = getattr(value, "handle", None)
    if handle is None:
        held.append(value)
        return id(value)
    data = getattr(handle, "data", None)
    if not isinstance(data, np.ndarray):
        raise _Unknown
    if "origin" in handle.attr:
        return str(value.dtype)
    return str(value.dtype), data.tobytes()


def _place(region: Region) -> Hashable:
    views = tuple((v.name, v.start, v.shape, v.strides, v.itemsize, v.dtype) for v in region.views)
    return region.nbytes, region.address % _ALIGNMENT, views


def _constants_of(kernel: FunctionType) -> list[Callable[[], object]]:
    """What reads all that a kernel, and the functions that it calls, find in globals, enclosing functions and, by
    attribute, in the modules, classes and objects there.
    """
    found = _constants.get(kernel)
    if found is None:
        found = _constants[kernel] = []
        waiting, seen = [kernel], {kernel}
        while waiting:
            for read in _reads_of(waiting.pop()):
                found.append(read)
                # Not by getattr: a lazy module's attributes import what they name.
                inner = _inside(read()).get("fn")
                if isinstance(inner, FunctionType) and inner not in seen:
                    seen.add(inner)
                    waiting.append(inner)
    return found


def _reads_of(function: FunctionType) -> Iterator[Callable[[], object]]:
    names = _names(function.__code__)
    cells = [partial(_content, cell) for cell in function.__closure__ or ()]
    yield from cells
    seen: list[object] = []
    owners = [function.__globals__, *(_inside(read()) for read in cells)]
    while owners:
        owner = owners.pop()
        for name in names & owner.keys():
            yield partial(owner.get, name)
            if not any(owner[name] is one for one in seen):
                seen.append(owner[name])
                owners.append(_inside(owner[name]))


def _inside(value: object) -> Mapping[str, Any]:
    """The attributes that a module, class or object holds itself."""
    try:
        found = vars(value)
    except Exception:  # noqa: BLE001  none, or its class refuses
        return {}
    return found if isinstance(found, Mapping) else {}


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _names(code: CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(_names, inner))
