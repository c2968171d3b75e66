"""Compile-time values as JSON and back: numbers, strings, tuples, dtypes, enums, functions and kernels."""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

from pytest_fusion.case.value_json import decode as decode_plain
from pytest_fusion.case.value_json import encode as encode_plain
from pytest_fusion.errors import ReplayError
from pytest_fusion.run.measure.resources.function_places import NotFoundError, as_json, found, place_of
from pytest_fusion.run.measure.resources.specialisation import Json, Place


def encode(value: Any) -> Json:
    """JSON for a constant; raises ``NotFoundError`` for one that has none."""
    kind = type(value)
    match value:
        case None | bool() | str() if kind in (type(None), bool, str):
            return value
        case int() if kind is int:
            return value
        case tuple() if hasattr(value, "_fields"):
            return {"named": _class(kind), "items": [encode(item) for item in value]}
        case tuple():
            return {"tuple": [encode(item) for item in value]}
        case list():
            return [encode(item) for item in value]
        case functools.partial():
            keywords = {name: encode(item) for name, item in value.keywords.items()}
            return {"partial": encode(value.func), "args": [encode(item) for item in value.args], "keywords": keywords}
    if kind.__module__.startswith("triton."):
        if kind.__name__ == "dtype":
            return {"triton_dtype": str(value.name)}
        if kind.__name__ == "constexpr":
            return {"constexpr": encode(value.value)}
        if hasattr(value, "fn"):
            return {"kernel": as_json(place_of(value))}
    if isinstance(value, types.FunctionType):
        return {"kernel": as_json(place_of(value))}
    plain = encode_plain(value)
    if "opaque" in str(plain):
        raise NotFoundError(f"{value!r} of type {kind.__name__} cannot be handed to another process")
    return plain


def decode(data: Json) -> Any:
    """The value that :func:`encode` was given, with kernels imported here; raises ``NotFoundError``."""
    match data:
        case {"named": str(path), "items": list(items)}:
            module, _, name = path.partition(":")
            return getattr(importlib.import_module(module), name)(*map(decode, items))
        case {"tuple": list(items)}:
            return tuple(map(decode, items))
        case list():
            return [decode(item) for item in data]
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
    try:
        return decode_plain(data)
    except ReplayError as error:
        raise NotFoundError(str(error)) from None


def _class(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise NotFoundError(f"the class {kind.__qualname__} is made inside a function; define it in a module")
    return f"{kind.__module__}:{kind.__qualname__}"
