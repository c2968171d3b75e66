"""Keywords of a spec in one form each, and inputs from annotations; a wrong value raises ``SpecError``."""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from operator import index
from typing import Any, SupportsIndex

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dims import Dim, dim
from pytest_fusion.spec.dtypes import FLOATING, INTEGER, KNOWN
from pytest_fusion.spec.inputs import InputSpec, OptionalSpec, tensor
from pytest_fusion.spec.wording import did_you_mean


def several(value: Any, single: Any = str) -> tuple[Any, ...]:
    """One value or several as a tuple; ``None`` is no value, and a value of type ``single`` is one."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, single) else (value,)


def names(value: Any, where: str, keyword: str) -> tuple[str, ...]:
    """One name or several; ``None`` is no name."""
    found = several(value)
    if not all(isinstance(name, str) for name in found):
        raise SpecError(f"{where}: {keyword}={value!r}; expected a name or several, such as {keyword}=('x', 'y')")
    return found


def exception_types(value: Any, where: str) -> tuple[type[BaseException], ...]:
    """One type of exception or several; ``None`` is no type."""
    found = several(value, str | type)
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise SpecError(
                f"{where}: rejects={kind!r} is not an exception type; expected one or several, such as ValueError"
            )
    return found


def count(value: Any, where: str, keyword: str) -> int | None:
    """A whole number of 0 or more, or ``None``."""
    if value is None:
        return None
    if not isinstance(value, SupportsIndex) or isinstance(value, bool) or index(value) < 0:
        raise SpecError(f"{where}: {keyword}={value!r}; expected a whole number of 0 or more")
    return index(value)


def reasons(value: Any, where: str, keyword: str, example: str) -> dict[str, str]:
    """The reason for each check left out, or each finding accepted; every report repeats it."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}: {keyword}={value!r}; expected a dict from names to reasons, such as {example}")
    for check, reason in value.items():
        if not isinstance(reason, str) or not reason.strip():
            raise SpecError(
                f"{where}: {keyword}={{{check!r}: {reason!r}}} gives no reason; say why in words, which reports repeat"
            )
    return dict(value)


def varying(value: Any, where: str) -> None:
    """Raises for anything but a dict from names to bools; a run checks that outputs have these names."""
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}: deterministic={value!r}; expected True, False or a dict such as {{'out': False}}")
    for name, same in value.items():
        if not isinstance(name, str) or not isinstance(same, bool):
            raise SpecError(f"{where}: deterministic={{{name!r}: {same!r}}}; expected a name and True or False")


def stated_inputs(value: Any, where: str) -> dict[str, Any]:
    """The specs in ``inputs=`` by name; it may be empty, as annotations may state the rest."""
    if value and not isinstance(value, Mapping):
        raise SpecError(f"{where}: inputs= is a {type(value).__name__}; expected a dict from names to inputs")
    return dict(value or {})


def inputs(value: Any, where: str) -> dict[str, Any]:
    """Inputs by name, one at least."""
    stated = stated_inputs(value, where)
    if not stated:
        raise SpecError(
            f"{where}: no inputs; pass inputs={{'x': tensor('rows hidden'), ...}} or annotate the test's "
            "parameters with jaxtyping, as in x: Float[Tensor, 'rows hidden']"
        )
    for name in stated:
        if not isinstance(name, str):
            raise SpecError(f"{where}: inputs={{{name!r}: ...}}; expected the name of a parameter")
    return stated


def bounds(value: Any, where: str) -> dict[str, Dim]:
    """Bounds of dims by name."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}: dims={value!r}; expected a dict from names to bounds, as in {{'rows': dim(min=1)}}")
    return {name: _bound(name, bound) for name, bound in value.items()}


def _bound(name: str, bound: Any) -> Dim:
    if isinstance(bound, Dim):
        return dim(bound.min, bound.max, multiple_of=bound.multiple_of)
    if isinstance(bound, int) and not isinstance(bound, bool):
        return dim(bound, bound)
    raise SpecError(f"dims={{{name!r}: {bound!r}}}: expected dim(min, max, multiple_of=...) or one integer")


def _is_array(annotation: Any) -> bool:
    """Whether it is jaxtyping's, by its attributes: jaxtyping is never imported."""
    return hasattr(annotation, "dim_str") and hasattr(annotation, "dtypes")


