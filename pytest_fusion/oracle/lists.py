"""``torch._foreach_*``: an operation on lists of tensors, carried out on one element of the lists after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.ops.rule_registry import named

_PREFIX = "_foreach_"
# Of these ATen has none in place, or none with a number, or another name for it, where they take single tensors.
_BOUNDS: dict[str, Callable[..., Tensor]] = {"maximum": torch.clamp_min, "minimum": torch.clamp_max}


def takes_lists(name: str) -> bool:
    """Whether ``name``, without the underscore of an operation in place, is one of them that `one_by_one` knows."""
    single = name.removeprefix(_PREFIX)
    return name.startswith(_PREFIX) and (single == "norm" or hasattr(torch.ops.aten, single))


def one_by_one(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor] | None:
    """What ``function``, an ``aten::_foreach_*``, returns: a list, or None where it writes its first argument.

    Lists of tensors or numbers are taken apart; whatever else there is belongs to each element.
    """
    schema = function._schema
    name = schema.name.partition("::")[2].removeprefix(_PREFIX)
    given = named(function, args, kwargs)
    if isinstance(given.get("scalars"), Tensor):
        given["scalars"] = given["scalars"].tolist()
    options = {key: given.pop(key) for key in ("alpha", "dtype", "value") if key in given}
    if name.removesuffix("_") in ("addcmul", "addcdiv") and "scalars" in given:
        options["value"] = given.pop("scalars")
    count = next(len(v) for v in given.values() if isinstance(v, tuple | list))

    def at(place: int, value: Any) -> Any:
        return value[place] if isinstance(value, tuple | list) else value

    made = [
        _single(name, [at(i, v) for v in given.values()], {key: at(i, v) for key, v in options.items()})
        for i in range(count)
    ]
    return None if schema.is_mutable else made


def _single(name: str, values: list[Any], options: dict[str, Any]) -> Any:
    base = name.removesuffix("_")
    if base == "norm":
        return torch.linalg.vector_norm(*values, **options)
    if base not in _BOUNDS:
        return getattr(torch.ops.aten, name)(*values, **options)
    found = getattr(torch, base)(*values) if isinstance(values[1], Tensor) else _BOUNDS[base](*values)
    return found if name == base else values[0].copy_(found)
