"""What masked-off lanes of a load without ``other`` hold, which Triton leaves undefined.

A value that is harmless to one reader is not to another: a maximum passes over NaN, a minimum over a large number. So
the lanes change with the fill that a call's fresh memory has, of which every case gets both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np

from pytest_fusion.interpreter.bridge import observers
from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, is_float, poison
from pytest_fusion.interpreter.memory import memory_findings
from pytest_fusion.interpreter.memory.memory_findings import Site

Fill = Literal["poison", "zero"]

# What these lanes yield in a whole process and its children: "zero", else poison.
ENVIRONMENT = "PYTEST_FUSION_UNDEFINED"
# Finite where the dtype holds it, so that a sum of few is no infinity, as memory's own large fill.
_HUGE = 1e30

_fill: Fill | None = None
_poisoned: Site | None = None
_met: dict[Site, None] | None = None
_huge = False


@contextmanager
def masked_fill(fill: Fill, *, poisoned: Site | None = None) -> Iterator[dict[Site, None]]:
    """What a masked-off load without ``other`` yields: ``"poison"`` (the default) or ``"zero"``, but in one line.

    Today's NVIDIA code generator happens to move zero into the register first. Yields the lines with such loads, in the
    order of their first one, complete when the body is done.
    """
    global _fill, _poisoned, _met
    before = _fill, _poisoned, _met
    _fill, _poisoned, _met = fill, poisoned, {}
    try:
        yield _met
    finally:
        _fill, _poisoned, _met = before


@contextmanager
def surrounded_by(fill: str) -> Iterator[None]:
    """Which poison it is: ``"huge"``, as of memory, is numbers far from 0 of both signs, any other one is NaN."""
    global _huge
    before, _huge = _huge, fill == "huge"
    try:
        yield
    finally:
        _huge = before


@cache
def asked_fill() -> Fill:
    """What the environment asks for; read once, because a call that must see no test has no such variables."""
    return "zero" if os.environ.get(ENVIRONMENT) == "zero" else "poison"


def masked_lanes(dtype: np.dtype[Any], mask: Array | None, shape: tuple[int, ...]) -> Array:
    """What a load of ``dtype`` and ``shape`` (programs, *block) without ``other`` has where ``mask`` is false."""
    fill = _fill or asked_fill()
    poisoned = _either(dtype, shape[1:]) if _huge and mask is not None else np.asarray(poison(dtype))
    if mask is None or (fill != "zero" and _met is None) or mask.all():
        return poisoned  # without a mask, or with all of it true, for what a check refuses
    if _met is None:
        observers.note(
            "masked lanes of a load without other= were 0, as --fusion-undefined zero asks for; Triton leaves them "
            "undefined"
        )
        return np.zeros((), dtype)
    here = memory_findings.site()
    _met[here] = None
    if fill == "zero" and here != _poisoned:
        return np.zeros((), dtype)
    return poisoned


@lru_cache(maxsize=256)
def _either(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Far above 0 and far below it in turn along each axis: (1, *shape)."""
    above, below = _huge_of(dtype)
    odd = np.indices(shape, dtype=np.uint8).sum(axis=0, dtype=np.uint8) % 2 == 1
    lanes: Array = np.where(odd, below, above)[None]
    lanes.flags.writeable = False  # one for all loads of the shape
    return lanes


def _huge_of(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if dtype == np.bool_:
        return np.False_, np.False_
    if is_float(dtype):
        huge = np.array([_HUGE, 57344.0, 448.0, 240.0], np.float32)
        held = huge.astype(dtype)
        fits = held.astype(np.float32)
        above = held[np.isfinite(fits) & (fits > 0)][0]
        return above, -above
    least = np.iinfo(dtype).min
    return poison(dtype), dtype.type(least + np.iinfo(dtype).max // 16 if least else 0)
