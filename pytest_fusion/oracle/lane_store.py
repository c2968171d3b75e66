"""Lane values of the live native storages: every view of a storage is the same view of its lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_fusion.oracle.rounding import D


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of one tensor: ``raw`` (before the last rounding) and ``rounded`` (what consumers read).

    Both are ``(L, *shape)`` with L = 1 or 1 + K, float64 or the integer dtype. ``terms`` is the length of the product
    that made it (1: none), squared if its terms are equal (``drift``). ``wider``: after a conversion from a tensor
    rounded to ``narrow``, that tensor before the rounding. ``spread`` (1, *shape): for a product of 16-bit factors, the
    error of rounding these once more. ``chain`` (3, *shape): for a chain of additions, squares, variance given and
    number of terms (``chains.Terms``).
    """

    raw: Tensor
    rounded: Tensor
    terms: int = 1
    wider: Tensor | None = None
    narrow: torch.dtype | None = None
    spread: Tensor | None = None
    chain: Tensor | None = None

    @property
    def single(self) -> bool:
        """True when nothing was rounded yet: raw and rounded are one tensor."""
        return self.raw is self.rounded

    @property
    def bare(self) -> Lanes:
        """The lanes without what is known of how they were computed."""
        return Lanes(self.raw, self.rounded, self.terms)

    def each(self, change: Callable[[Tensor], Tensor]) -> Lanes:
        """The lanes with ``change`` applied to every tensor."""
        raw = change(self.raw)
        wider, spread, chain = (None if v is None else change(v) for v in (self.wider, self.spread, self.chain))
        return Lanes(raw, raw if self.single else change(self.rounded), self.terms, wider, self.narrow, spread, chain)


@dataclass(frozen=True, slots=True)
class Marks:
    """Where the values of a whole storage come from.

    ``unwritten``: memory from ``empty`` that no known operation wrote. ``widened``: the 16-bit dtype that they were
    converted from; ``source``: a 16-bit dtype that they were computed from, among others. ``codes``: converted from
    integers or flags. ``eighth``: float8 numbers, possibly times factors that a kernel may apply to the sum.
    ``largest``: the storage whose largest values they are.
    """

    owner: StorageWeakRef
    unwritten: bool = False
    widened: torch.dtype | None = None
    source: torch.dtype | None = None
    codes: bool = False
    eighth: bool = False
    largest: StorageWeakRef | None = None


_NOTHING = Marks(StorageWeakRef(torch.UntypedStorage()))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Entry:
    """Lanes of one storage, flat: (L, n)."""

    owner: StorageWeakRef
    dtype: torch.dtype
    lanes: Lanes


