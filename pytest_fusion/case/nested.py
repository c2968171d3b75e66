"""Tensors inside the containers that an input may be made of."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same nesting of tuples, lists, dicts and dataclasses with each tensor replaced, in a fixed order.

    Containers are new objects, so that what the kernel does to a list is not seen by the reference. Anything else, a
    container of no tensors that cannot be rebuilt from its items included, is passed on as it is.
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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for f in dataclasses.fields(value):
            object.__setattr__(twin, f.name, map_tensors(getattr(value, f.name), function))
        return twin
    return value


def rebuilt(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors in containers of the callee's own: one that it puts into a list in place of another is no write
    to the caller's memory."""
    return {name: map_tensors(value, lambda t: t) for name, value in arguments.items()}


def tensors_in(name: str, value: Any) -> dict[str, torch.Tensor]:
    """The tensors of the input ``name`` by the names of their memory: ``x``, or ``x[0]``, ``x[1]``... in a list."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    found: dict[str, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found[f"{name}[{len(found)}]"] = tensor
        return tensor

    map_tensors(value, note)
    return found
