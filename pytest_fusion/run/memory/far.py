"""A guarded tensor of few elements that are gigabytes apart; the gaps between them are never touched.

And whether a device has room for tensors of gigabytes, checked before they are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from pytest_fusion.run.memory.damage import Damage, Part, Zone
from pytest_fusion.run.memory.region import Region

# Below this a gap is filled and compared in a fraction of a second.
_SMALLEST_BYTES = 1 << 30
_SPARSE = 64
# Inputs of two calls, under one fill and the other, are alive at once; a third finds out why they differ.
_COPIES = 3
_GB = 1e9


def goes_far(shape: Sequence[int], itemsize: int, storage_elements: int) -> bool:
    """Whether a tensor of this shape fills so little of its storage that this must not be touched as a whole."""
    return storage_elements * itemsize >= _SMALLEST_BYTES and storage_elements > _SPARSE * math.prod(shape)


def lacking(storages: Iterable[int], device: torch.device) -> str | None:
    """The reason why inputs with storages of these sizes do not fit; ``None`` where they do.

    On the CPU they are address space, for which there is no asking: it is refused or it is there.
    """
    if device.type != "cuda":
        return None
    wanted = _COPIES * sum(storages)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if wanted <= free:
        return None
    return f"offsets beyond 2^31 need {wanted / _GB:.0f} GB, and {free / _GB:.0f} GB of {device} are free"


class FarRegion(Region):
    """A :class:`Region` whose gaps are zero and are not looked at.

    On the CPU its pages exist only where somebody writes: 8 GB of address space, some KB of memory. Filling or
    comparing it would take the memory that it pretends to have. What a kernel writes there the CPU lane sees at the
    store; on a GPU it is not seen, but an offset that wrapped around lands before the storage anyway.
    """

    def _spread(self) -> None:
        if self._words.device.type != "cpu":
            self._words.zero_()
        self._fill_guards()

    @property
    def ungapped(self) -> bool:
        return True

    def damage(self) -> list[Damage]:
        """What changed in the guards and in the slack beyond them; synchronises with the device."""
        size = self._words.element_size()
        low, high = self._first, self._last
        found: dict[Zone, list[Part]] = {"before": [], "after": []}
        sides: tuple[tuple[Zone, int, int], ...] = (("before", 0, low), ("after", high, self._words.numel()))
        for zone, start, stop in sides:
            where = self._words[start:stop].ne(self._value).nonzero().flatten().cpu() + start
            if where.numel():
                away = low - where if zone == "before" else where - high + 1
                nearest, farthest = (-(-int(words) // self._per) for words in away.aminmax())
                found[zone].append((nearest, farthest, size * where.numel()))
        return self._with_strays(found, low, high)
