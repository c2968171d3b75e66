"""Drawn values as JSON and back: plain types, tuples, dtypes, enums and importable functions; never a pickle."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable
from typing import Any

from pytest_fusion.errors import ReplayError
from pytest_fusion.spec.importable import at, path_of


def _unknown(_: Any) -> Any:
    return NotImplemented


def encode(
    value: Any,
    special: Callable[[Any], Any] = _unknown,
    otherwise: Callable[[Any], Any] = lambda value: {"opaque": repr(value)},
) -> Any:
    """JSON for a drawn value; one without becomes ``{"opaque": repr}``, which does not replay.

    ``special`` comes first, inside containers too, and returns ``NotImplemented`` for what it does not know.
    ``otherwise`` encodes or refuses the rest.
    """
    if (data := special(value)) is not NotImplemented:
        return data
    match value:
        case enum.Enum():  # first, because a StrEnum is a str and an IntEnum an int
            return {"enum": path_of(type(value)), "name": value.name}
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case list():
            return [encode(item, special, otherwise) for item in value]
        case tuple():
            return {"tuple": [encode(item, special, otherwise) for item in value]}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: encode(item, special, otherwise) for key, item in value.items()}}
    if str(value).startswith("torch.") and type(value).__name__ == "dtype":
        return {"dtype": str(value)}
    if callable(value) and hasattr(value, "__qualname__"):
        # torch.relu and others have no module, and a qualified name that cannot be imported.
        for path in (path_of(value), f"torch:{value.__name__}"):
            with contextlib.suppress(ImportError, AttributeError, ValueError):
                if at(path) is value:
                    return {"import": path}
    return otherwise(value)


def written(data: Any) -> str:
    """A value from :func:`encode` as in Python: ``(0.0, inf)``, ``torch.float16``, ``Mode.FAST``, ``torch.relu``."""
    match data:
        case list():
            return f"[{', '.join(written(item) for item in data)}]"
        case {"tuple": list(items)}:
            return f"({', '.join(written(item) for item in items)}{',' if len(items) == 1 else ''})"
        case {"dict": dict(items)}:
            return f"{{{', '.join(f'{key!r}: {written(item)}' for key, item in items.items())}}}"
        case {"enum": str(path), "name": str(name)}:
            return f"{path.partition(':')[2]}.{name}"
        case {"import": str(path)}:
            return path.replace(":", ".")
        case {"float": str(text)} | {"dtype": str(text)} | {"opaque": str(text)}:
            return text
    return repr(data)


def decode(data: Any, special: Callable[[dict[str, Any]], Any] = _unknown) -> Any:
    """The value given to :func:`encode`; raises ``ReplayError`` for an opaque or foreign one.

    ``special`` decodes other JSON objects, or returns ``NotImplemented``.
    """
    if isinstance(data, list):
        return [decode(item, special) for item in data]
    if not isinstance(data, dict):
        return data
    try:
        if (value := special(data)) is not NotImplemented:
            return value
        match data:
            case {"tuple": list(items)}:
                return tuple(decode(item, special) for item in items)
            case {"dict": dict(items)}:
                return {key: decode(item, special) for key, item in items.items()}
            case {"float": str(text)}:
                return float(text)
            case {"dtype": str(text)}:
                return at(text.replace(".", ":", 1))
            case {"import": str(path)}:
                return at(path)
            case {"enum": str(path), "name": str(name)}:
                return at(path)[name]
    except (ImportError, AttributeError, ValueError, KeyError) as error:
        raise ReplayError(f"the drawn value {data} cannot be found here: {error}") from None
    if "opaque" in data:
        raise ReplayError(
            f"the drawn value {data['opaque']} has no JSON form, so its case cannot be replayed from a file; draw "
            "plain values, enums, dtypes or importable functions instead"
        )
    raise ReplayError(f"not a drawn value: {data}")
