"""Tensors and other leaves inside tuples, lists, dicts and dataclasses, in a fixed order.

``torch.utils._pytree`` skips dataclasses that are not registered. For each operation of a reference, it would take 5 %
of a whole test.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType, NoneType
from typing import Any

import torch

# Types of most arguments without a tensor.
_PLAIN = frozenset({NoneType, bool, int, float, str, torch.dtype, torch.device})


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf and its path: ``""`` for a lone result, ``[0]``, ``['lse']``, ``.lse``."""

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
    if _is_dataclass(value):
        return [leaf for name, item in _fields(value) for leaf in leaves(item, f"{path}.{name}")]
    return [Leaf(path, value)]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors among the leaves, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in _PLAIN:
        return []
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_of(item)]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    if _is_dataclass(value):
        return [tensor for _, item in _fields(value) for tensor in tensors_of(item)]
    return []


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same containers, copied, with each tensor replaced; everything else is passed on as it is.

    Copies hide what the kernel does to a list from the reference. A container without tensors that cannot be rebuilt
    from its items is not copied.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | dict):
        made = copy.copy(value)  # keeps the type: defaultdict, OrderedDict
        for key in range(len(value)) if isinstance(value, list) else value:
            made[key] = map_tensors(value[key], function)
        return made
    if isinstance(value, tuple):
        items = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_dataclass(value):
        twin = copy.copy(value)
        for name, item in _fields(value):
            object.__setattr__(twin, name, map_tensors(item, function))
        return twin
    return value


def rebuilt(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the containers with the same tensors: replacing one in a list is no write to the caller's memory."""
    return {name: map_tensors(value, lambda t: t) for name, value in arguments.items()}


def map_named(name: str, value: Any, function: Callable[[str, torch.Tensor], Any]) -> Any:
    """``map_tensors`` for the input ``name``, with the names of memory: ``x``, or ``x[0]``, ``x[1]``, ... in a list."""
    if isinstance(value, torch.Tensor):
        return function(name, value)
    count = itertools.count()
    return map_tensors(value, lambda tensor: function(f"{name}[{next(count)}]", tensor))


def tensors_by_name(name: str, value: Any) -> dict[str, torch.Tensor]:
    """The tensors of the input ``name`` by the names of their memory."""
    found: dict[str, torch.Tensor] = {}
    map_named(name, value, found.setdefault)
    return found


def nesting(value: Any) -> str:
    """The containers and their sizes without the leaves, as a text; equal for equal structures."""
    if isinstance(value, tuple | list):
        return "(" + ", ".join(nesting(item) for item in value) + ")"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {nesting(item)}" for key, item in sorted(value.items(), key=repr)) + "}"
    if _is_dataclass(value):
        return f"{type(value).__name__}{{{', '.join(f'{name}: {nesting(item)}' for name, item in _fields(value))}}}"
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "None" if value is None else type(value).__name__


def hidden(value: Any) -> str | None:
    """The attribute in which an object other than these containers holds a tensor, or ``None``."""
    if value is None or isinstance(value, torch.Tensor | type | ModuleType | str | int | float):
        return None
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    held = {**{name: getattr(value, name, None) for name in slots}, **getattr(value, "__dict__", {})}
    return next((name for name, inner in held.items() if tensors_of(inner)), None)


def has_no_equality(value: object) -> bool:
    """Whether a plain value has no equality of its own, so that only its type can be compared."""
    return value is not None and type(value).__eq__ is object.__eq__


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
