"""The values of masked-off lanes of a load without ``other``, which Triton leaves undefined.

No single value exposes every kernel that uses them: a maximum ignores NaN, a minimum ignores a large number. So the
lanes follow the fill of the call's fresh memory, and every case runs with both fills.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np

from pytest_fusion.interpreter.bridge import lane_state
from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, is_float, poison
from pytest_fusion.interpreter.memory import memory_findings
from pytest_fusion.interpreter.memory.memory_findings import Site
from pytest_fusion.interpreter.scoped import holding

Fill = Literal["poison", "zero"]

# What these lanes hold in a whole process and its children: "zero", else poison.
ENVIRONMENT = "PYTEST_FUSION_UNDEFINED"
# Finite where the dtype allows it, so that a sum of a few is not infinite; the same as memory's own large fill.
_HUGE = 1e30


@dataclass(slots=True)
class _Settings:
    """``fill``: ``None`` for the environment's. ``poisoned``: a line that gets poison anyway. ``met``: lines so far."""

    fill: Fill | None = None
    poisoned: Site | None = None
    met: dict[Site, None] | None = None
    huge: bool = False


_settings = _Settings()


@contextmanager
def masked_fill(fill: Fill, *, poisoned: Site | None = None) -> Iterator[dict[Site, None]]:
    """Give masked-off lanes ``"poison"`` (the default) or ``"zero"``, except in the line ``poisoned``.

    NVIDIA's code generator today moves zero into the register first. Yields the lines that have masked-off loads
    without ``other``, in the order in which they first ran; the dict is complete when the block ends.
    """
    met: dict[Site, None] = {}
    with holding(_settings, fill=fill, poisoned=poisoned, met=met):
        yield met


def surrounded_by(fill: str) -> AbstractContextManager[None]:
    """Choose the poison: for ``"huge"`` numbers far from 0 of both signs, as memory's fill has, else NaN."""
    return holding(_settings, huge=fill == "huge")


@cache
def environment_fill() -> Fill:
    """The fill that the environment sets; read once, because calls hide the test's variables from the kernel."""
    return "zero" if os.environ.get(ENVIRONMENT) == "zero" else "poison"


def masked_lanes(dtype: np.dtype[Any], mask: Array | None, shape: tuple[int, ...]) -> Array:
    """What a load of ``dtype`` and ``shape`` (programs, *block) without ``other`` has where ``mask`` is false."""
    fill, met = _settings.fill or environment_fill(), _settings.met
    poisoned = _either(dtype, shape[1:]) if _settings.huge and mask is not None else np.asarray(poison(dtype))
    if mask is None or (fill != "zero" and met is None) or mask.all():
        return poisoned  # for lanes that a check refuses
    if met is None:
        lane_state.note(
            "masked lanes of a load without other= were 0, because of --fusion-undefined zero; Triton leaves them "
            "undefined"
        )
        return np.zeros((), dtype)
    here = memory_findings.site()
    met[here] = None
    return np.zeros((), dtype) if fill == "zero" and here != _settings.poisoned else poisoned


@lru_cache(maxsize=256)
def _either(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Values far above and far below 0, alternating along each axis: (1, *shape)."""
    above, below = _huge_of(dtype)
    odd = np.indices(shape, dtype=np.uint8).sum(axis=0, dtype=np.uint8) % 2 == 1
    lanes: Array = np.where(odd, below, above)[None]
    lanes.flags.writeable = False  # shared by all loads of the shape
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
