"""A kernel's result as leaves with paths: tensors, numbers, ``None``, in tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf and where it stands: ``""`` for a lone result, ``[0]``, ``['lse']``, ``.lse``."""

    path: str
    value: Any

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


def leaves(value: Any, path: str = "") -> list[Leaf]:
    """The leaves in order; a container contributes none of its own."""
    if isinstance(value, tuple | list):
        return [leaf for i, item in enumerate(value) for leaf in leaves(item, f"{path}[{i}]")]
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in leaves(item, f"{path}[{key!r}]")]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [leaf for f in dataclasses.fields(value) for leaf in leaves(getattr(value, f.name), f"{path}.{f.name}")]
    return [Leaf(path, value)]


def hidden(value: Any) -> str | None:
    """The attribute in which an object that is none of these containers holds a tensor."""
    if value is None or isinstance(value, torch.Tensor | type | ModuleType | str | int | float):
        return None
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    held = {**{name: getattr(value, name, None) for name in slots}, **getattr(value, "__dict__", {})}
    return next((name for name, inner in held.items() if any(leaf.is_tensor for leaf in leaves(inner))), None)


def says_nothing(value: object) -> bool:
    """Whether only the type of a plain value can be compared; ``None`` has nothing else."""
    return value is not None and type(value).__eq__ is object.__eq__


def nesting(value: Any) -> str:
    """The containers and their sizes, without the leaves: equal texts are equal structures."""
    if isinstance(value, tuple | list):
        return "(" + ", ".join(nesting(item) for item in value) + ")"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {nesting(item)}" for key, item in sorted(value.items(), key=repr)) + "}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (
            type(value).__name__
            + "{"
            + ", ".join(f"{f.name}: {nesting(getattr(value, f.name))}" for f in dataclasses.fields(value))
            + "}"
        )
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "None" if value is None else type(value).__name__
