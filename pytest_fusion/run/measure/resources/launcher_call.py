"""A call of a launcher as plain data: which function, with which values, and what its tensors look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fusion.case import blank
from pytest_fusion.run.measure.resources.constants import decode, encode
from pytest_fusion.run.measure.resources.specialisation import Json

# Launchers read small tensors of integers (lengths, offsets, experts) to size their grids: those keep their values.
_MOST_VALUES = 1 << 14


@dataclass(frozen=True, slots=True)
class Call:
    """``function`` and ``arguments`` (by name), encoded; ``backward``: the gradients of these arguments too."""

    function: Json
    arguments: Mapping[str, Json]
    backward: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Json]:
        return {"function": self.function, "arguments": dict(self.arguments), "backward": list(self.backward)}


def describe(function: Any, arguments: Mapping[str, Any], backward: tuple[str, ...] = ()) -> Call:
    """Raises ``NotFoundError`` for a function or a value that cannot be handed to another process."""
    return Call(encode(function), {name: _encoded(value) for name, value in arguments.items()}, backward)


def _encoded(value: Any) -> Json:
    match value:
        case torch.Tensor():
            return {"tensor": _tensor(value)}
        case dict():
            return {"mapping": [[encode(key), _encoded(item)] for key, item in value.items()]}
        case tuple() if not hasattr(value, "_fields"):
            return {"items": [_encoded(item) for item in value]}
        case list():
            return {"list": [_encoded(item) for item in value]}
    return {"value": encode(value)}


def _tensor(value: torch.Tensor) -> dict[str, Json]:
    whole = not value.dtype.is_floating_point and not value.dtype.is_complex and value.numel() <= _MOST_VALUES
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "strides": list(value.stride()),
        # What of the offset decides how the first element is aligned; storages themselves are aligned as on a GPU.
        "offset": value.storage_offset() % 128,
        "values": value.detach().cpu().reshape(-1).tolist() if whole else None,
    }


def made(call: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The function and its arguments, with tensors of zeros in host memory. Raises ``NotFoundError``."""
    return decode(call["function"]), {name: _made(value) for name, value in call["arguments"].items()}


def _made(data: Any) -> Any:
    match data:
        case {"tensor": dict(tensor)}:
            return _zeros(tensor)
        case {"mapping": list(pairs)}:
            return {decode(key): _made(item) for key, item in pairs}
        case {"items": list(items)}:
            return tuple(map(_made, items))
        case {"list": list(items)}:
            return [_made(item) for item in items]
    return decode(data["value"])


def _zeros(data: Mapping[str, Any]) -> torch.Tensor:
    shape, strides, offset = data["shape"], data["strides"], int(data["offset"])
    dtype = getattr(torch, data["dtype"])
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
    tensor = blank.zeros((offset + reach,), dtype).as_strided(shape, strides, offset)
    if data["values"] is not None and not any(stride == 0 for stride in strides):
        tensor.copy_(torch.tensor(data["values"], dtype=dtype).reshape(shape))
    return tensor
