"""The values of masked-off lanes of a load without ``other``, which Triton leaves undefined.

Results are judged with 0 there, as NVIDIA's code generator uses today; poison shows whether they depend on it. No
number exposes every kernel (maxima ignore NaN, minima large numbers): lanes have NaN and both large signs in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, is_float, poison
from pytest_fusion.interpreter.memory import memory_findings
from pytest_fusion.interpreter.memory.memory_findings import Site
from pytest_fusion.interpreter.scoped import holding

Fill = Literal["poison", "zero"]

# Finite where the dtype allows it, so that a sum of a few is not infinite; the same as memory's own large fill.
_HUGE = 1e30
_COUNT = 61


@dataclass(slots=True)
class _Settings:
    """``fill``: ``None`` for none chosen. ``poisoned``: a line that gets poison anyway. ``met``: lines so far."""

    fill: Fill | None = None
    poisoned: Site | None = None
    met: dict[Site, None] | None = None


_settings = _Settings()


@contextmanager
def masked_fill(fill: Fill, *, poisoned: Site | None = None) -> Iterator[dict[Site, None]]:
    """Give masked-off lanes ``"poison"`` (the default) or ``"zero"``, except in the line ``poisoned``.

    Yields the lines with masked-off loads without ``other``, in order of first run, complete at the end of the block.
    """
    met: dict[Site, None] = {}
    with holding(_settings, fill=fill, poisoned=poisoned, met=met):
        yield met


def judged_lanes() -> AbstractContextManager[dict[Site, None]]:
    """``masked_fill`` with an outer one's choice, else zero."""
    return masked_fill(_settings.fill or "zero", poisoned=_settings.poisoned)


def masked_lanes(dtype: np.dtype[Any], mask: Array | None, shape: tuple[int, ...]) -> Array:
    """The value of a load of ``dtype`` and ``shape`` (programs, *block) without ``other`` where ``mask`` is false."""
    if mask is None or mask.all():
        return np.asarray(poison(dtype))  # for lanes that a check rejects
    here = memory_findings.site() if _settings.met is not None else None
    if here is not None and _settings.met is not None:
        _settings.met[here] = None
    zero = _settings.fill == "zero" and (here is None or here != _settings.poisoned)
    return np.zeros((), dtype) if zero else _poisoned(dtype, shape[1:])


@lru_cache(maxsize=256)
def _poisoned(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Poison, a value far above 0 and one far below, in turn along each axis: (1, *shape)."""
    turn = np.indices(shape, dtype=np.uint8).sum(axis=0, dtype=np.uint8) % 3
    above, below = _huge_of(dtype)
    # A number that a loop counts to stays small enough for the loop to end.
    first = dtype.type(_COUNT) if not shape and dtype.kind in "iu" else poison(dtype)
    lanes: Array = np.where(turn == 0, first, np.where(turn == 1, above, below))[None]
    lanes.flags.writeable = False  # shared by all loads of the shape
    return lanes


def _huge_of(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if dtype == np.bool_:
        return np.False_, np.False_
    if is_float(dtype):
        huge = np.array([_HUGE, 57344.0, 448.0, 240.0], np.float32)
        held = huge.astype(dtype)
        fits = held.astype(np.float32)
        fits = fits[np.isfinite(fits) & (fits > 0)][:1]
        return fits.astype(dtype)[0], (fits / -2).astype(dtype)[0]
    least = np.iinfo(dtype).min
    return poison(dtype), dtype.type(least + np.iinfo(dtype).max // 16 if least else 0)
