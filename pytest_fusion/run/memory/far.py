"""A guarded tensor of few elements, gigabytes apart, with untouched gaps; and whether a device has room for one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from pytest_fusion.case.layouts import Geometry
from pytest_fusion.run.memory.damage import Damage, Part, Zone
from pytest_fusion.run.memory.region import Region

# A smaller gap takes a fraction of a second to fill and compare.
_SMALLEST_BYTES = 1 << 30
_SPARSE = 64
# Inputs of two calls, one under each fill, exist at once; a third call explains a difference.
_COPIES = 3
_GB = 1e9


def goes_far(plan: Geometry, itemsize: int) -> bool:
    """Whether a tensor fills so little of its storage that this must not be touched as a whole."""
    return plan.storage * itemsize >= _SMALLEST_BYTES and plan.storage > _SPARSE * math.prod(plan.shape)


def lacking(storages: Iterable[int], device: torch.device) -> str | None:
    """Why inputs with these storages do not fit; ``None`` if they do, or on the CPU, where mapping them shows it."""
    if device.type != "cuda":
        return None
    wanted = _COPIES * sum(storages)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if wanted <= free:
        return None
    return f"offsets beyond 2^31 need {wanted / _GB:.0f} GB, and {free / _GB:.0f} GB of {device} are free"


class FarRegion(Region):
    """A :class:`Region` whose gaps are zero and unchecked. On the CPU only written pages exist, some KB of 8 GB:
    filling or comparing would need it all. The CPU lane sees stores into gaps; a GPU does not, but a wrapped offset is
    before the storage anyway."""

    def _spread(self) -> None:
        if self._words.device.type != "cpu":
            self._words.zero_()
        self._fill_guards()

    @property
    def ungapped(self) -> bool:
        return True

    def damage(self) -> list[Damage]:
        """Changes in the guards and in the slack beyond them; synchronises with the device."""
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
