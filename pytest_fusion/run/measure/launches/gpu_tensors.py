"""Which tensors of a call would be on the GPU, inferred on a machine where all are in host memory.

A launcher's own small host tensors (``torch.tensor([3, 5])``, lengths that it adds up) launch nothing on a GPU. A
tensor counts as the device's once that is proved: it is an argument or computed from one, a Triton kernel gets it, an
operator for one device combines it with a device tensor, or the call returns it. Until then its work is pending.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_fusion.run.measure.launches.operator_launches import Work


class Places:
    """The storages of a call and the work that computes them. ``known``: on a GPU, where tensors have own devices."""

    def __init__(self, *, known: bool = False) -> None:
        self.known = known
        # By address of the StorageImpl, which is not reused while a weak reference exists.
        self._groups: dict[int, int] = {}
        self._alive: dict[int, StorageWeakRef] = {}
        self._parents: list[int] = []
        self._device: set[int] = set()
        self._host: set[int] = set()
        self._work: list[tuple[int, Work]] = []
        self._by_address: dict[int, int] = {}

    def proved(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark these as on the device, with all tensors known to share their place."""
        for tensor in tensors:
            key = self._key(tensor)
            if key is not None:
                self._device.add(self._root(key))

    def proved_at(self, address: int) -> None:
        """Mark the storage that begins at this address, which an interpreted kernel gets, as on the device."""
        key = self._by_address.get(address)
        if key is not None and not self._alive[key].expired():  # type: ignore[no-untyped-call]
            self._device.add(self._root(key))

    def on_host(self, tensor: torch.Tensor) -> None:
        """Mark a tensor as the host's: made without a device, or copied to the CPU."""
        key = self._key(tensor)
        if key is not None and not self.known and self._root(key) not in self._device:
            self._host.add(key)

    def to_device(self, tensor: torch.Tensor) -> None:
        """Mark a tensor as copied to a device; the work that computed it stays the host's."""
        key = self._key(tensor)
        if key is not None and not self.known:
            self._host.discard(key)

    def is_host(self, tensor: torch.Tensor) -> bool:
        return self._key(tensor) in self._host

    def note(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], work: list[Work], *, mixed: bool) -> None:
        """Record an operator's work. ``mixed``: its tensors may be on several devices, as 0-dim ones always may."""
        sized = [t for t in inputs if t.dim()] or inputs
        if sized and all(map(self.is_host, sized)):
            for t in outputs:
                self.on_host(t)
            return
        inside = {key for t in sized if (key := self._key(t)) is not None and key not in self._host}
        made = {key for t in outputs if (key := self._key(t)) is not None}
        scalars = not any(t.dim() for t in inputs)
        if scalars and len({self._root(key) for key in inside}) > 1:
            inside = {key for key in inside if self._root(key) in self._device}
        if not mixed:
            self._join([*inside, *made])
        for key in made or inside:
            self._work += [(key, one) for one in work]
            break

    def work(self) -> list[Work]:
        """The work that is proved to run on the device, in order."""
        return [work for key, work in self._work if self._root(key) in self._device]

    def _join(self, keys: list[int]) -> None:
        roots = sorted({self._root(key) for key in keys})
        for other in roots[1:]:
            self._parents[other] = roots[0]
        if self._device.intersection(roots):
            self._device.add(roots[0])

    def _root(self, key: int) -> int:
        """The number of the group; groups have numbers because storages come and go."""
        group = self._groups[key]
        while self._parents[group] != group:
            self._parents[group] = self._parents[self._parents[group]]
            group = self._parents[group]
        return group

    def _key(self, tensor: torch.Tensor) -> int | None:
        try:
            storage: Any = tensor.untyped_storage()
            address = int(storage.data_ptr())
        except (RuntimeError, NotImplementedError):  # sparse, fake, wrapped
            return None
        key = int(storage._cdata)
        if address:
            self._by_address[address] = key
        if key not in self._groups:
            self._alive[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._groups[key] = len(self._parents)
            self._parents.append(len(self._parents))
            if self.known and tensor.device.type == "cuda":
                self._device.add(self._groups[key])
            elif self.known:
                self._host.add(key)
        return key
