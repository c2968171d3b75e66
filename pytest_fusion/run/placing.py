"""Logical inputs -> the tensors that the kernel gets: in their layouts, between guard zones, gaps poisoned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fusion.case.case_model import Case, Layout
from pytest_fusion.case.containers import map_named
from pytest_fusion.case.layouts import Geometry, geometry
from pytest_fusion.case.strided import expanded
from pytest_fusion.run.memory.arena import Arena
from pytest_fusion.run.memory.region import distinct

# A storage offset modulo whole cache lines of the smallest elements decides how rows are aligned.
_ALIGNMENT = 128
# Objects of one type that Python may place elsewhere before it reuses freed memory; 1 us each.
_TRIES = 20_000


@dataclass(slots=True)
class Placed:
    """The arguments of one fused call and the arena that guards their memory."""

    arguments: dict[str, Any]
    arena: Arena
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    """Store logical values; an expanded axis holds one slice."""
    for axis in expanded(target.shape, target.stride()):
        target, values = target.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
    target.copy_(values)


def laid_apart(case: Case, logical: Mapping[str, Any]) -> Case:
    """The case with those tensors contiguous whose values differ along an expanded axis, which has one slice only."""
    for name, entry in case.tensors.items():
        values = logical.get(name)
        if not isinstance(values, torch.Tensor):
            continue
        for axis in geometry(tuple(values.shape), entry.layout).expanded:
            first = values.narrow(axis, 0, min(1, values.shape[axis])).expand_as(values)
            if not bool(((values == first) | (values != values) & (first != first)).all()):
                case = case.contiguous([name])
                break
    return case


def own_geometry(values: torch.Tensor) -> Geometry:
    """A tensor's own layout with a reduced offset of equal alignment; contiguous if elements overlap."""
    strides, offset = values.stride(), int(values.storage_offset())
    stepping = [(size, stride) for size, stride in zip(values.shape, strides, strict=True) if stride]
    if not distinct([size for size, _ in stepping], [stride for _, stride in stepping]):
        return geometry(tuple(values.shape), Layout())
    offset = min(offset, _ALIGNMENT + offset % _ALIGNMENT)
    reach = sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
    storage = offset + (reach + 1 if values.numel() else 0)
    return Geometry(tuple(values.shape), strides, offset, storage, expanded(values.shape, strides))


def place(
    logical: Mapping[str, Any], case: Case, device: torch.device, fill: str, guard_bytes: int | None = None
) -> Placed:
    """All tensors among the inputs, nested ones too, in guarded memory on ``device``. Those without a layout in the
    case (constants, a caller's own) keep theirs. ``guard_bytes`` has the device's default; a multiple of 256 moves
    every address by as much."""
    arena = Arena(device, fill, guard_bytes)
    placed = Placed({}, arena)

    def put(name: str, values: torch.Tensor) -> torch.Tensor:
        own = case.tensors.get(name)
        plan = geometry(tuple(values.shape), own.layout) if own and own.layout is not None else own_geometry(values)
        target = arena.tensor(name, plan, values.dtype)
        write(target, values)
        placed.tensors[name] = target
        return target

    placed.arguments.update({name: map_named(name, value, put) for name, value in logical.items()})
    return placed


def rewrite(placed: Placed, logical: Mapping[str, Any]) -> None:
    """Write new values at the same addresses, and replace what is not a tensor; the structure must be the same."""
    placed.arguments.update(_filled(placed, logical))


def renewed(arena: Arena, numbers: Mapping[str, int], logical: Mapping[str, Any]) -> Placed:
    """New tensor objects with new values at the addresses of ``arena``, as an allocator makes them of freed memory.
    Their version counters are those after ``place``, and where Python allows their ``id``s those in ``numbers``, which
    has all placed tensors. The inputs must have the same structure."""
    fresh = Placed({}, arena, {name: _reborn(arena, name, number) for name, number in numbers.items()})
    fresh.arguments = _filled(fresh, logical)
    return fresh


def _reborn(arena: Arena, name: str, number: int) -> torch.Tensor:
    """The tensor as a new object with that ``id``: makes objects until one gets this address."""
    others: list[torch.Tensor] = []
    while len(others) < _TRIES:
        others.append(torch.empty(0))
        if id(others[-1]) == number:
            del others[-1]  # the place freed last is used first
            break
    return arena.again(name)


def _filled(placed: Placed, logical: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that hold ``logical`` in the tensors of ``placed``."""

    def fill(name: str, values: torch.Tensor) -> torch.Tensor:
        write(placed.tensors[name], values)
        return placed.tensors[name]

    return {name: map_named(name, value, fill) for name, value in logical.items()}
