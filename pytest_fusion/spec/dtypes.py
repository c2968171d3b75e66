"""Dtypes by name; records hold these strings instead of torch's objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.wording import did_you_mean

# The simplest first: shrinking goes to the left.
FLOATING = tuple("float32 float16 bfloat16 float64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz".split())
NARROW = frozenset({"float16", "bfloat16"})
INTEGER = tuple("int32 int64 int16 int8 uint8 uint16 uint32 uint64".split())
KNOWN: tuple[str, ...] = (*FLOATING, *INTEGER, "bool", "complex64", "complex128")
_ALIASES = {"float": "float32", "half": "float16", "double": "float64", "int": "int32", "long": "int64"}


def dtype_name(dtype: Any, *, where: str = "") -> str:
    """``torch.float16``, ``"float16"``, ``float`` or ``bool`` as a name; raises ``SpecError``."""
    if dtype is bool:
        return "bool"
    text = dtype if isinstance(dtype, str) else str(dtype)
    name = text.removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in KNOWN:
        place = f"{where}: " if where else ""
        raise SpecError(f"{place}unknown dtype {dtype!r}{did_you_mean(name, KNOWN)}")
    return name


def normalise_dtypes(dtypes: Any, *, where: str = "") -> tuple[str, ...]:
    """One dtype or several as a tuple of distinct names; raises ``SpecError`` on none."""
    if isinstance(dtypes, str) or not isinstance(dtypes, Iterable):
        dtypes = (dtypes,)
    names = tuple(dict.fromkeys(dtype_name(dtype, where=where) for dtype in dtypes))
    if not names:
        raise SpecError(f"{where}: no dtype is left to draw from")
    return names


def simplicity(name: str) -> int:
    """Rank for shrinking: 0 is the plainest."""
    return KNOWN.index(name)
