"""Copies of the inputs, called in turn, so that no call finds its inputs in a cache that the one before filled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from pytest_fusion.case.containers import map_tensors, tensors_of
from pytest_fusion.run.bits import storage_of
from pytest_fusion.run.measure.traffic import bytes_of
from pytest_fusion.run.memory.region import distinct

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
    All lie in one piece of memory for each device, because where they lie shows: eight times anew on an H200, ten
    copies of 33 MB made each for itself were read in 18.4 to 19.2 us, those in one piece in 18.8 to 18.9.
    """
    own = tensors_of(logical)
    size = max(1, bytes_of(own))
    made_sets = max(1, min(count, room // size))
    rooms: Counter[torch.device] = Counter()
    for t in own:
        rooms[t.device] += _room(t)
    pieces = {device: _Piece(made_sets * room, device) for device, room in rooms.items()}
    sets = [
        {name: map_tensors(value, lambda t: pieces[t.device].twin(t)) for name, value in logical.items()}
        for _ in range(made_sets)
    ]
    return [sets[i % made_sets] for i in range(count)], made_sets == count


# What torch's caching allocator aligns to.
_ALIGNMENT = 512


class _Piece:
    """Memory from which tensors are cut, one after the other."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._at = 0

    def twin(self, t: torch.Tensor) -> torch.Tensor:
        """A copy with the strides of ``t``, since another layout is another case; without them where elements overlap.

        Its storage is its own and holds nothing else.
        """
        if t.layout is not torch.strided or not t.numel():
            return t.clone()
        strides, extent = _laid(t)
        storage = storage_of(self._memory, self._at, extent)
        self._at += _room(t)
        made = torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, 0, t.shape, strides)
        return made.copy_(t)


def twin(t: torch.Tensor) -> torch.Tensor:
    """A copy placed like those of ``rotated``, in memory of its own."""
    return _Piece(_room(t), t.device).twin(t)


def _laid(t: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """The strides of a copy, and the bytes that it reaches over."""
    strides = t.stride()
    if t.is_contiguous() or not distinct(t.shape, strides):
        strides = torch.empty(t.shape, device="meta").stride()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, strides, strict=True))
    return strides, reach * t.element_size()


def _room(t: torch.Tensor) -> int:
    if t.layout is not torch.strided or not t.numel():
        return 0
    return -(-_laid(t)[1] // _ALIGNMENT) * _ALIGNMENT
