"""Any value as exact builtin JSON types, the only ones that survive JSON, execnet and JUnit alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def plain(value: Any, *, finite: bool = True) -> Any:
    """``value`` as a new :data:`Plain`.

    Scalars of numpy and torch become Python numbers (one ``numpy.float64`` in a report ends a pytest-xdist run
    with execnet's ``DumpError``), sets become sorted lists, dataclasses dicts, paths and everything unknown text.
    With ``finite`` (strict JSON has no NaN) non-finite floats become ``"nan"``, ``"inf"``, ``"-inf"``.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value, finite=finite)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) or not finite else str(number)
    if isinstance(value, str):
        return _encodable(str(value))
    if isinstance(value, Mapping):
        return {_key(key): plain(item, finite=finite) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((plain(item, finite=finite) for item in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(item, finite=finite) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), finite=finite) for field in fields(value)}
    return _foreign(value, finite)


def _foreign(value: Any, finite: bool) -> Any:
    """A number inside an object of numpy or torch (``tolist`` of no dimension), else the object's text."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "tolist", None)):
        inner = value.tolist()
        if isinstance(inner, bool | int | float | str):
            return plain(inner, finite=finite)
    return _encodable(str(value))


def _key(key: Any) -> str:
    return _encodable(key) if isinstance(key, str) else str(plain(key))


def _encodable(text: str) -> str:
    """Lone surrogates (undecodable bytes of a child's stderr) cannot be written as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
