"""Values as Python text, exact to the bit: what a stand-alone script is given instead of a pickle."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import pathlib
import textwrap
from collections.abc import Callable
from typing import Any

import torch

from pytest_fusion.case.layouts import Geometry
from pytest_fusion.case.value_json import encode
from pytest_fusion.run.bits import as_bytes
from pytest_fusion.run.memory.fill import FILLS, pattern

# A tensor of more is a page of digits that nobody reads.
LITERAL_BYTES = 16 * 1024
_SHOWN = 12
_WIDTH = 100


class Unwritable(Exception):
    """The value has no text; the message says what it is."""


def literal(value: Any, tensor: Callable[[torch.Tensor], str]) -> str:
    """An expression that gives ``value`` again; ``tensor`` writes the tensors in it. Raises ``Unwritable``.

    Functions, classes and enums are named as ``named("module:name")``.
    """

    def inner(item: Any) -> str:
        return literal(item, tensor)

    match value:
        case torch.Tensor():
            return tensor(value)
        case enum.Enum():
            return f"{_named(type(value))}[{value.name!r}]"
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case None | bool() | int() | float() | str() | bytes() | complex():
            return repr(value)
        case torch.dtype():
            return str(value)
        case torch.device():
            return f"torch.device({str(value)!r})"
        case pathlib.PurePath():
            return f"Path({str(value)!r})"
        case functools.partial():
            given = [inner(value.func), *map(inner, value.args)]
            given += [f"{name}={inner(item)}" for name, item in value.keywords.items()]
            return f"functools.partial({', '.join(given)})"
        case tuple() if hasattr(value, "_fields"):
            return f"{_named(type(value))}({', '.join(map(inner, value))})"
        case tuple() | list() | dict() if type(value) in (tuple, list, dict):
            return _container(value, inner)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = [f"{f.name}={inner(getattr(value, f.name))}" for f in dataclasses.fields(value) if f.init]
        return f"{_named(type(value))}({', '.join(given)})"
    return _named(value)


def _container(value: Any, inner: Callable[[Any], str]) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{inner(key)}: {inner(item)}" for key, item in value.items()) + "}"
    items = ", ".join(map(inner, value))
    if isinstance(value, list):
        return f"[{items}]"
    return f"({items},)" if len(value) == 1 else f"({items})"


def _named(value: Any) -> str:
    """An importable function or class by its name."""
    found = encode(value) if callable(value) else {}
    if isinstance(found, dict) and "import" in found:
        return f"named({found['import']!r})"
    what = getattr(value, "__qualname__", None) or f"a {type(value).__name__}"
    raise Unwritable(f"{what} is neither plain data nor can it be imported by a name")


def tensor_text(
    name: str, values: torch.Tensor, plan: Geometry, number: int, *, generated: Callable[[], str] | None = None
) -> str:
    """A call of a script's ``tensor``: layout, surroundings and elements.

    ``values`` is on the CPU and contiguous, of the plan's shape; ``number`` counts the tensors of the call, which are
    surrounded by different bytes. ``generated`` is asked for an expression where the elements are too many to be
    written. Raises ``Unwritable`` where there is none.
    """
    dtype = str(values.dtype).removeprefix("torch.")
    once = [1 if stride == 0 and size > 1 else size for size, stride in zip(plan.shape, plan.strides, strict=True)]
    around = " ".join(pattern(values.dtype, fill, 2 * number)[::-1].hex() for fill in FILLS)
    layout = f"{name!r}, {dtype!r}, {list(plan.shape)}, {list(plan.strides)}"
    layout += f', offset={plan.offset}, storage={plan.storage}, around="{around}"'
    for axis, size in enumerate(once):
        values = values.narrow(axis, 0, min(size, values.shape[axis]))
    if not values.numel():
        return f"tensor({layout})"
    if values.nbytes > LITERAL_BYTES:
        if generated is None:
            raise Unwritable(
                f"its {values.numel():,} elements come from a function of the test's own and are too many to be "
                "written down"
            )
        return f"tensor(\n            {layout},\n            values={generated()},\n        )"
    shown = ""
    if values.numel() <= _SHOWN and not values.dtype.is_complex:
        listed = ", ".join(f"{float(v):.9g}" for v in values.reshape(-1))
        shown = f"            # {listed}\n"
    return f'tensor(\n            {layout},\n{shown}            bits="""\n{_bits(values)}\n            """,\n        )'


def _bits(values: torch.Tensor) -> str:
    """The elements in hexadecimal, a row of the last axis on lines of its own."""
    size = values.element_size()
    data = as_bytes(values.cpu()).reshape(-1, size).flip(1).numpy().tobytes().hex()
    words = [data[i : i + 2 * size] for i in range(0, len(data), 2 * size)]
    width = values.shape[-1] if values.dim() else 1
    rows = [" ".join(words[i : i + width]) for i in range(0, len(words), width)]
    indent = " " * 16
    return "\n".join(textwrap.fill(row, _WIDTH, initial_indent=indent, subsequent_indent=indent) for row in rows)
