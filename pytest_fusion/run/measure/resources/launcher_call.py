"""A call of a launcher as plain data: which function, with which values, and what its tensors look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_fusion.run.measure.resources.constants import decode, encode
from pytest_fusion.run.measure.resources.specialisation import Json


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
    return Call(encode(function), {name: encode(value) for name, value in arguments.items()}, backward)


def made(call: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The function and its arguments, with tensors of zeros in host memory. Raises ``NotFoundError``."""
    return decode(call["function"]), {name: decode(value) for name, value in call["arguments"].items()}
