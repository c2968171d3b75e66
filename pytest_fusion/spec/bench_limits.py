"""`bench_limits=`: what a kernel may cost at most, whatever it cost before."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.wording import did_you_mean

# What each name bounds, for messages.
NAMES = {
    "latency_ratio": "time of the fused call over the reference's, at most, such as 0.5",
    "copy_bandwidth": "share of this device's measured copy bandwidth, at least, such as 0.8",
    "peak_memory": "bytes at most, such as 67108864 or '64 MiB'",
}
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def as_bench_limits(given: Any, name: str) -> dict[str, float]:
    """``given`` with numbers for all values: a ratio, a share, bytes. ``name`` is the spec's, for messages.

    Raises ``SpecError`` for what is no mapping, a name that is none, and a value that cannot be met or always is.
    """
    if not isinstance(given, Mapping):
        raise SpecError(f"{name}: bench_limits={given!r}; expected a dict such as {{'latency_ratio': 0.5}}")
    for limit in given:
        if limit not in NAMES:
            raise SpecError(f"{name}: bench_limits= has {limit!r}{did_you_mean(str(limit), NAMES)}")
    return {
        limit: _value(limit, value, f"{name}: bench_limits={{{limit!r}: {value!r}}}") for limit, value in given.items()
    }


def _value(limit: str, value: Any, where: str) -> float:
    if limit == "peak_memory":
        return _bytes(value, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise SpecError(f"{where}; expected a number above 0: {NAMES[limit]}")
    if limit == "copy_bandwidth" and value > 1:
        raise SpecError(f"{where}; expected a share from 0 to 1: {NAMES[limit]}")
    return float(value)


def _bytes(value: Any, where: str) -> int:
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if found is None:
            raise SpecError(f"{where}; expected {NAMES['peak_memory']}")
        number, unit = found.groups()
        if unit.lower() not in _UNITS:
            known = ("B", "kB", "MB", "GB", "KiB", "MiB", "GiB")
            raise SpecError(f"{where}; {unit!r} is no unit of bytes{did_you_mean(unit, known)}")
        return int(float(number) * _UNITS[unit.lower()])
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SpecError(f"{where}; expected {NAMES['peak_memory']}")
    return value