def _dtype_of(annotation: Any) -> Any:
    """The dtype argument of ``tensor``: ``None`` when every floating dtype is meant (``Float``, ``Shaped``)."""
    names = annotation.dtypes
    if not isinstance(names, list | tuple):
        return None  # jaxtyping's marker for "any dtype"
    known = [name for name in names if isinstance(name, str) and name in KNOWN]
    if "bool" in names or "bool_" in names:
        return "bool"
    if not known:
        raise SpecError(f"the annotation {annotation!r} names no dtype that torch has: {list(names)}")
    floating = [name for name in known if name in FLOATING]
    if len(floating) > 1:
        return None
    if not floating and len(known) > 1:
        # `Int` means any width; indices are int64 in PyTorch, int32 in most kernels.
        return [n for n in ("int64", "int32") if n in known] or [n for n in known if n in INTEGER] or known
    return known


def inputs_from_annotations(function: Callable[..., Any]) -> dict[str, InputSpec]:
    """Input specs of parameters like ``x: Float[Tensor, "rows hidden"]`` or that ``| None``; raises ``SpecError``."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # noqa: BLE001 - evaluating an annotation runs anything
        if not any("[" in str(a) for a in getattr(function, "__annotations__", {}).values()):
            return {}
        raise SpecError(f"cannot read the annotations of {function.__name__}: {error}") from None
    inputs: dict[str, InputSpec] = {}
    for name in inspect.signature(function).parameters:
        annotation: Any = hints.get(name)
        if _is_array(annotation):
            inputs[name] = tensor(annotation.dim_str, dtype=_dtype_of(annotation))
        else:
            members = [part for part in typing.get_args(annotation) if _is_array(part)]
            if len(members) == 1 and type(None) in typing.get_args(annotation):
                inputs[name] = OptionalSpec(tensor(members[0].dim_str, dtype=_dtype_of(members[0])))
    return inputs


# What each name bounds, for messages.
_LIMITS = {
    "latency_ratio": "time of the fused call over the reference's, at most, such as 0.5",
    "copy_bandwidth": "share of this device's measured copy bandwidth, at least, such as 0.8",
    "peak_memory": "bytes at most, such as 67108864 or '64 MiB'",
}
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def bench_limits(given: Any, name: str) -> dict[str, float]:
    """Limits as numbers: a ratio, a share, bytes. ``name`` is the spec's, for messages.

    Raises ``SpecError`` for anything but a mapping, an unknown name, and a limit that is never or always met.
    """
    if not isinstance(given, Mapping):
        raise SpecError(f"{name}: bench_limits={given!r}; expected a dict such as {{'latency_ratio': 0.5}}")
    for limit in given:
        if limit not in _LIMITS:
            raise SpecError(f"{name}: bench_limits= has {limit!r}{did_you_mean(str(limit), _LIMITS)}")
    return {
        limit: _value(limit, value, f"{name}: bench_limits={{{limit!r}: {value!r}}}") for limit, value in given.items()
    }


def _value(limit: str, value: Any, where: str) -> float:
    if limit == "peak_memory":
        return _bytes(value, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise SpecError(f"{where}; expected a number above 0: {_LIMITS[limit]}")
    if limit == "copy_bandwidth" and value > 1:
        raise SpecError(f"{where}; expected a share from 0 to 1: {_LIMITS[limit]}")
    return float(value)


def _bytes(value: Any, where: str) -> int:
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if found is None:
            raise SpecError(f"{where}; expected {_LIMITS['peak_memory']}")
        number, unit = found.groups()
        if unit.lower() not in _UNITS:
            known = ("B", "kB", "MB", "GB", "KiB", "MiB", "GiB")
            raise SpecError(f"{where}; {unit!r} is no unit of bytes{did_you_mean(unit, known)}")
        return int(float(number) * _UNITS[unit.lower()])
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SpecError(f"{where}; expected {_LIMITS['peak_memory']}")
    return value
