"""Values of a launch as JSON and back: those of ``case.value_json``, tuples, partials, kernels and forms of tensors."""

from __future__ import annotations

import functools
import types
from dataclasses import asdict
from typing import Any

import torch

from pytest_fusion.case import blank, value_json
from pytest_fusion.errors import ReplayError
from pytest_fusion.run.measure.resources.function_places import NotFoundError, found, place_of
from pytest_fusion.run.measure.resources.specialisation import Json, Place
from pytest_fusion.spec.importable import at, path_of

# Launchers read small tensors of integers (lengths, offsets, experts) to size their grids: those keep their values.
_MOST_VALUES = 1 << 14


def encode(value: Any) -> Json:
    """JSON for a value; raises ``NotFoundError`` for one that has none."""
    return value_json.encode(value, _special, _refuse)


def decode(data: Json) -> Any:
    """The value that :func:`encode` was given, with kernels imported here and tensors of zeros in host memory.

    Raises ``NotFoundError``.
    """
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
            return {"kernel": asdict(place_of(value))}
        case torch.Tensor():
            return {"tensor": _form(value)}
        case dict() if not all(isinstance(key, str) for key in value):
            return {"mapping": [[encode(key), encode(item)] for key, item in value.items()]}
    if kind.__module__.startswith("triton."):
        if kind.__name__ == "dtype":
            return {"triton_dtype": str(value.name)}
        if kind.__name__ == "constexpr":
            return {"constexpr": encode(value.value)}
        if hasattr(value, "fn"):
            return {"kernel": asdict(place_of(value))}
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
        case {"tensor": dict(form)}:
            return _zeros(form)
        case {"mapping": list(pairs)}:
            return {decode(key): decode(item) for key, item in pairs}
    return NotImplemented


def _class(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise NotFoundError(f"the class {kind.__qualname__} is made inside a function; define it in a module")
    return path_of(kind)


def _form(value: torch.Tensor) -> dict[str, Json]:
    whole = not value.dtype.is_floating_point and not value.dtype.is_complex and value.numel() <= _MOST_VALUES
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "strides": list(value.stride()),
        # What of the offset decides how the first element is aligned; storages themselves are aligned as on a GPU.
        "offset": value.storage_offset() % 128,
        "values": value.detach().cpu().reshape(-1).tolist() if whole else None,
    }


def _zeros(form: dict[str, Any]) -> torch.Tensor:
    shape, strides, offset = form["shape"], form["strides"], int(form["offset"])
    dtype = getattr(torch, form["dtype"])
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
    tensor = blank.zeros((offset + reach,), dtype).as_strided(shape, strides, offset)
    if form["values"] is not None and not any(stride == 0 for stride in strides):
        tensor.copy_(torch.tensor(form["values"], dtype=dtype).reshape(shape))
    return tensor
