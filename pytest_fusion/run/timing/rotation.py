"""Copies of the inputs, called in turn, so that no call finds its inputs in a cache that the one before filled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from pytest_fusion.case.nested import map_tensors
from pytest_fusion.run.traffic import bytes_of

# In units of the last-level cache: what is touched between two calls on the same copy.
COLD = 5
# A sample holds at least so many calls, because a timer's own microsecond must not count, and at most so many, because
# capturing each takes time.
FEWEST, MOST = 10, 300


def copies_needed(touched: int, cache: int) -> int:
    """How many copies of what a call touches (bytes) fill ``COLD`` caches; within ``FEWEST`` to ``MOST``."""
    return min(MOST, max(FEWEST, math.ceil(COLD * cache / max(touched, 1))))


def rotated(logical: Mapping[str, Any], count: int, room: int) -> tuple[list[dict[str, Any]], bool]:
    """``count`` sets of arguments in tensors of their own; fewer where they would take more than ``room`` bytes.

    The second result says whether the sets are as many as asked for; else the calls share some, and are warmer.
    """
    own = [t for value in logical.values() for t in _tensors(value)]
    size = max(1, bytes_of(own))
    kept = max(1, min(count, room // size))
    sets = [{name: map_tensors(value, twin) for name, value in logical.items()} for _ in range(kept)]
    return [sets[i % kept] for i in range(count)], kept == count


def twin(t: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of ``t``, since another layout is another case; without them where elements overlap."""
    if t.is_contiguous() or _overlap(t):
        return t.clone()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def _overlap(t: torch.Tensor) -> bool:
    """Whether two elements may lie in one place: a dim steps no further than those inside of it reach."""
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        found.append(t)
        return t

    map_tensors(value, note)
    return found