class Store:
    """Maps native storages to lanes, without keeping either alive.

    The key is the storage, so that views, aliases, ``detach`` and autograd's saved tensors share lanes and writes.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._entries: dict[int, Entry] = {}
        self._marks: dict[int, Marks] = {}

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def shares(self, one: Tensor, other: Tensor) -> bool:
        """Whether both are in one storage."""
        return self._key(one) == self._key(other)

    def tracks(self, tensor: Tensor) -> bool:
        return self._key(tensor) in self._entries

    def follows(self, tensor: Tensor) -> bool:
        """Whether its values may differ from the native ones: it has lanes, or a foreign kernel wrote it."""
        return self.tracks(tensor) or self.marks(tensor).unwritten

    def read(self, tensor: Tensor) -> Lanes | None:
        """The lanes of ``tensor``; None where no rounding touched it, so that the native value is exact."""
        entry = self._entries.get(self._key(tensor))
        if entry is None or entry.lanes.rounded.shape[1] < _elements(tensor, entry.dtype):
            return None
        if entry.dtype == tensor.dtype:
            return entry.lanes.each(lambda flat: self._window(flat, tensor))
        if entry.dtype.itemsize != tensor.dtype.itemsize:
            return None
        # A bit pattern read through another dtype of the same width (fp8 codes as uint8), in every lane.
        codes = entry.lanes.rounded.to(entry.dtype).view(tensor.dtype)
        seen = self._window(codes, tensor)
        seen = seen.to(D) if tensor.dtype.is_floating_point else seen
        return Lanes(seen, seen)

    @staticmethod
    def _window(flat: Tensor, tensor: Tensor) -> Tensor:
        return flat.as_strided(
            (flat.shape[0], *tensor.shape), (flat.stride(0), *tensor.stride()), tensor.storage_offset()
        )

    def covers(self, tensor: Tensor) -> bool:
        """True when ``tensor`` is its whole storage, each element once and in order."""
        elements = _elements(tensor, tensor.dtype)
        return tensor.storage_offset() == 0 and tensor.numel() == elements and tensor.is_contiguous()

    def put(self, tensor: Tensor, lanes: Lanes) -> None:
        """Make ``lanes`` those of a freshly made ``tensor``."""
        self._sweep()
        flat = lanes.each(lambda value: self._flat(tensor, value))
        self._entries[self._key(tensor)] = Entry(weak(tensor), tensor.dtype, flat)

    def _flat(self, tensor: Tensor, value: Tensor) -> Tensor:
        if self.covers(tensor):
            return value.reshape(value.shape[0], -1).contiguous()
        elements = _elements(tensor, tensor.dtype)
        flat = torch.zeros((value.shape[0], elements), dtype=value.dtype, device=value.device)
        self._window(flat, tensor).copy_(value)
        return flat

    def capture(self, tensor: Tensor) -> None:
        """Give the whole storage of ``tensor`` lanes of its present content, ahead of a partial write."""
        key = self._key(tensor)
        storage, elements = tensor.untyped_storage(), _elements(tensor, tensor.dtype)
        if key in self._entries and self._entries[key].lanes.rounded.shape[1] == elements:
            return
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (elements,), (1,))
        value = whole.to(D, copy=True) if tensor.dtype.is_floating_point else whole.clone()
        flat = value.unsqueeze(0)
        self._entries[key] = Entry(weak(tensor), tensor.dtype, Lanes(flat, flat))

    def write(self, tensor: Tensor, lanes: Lanes) -> None:
        """Replace the values seen through ``tensor``, in every view of its storage."""
        if self.covers(tensor):
            self.put(tensor, lanes)
            return
        # ``out=`` may have resized the storage since it was captured.
        self.capture(tensor)
        entry = self._entries[self._key(tensor)]
        own = Lanes(self._own(entry.lanes.raw), self._own(entry.lanes.rounded), entry.lanes.terms)
        self._window(own.raw, tensor).copy_(lanes.raw)
        self._window(own.rounded, tensor).copy_(lanes.rounded)
        self._entries[self._key(tensor)] = replace(entry, lanes=own)

    def _own(self, flat: Tensor) -> Tensor:
        return flat.expand(self.width, -1).clone(memory_format=torch.contiguous_format)

    def forget(self, tensor: Tensor) -> None:
        """Drop the lanes of a storage that exact values overwrite in full."""
        self._entries.pop(self._key(tensor), None)

    def marks(self, tensor: Tensor) -> Marks:
        return self._marks.get(self._key(tensor), _NOTHING)

    def mark(self, tensor: Tensor, **facts: Any) -> None:
        found = self._marks.get(self._key(tensor)) or Marks(weak(tensor))
        self._marks[self._key(tensor)] = replace(found, **facts)

    def unmark(self, tensor: Tensor) -> None:
        """Drop the marks of a storage: other values are written."""
        self._marks.pop(self._key(tensor), None)

    def is_largest(self, tensor: Tensor, source: Tensor) -> bool:
        """Whether ``tensor`` holds the largest values of the storage of ``source``."""
        largest = self.marks(tensor).largest
        return largest is not None and largest == weak(source)

    def _sweep(self) -> None:
        # A StorageWeakRef prevents reuse of a dead storage's address, so keys stay valid; this frees lanes.
        for table in (self._entries, self._marks):
            for key in [key for key, held in table.items() if held.owner.expired()]:  # type: ignore[no-untyped-call]
                del table[key]


def weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _elements(tensor: Tensor, dtype: torch.dtype) -> int:
    return tensor.untyped_storage().nbytes() // dtype.itemsize


def exact_lanes(tensor: Tensor) -> Lanes:
    """Lanes of a native tensor that no rounding has touched."""
    if tensor.dtype.is_floating_point:
        value = tensor.detach().to(D, copy=tensor.dtype == D).unsqueeze(0)
    else:
        value = tensor.detach().unsqueeze(0)
    return Lanes(value, value)
