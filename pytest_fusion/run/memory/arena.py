"""The tensors of one case, each inside guard zones that torch does not know."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_fusion.case.layouts import Geometry
from pytest_fusion.run import pristine
from pytest_fusion.run.memory.damage import Change, Damage
from pytest_fusion.run.memory.region import FarRegion, Region, goes_far, which


class Arena:
    """Guarded memory for the tensors of one case on ``device``; lives as long as the arena or any of its tensors.

    Make the tensors, write their values, ``snapshot``, run the kernel, then read ``damage`` and ``changed``. For the
    second fill, ``refill``, write again values that the kernel may change, and run again at the same addresses.
    ``guard_bytes`` is rounded up to a multiple of 256; its default depends on the device.
    """

    def __init__(self, device: torch.device, fill: str, guard_bytes: int | None = None) -> None:
        self.device = device
        self.fill = fill
        self._guard_bytes = guard_bytes
        self._regions: list[Region] = []

    def tensor(self, name: str, plan: Geometry, dtype: torch.dtype) -> Tensor:
        """A tensor full of the fill in a storage of exactly ``plan.storage`` elements, 256-byte aligned; with elements
        gigabytes apart full of zeros, with unchecked gaps. Raises ``ValueError`` for a layout that leaves the storage,
        ``MemoryError`` without room."""
        kind = FarRegion if goes_far(plan, dtype.itemsize) else Region
        # Odd variants are Watch's: an input's fill never equals an output's.
        variant, guard = 2 * len(self._regions), self._guard_bytes
        region = kind(name, plan, dtype, self.device, fill=self.fill, variant=variant, guard_bytes=guard)
        self._regions.append(region)
        return region.tensor()

    def again(self, name: str) -> Tensor:
        """Another tensor object in the memory of the tensor of that name, with a version counter of its own."""
        return next(region for region in self._regions if region.name == name).tensor()

    def region(self, address: int) -> Region | None:
        """The region whose storage begins at ``address``."""
        return next((region for region in self._regions if region.address == address), None)

    def blocks(self) -> frozenset[int]:
        """Addresses of the guarded blocks."""
        return frozenset(region.block for region in self._regions)

    def sizes(self) -> list[int]:
        """Bytes of the guarded blocks."""
        return [region.nbytes for region in self._regions]

    def damage(self) -> list[Damage]:
        """Writes outside the tensors' own elements since the last fill; one synchronisation if there are none. Raises
        ``RuntimeError`` when the device's context is lost."""
        return find_damage(self._regions, self.device)

    def snapshot(self) -> None:
        """Store the bits of every tensor's own elements."""
        for region in self._regions:
            region.save()

    def changed(self) -> list[Change]:
        """Tensors whose own elements differ in any bit from the snapshot; one synchronisation when none does."""
        saved = [(region, flag) for region in self._regions if (flag := region.altered()) is not None]
        suspects = which([flag for _, flag in saved])
        return [region.change() for (region, _), altered in zip(saved, suspects, strict=True) if altered]

    def altered(self) -> dict[str, Tensor]:
        """Whether each tensor, by name, is changed now, as a 0-dim bool on its device, without a synchronisation."""
        return {region.name: flag for region in self._regions if (flag := region.altered()) is not None}

    def refill(self, fill: str) -> None:
        """Put ``fill`` into all guards and gaps; own elements keep their values."""
        self.fill = fill
        for region in self._regions:
            region.refill(fill)


def find_damage(regions: Sequence[Region], device: torch.device) -> list[Damage]:
    """The damage of all ``regions``, after all work queued on ``device``."""
    if device.type == "cuda" and regions:
        pristine.synchronize(device)  # the kernel may have run on another stream
    suspects = which([region.suspicion() for region in regions])
    return [
        damage
        for region, suspicious in zip(regions, suspects, strict=True)
        if suspicious or region.strayed()
        for damage in region.damage()
    ]
