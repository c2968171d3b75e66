"""Logical inputs -> the tensors that the kernel gets: in their layouts, between guard zones, gaps poisoned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fusion.case.layouts import geometry
from pytest_fusion.case.model import Case, Layout
from pytest_fusion.run.memory.arena import Arena
from pytest_fusion.run.tree import map_tensors


@dataclass(slots=True)
class Placed:
    """The arguments of one fused call and the arena that guards their memory."""

    arguments: dict[str, Any]
    arena: Arena
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    """Store logical values; an expanded axis holds one slice."""
    for axis, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[axis] > 1:
            target = target.narrow(axis, 0, 1)
            values = values.narrow(axis, 0, 1)
    target.copy_(values)


def place(logical: Mapping[str, Any], case: Case, device: torch.device, fill: str) -> Placed:
    """Put every tensor among the inputs, nested ones too, into guarded memory on ``device``."""
    arena = Arena(device, fill)
    placed = Placed({}, arena)

    def put(name: str, values: torch.Tensor, layout: Layout) -> torch.Tensor:
        plan = geometry(tuple(values.shape), layout)
        target = arena.tensor(
            name,
            shape=plan.shape,
            strides=plan.strides,
            offset=plan.offset,
            dtype=values.dtype,
            storage_elements=plan.storage,
        )
        write(target, values)
        placed.tensors[name] = target
        return target

    for name, value in logical.items():
        if isinstance(value, torch.Tensor):
            own = case.tensors.get(name)
            placed.arguments[name] = put(name, value, own.layout if own else Layout())
        else:
            count = iter(range(1_000_000))

            def nested(tensor: torch.Tensor, name: str = name, count: Any = count) -> torch.Tensor:
                return put(f"{name}[{next(count)}]", tensor, Layout())

            placed.arguments[name] = map_tensors(value, nested)
    return placed


def rewrite(placed: Placed, logical: Mapping[str, Any]) -> None:
    """New values at the same addresses; the inputs must have the same structure."""
    for name, value in logical.items():
        if isinstance(value, torch.Tensor):
            write(placed.tensors[name], value)
        else:
            count = iter(range(1_000_000))
            map_tensors(value, lambda t, name=name, count=count: write(placed.tensors[f"{name}[{next(count)}]"], t))
