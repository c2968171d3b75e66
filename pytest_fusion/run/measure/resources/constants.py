"""Compile-time values as JSON and back: what ``case.value_json`` knows, named tuples, partials, dtypes and kernels."""

from __future__ import annotations

import functools
import types
from typing import Any

from pytest_fusion.case import value_json
from pytest_fusion.errors import ReplayError
from pytest_fusion.run.measure.resources.function_places import NotFoundError, as_json, found, place_of
from pytest_fusion.run.measure.resources.specialisation import Json, Place
from pytest_fusion.spec.importable import at, path_of


def encode(value: Any) -> Json:
    """JSON for a constant; raises ``NotFoundError`` for one that has none."""
    return value_json.encode(value, _special, _refuse)


def decode(data: Json) -> Any:
    """The value that :func:`encode` was given, with kernels imported here; raises ``NotFoundError``."""
    try:
        return value_json.decode(data, _made)
    except ReplayError as error:
        raise NotFoundError(str(error)) from None


def _special(value: Any) -> Any:
    """JSON for the kinds that drawn values never are; ``NotImplemented`` for the others."""
    kind = type(value)
    match value:
        case tuple() if hasattr(value, "_fields"):
            return {"named": _class(kind), "items": [encode(item) for item in value]}
        case functools.partial():
            keywords = {name: encode(item) for name, item in value.keywords.items()}
            return {"partial": encode(value.func), "args": [encode(item) for item in value.args], "keywords": keywords}
        case types.FunctionType():
            return {"kernel": as_json(place_of(value))}
    if kind.__module__.startswith("triton."):
        if kind.__name__ == "dtype":
            return {"triton_dtype": str(value.name)}
        if kind.__name__ == "constexpr":
            return {"constexpr": encode(value.value)}
        if hasattr(value, "fn"):
            return {"kernel": as_json(place_of(value))}
    return NotImplemented


def _refuse(value: Any) -> Any:
    """Raises ``NotFoundError``."""
    raise NotFoundError(f"{value!r} of type {type(value).__name__} cannot be handed to another process")


def _made(data: Any) -> Any:
    """The value that `_special` was given; ``NotImplemented`` for other JSON."""
    match data:
        case {"named": str(path), "items": list(items)}:
            return at(path)(*map(decode, items))
        case {"partial": function, "args": list(items), "keywords": dict(keywords)}:
            given = {name: decode(item) for name, item in keywords.items()}
            return functools.partial(decode(function), *map(decode, items), **given)
        case {"triton_dtype": str(name)}:
            import triton.language as tl

            return tl.dtype(name)
        case {"constexpr": value}:
            import triton.language as tl

            return tl.constexpr(decode(value))
        case {"kernel": dict(place)}:
            return found(Place(**place))
    return NotImplemented


def _class(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise NotFoundError(f"the class {kind.__qualname__} is made inside a function; define it in a module")
    return path_of(kind)
