"""Lane values of the live native storages: every view of a storage is the same view of its lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_fusion.oracle.rounding import D

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


@dataclass(slots=True)
class Entry:
    """Lanes of one storage, flat: ``raw`` (before the last rounding) and ``rounded`` (what consumers read), (L, n).

    ``terms`` is the length of the product that made it (1: none), its square where its terms are equal (``drift``).
    ``wider``, ``narrow``, ``spread`` and ``chain`` are those of ``Lanes``, flat too.
    """

    owner: StorageWeakRef
    dtype: torch.dtype
    raw: Tensor
    rounded: Tensor
    terms: int = 1
    wider: Tensor | None = None
    narrow: torch.dtype | None = None
    spread: Tensor | None = None
    chain: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of one tensor: float64 (or the integer dtype), ``(L, *shape)`` with L = 1 or 1 + K.

    Where a conversion made it from a tensor that had been rounded to ``narrow``, ``wider`` is what that was before. Of
    a product of 16-bit factors ``spread`` (1, *shape) is what it costs to round the factors to that once more. Of a
    chain of additions ``chain`` (3, *shape) is what ``chains.Terms`` has: squares, variance given, number of terms.
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


class Store:
    """Maps native storages to lanes, without keeping either alive.

    Keyed by storage, not by tensor: views, aliases, ``detach`` and autograd's saved tensors are found without
    following the operations that made them, and a write through any of them is seen by all.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._entries: dict[int, Entry] = {}
        self._unwritten: dict[int, StorageWeakRef] = {}
        self._widened: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}
        self._computed: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}
        self._eighths: dict[int, StorageWeakRef] = {}
        self._codes: dict[int, StorageWeakRef] = {}
        self._largest: dict[int, tuple[StorageWeakRef, tuple[int, StorageWeakRef]]] = {}

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def shares(self, one: Tensor, other: Tensor) -> bool:
        """Whether both are in one storage."""
        return self._key(one) == self._key(other)

    def tracks(self, tensor: Tensor) -> bool:
        return self._key(tensor) in self._entries

    def read(self, tensor: Tensor) -> Lanes | None:
        """The lanes of ``tensor``; None when no rounding has touched it, so that the native value is exact."""
        entry = self._entries.get(self._key(tensor))
        if entry is None or entry.rounded.shape[1] < _elements(tensor, entry.dtype):
            return None
        if entry.dtype == tensor.dtype:
            rounded = self._window(entry.rounded, tensor)
            raw = rounded if entry.raw is entry.rounded else self._window(entry.raw, tensor)
            wider = None if entry.wider is None else self._window(entry.wider, tensor)
            spread = None if entry.spread is None else self._window(entry.spread, tensor)
            chain = None if entry.chain is None else self._window(entry.chain, tensor)
            return Lanes(raw, rounded, entry.terms, wider, entry.narrow, spread, chain)
        if entry.dtype.itemsize != tensor.dtype.itemsize:
            return None
        # A bit pattern read through another dtype of the same width (fp8 codes as uint8): the pattern of every lane.
        codes = entry.rounded.to(entry.dtype).view(tensor.dtype)
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
        """Makes ``lanes`` those of a freshly made ``tensor``."""
        self._sweep()
        flat_raw = self._flat(tensor, lanes.raw)
        flat_rounded = flat_raw if lanes.single else self._flat(tensor, lanes.rounded)
        flat_wider = None if lanes.wider is None else self._flat(tensor, lanes.wider)
        flat_spread = None if lanes.spread is None else self._flat(tensor, lanes.spread)
        flat_chain = None if lanes.chain is None else self._flat(tensor, lanes.chain)
        self._entries[self._key(tensor)] = Entry(
            _weak(tensor),
            tensor.dtype,
            flat_raw,
            flat_rounded,
            lanes.terms,
            flat_wider,
            lanes.narrow,
            flat_spread,
            flat_chain,
        )

    def _flat(self, tensor: Tensor, value: Tensor) -> Tensor:
        if self.covers(tensor):
            return value.reshape(value.shape[0], -1).contiguous()
        elements = _elements(tensor, tensor.dtype)
        flat = torch.zeros((value.shape[0], elements), dtype=value.dtype, device=value.device)
        self._window(flat, tensor).copy_(value)
        return flat

    def capture(self, tensor: Tensor) -> None:
        """Gives the whole storage of ``tensor`` lanes of its present content, ahead of a partial write."""
        key = self._key(tensor)
        storage, elements = tensor.untyped_storage(), _elements(tensor, tensor.dtype)
        if key in self._entries and self._entries[key].rounded.shape[1] == elements:
            return
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (elements,), (1,))
        value = whole.to(D, copy=True) if tensor.dtype.is_floating_point else whole.clone()
        flat = value.unsqueeze(0)
        self._entries[key] = Entry(_weak(tensor), tensor.dtype, flat, flat)

    def write(self, tensor: Tensor, lanes: Lanes) -> None:
        """Replaces the values seen through ``tensor``, in every view of its storage."""
        if self.covers(tensor):
            self.put(tensor, lanes)
            return
        # ``out=`` may have resized the storage since it was captured.
        self.capture(tensor)
        entry = self._entries[self._key(tensor)]
        entry.raw = self._own(entry.raw)
        entry.rounded = self._own(entry.rounded)
        entry.wider = entry.narrow = entry.spread = entry.chain = None
        self._window(entry.raw, tensor).copy_(lanes.raw)
        self._window(entry.rounded, tensor).copy_(lanes.rounded)

    def _own(self, flat: Tensor) -> Tensor:
        return flat.expand(self.width, -1).clone(memory_format=torch.contiguous_format)

    def forget(self, tensor: Tensor) -> None:
        """Drops the lanes of a storage that is overwritten as a whole by exact values."""
        self._entries.pop(self._key(tensor), None)

    def mark_unwritten(self, tensor: Tensor) -> None:
        """Notes memory that ``empty`` handed out, until an operation writes it."""
        self._unwritten[self._key(tensor)] = _weak(tensor)

    def mark_written(self, tensor: Tensor) -> None:
        self._unwritten.pop(self._key(tensor), None)
        self._widened.pop(self._key(tensor), None)
        self._eighths.pop(self._key(tensor), None)
        self._codes.pop(self._key(tensor), None)
        self._largest.pop(self._key(tensor), None)
        self._computed.pop(self._key(tensor), None)

    def unwritten(self, tensor: Tensor) -> bool:
        """True for memory that no operation is known to have written: a foreign kernel must have."""
        return self._key(tensor) in self._unwritten

    def mark_widened(self, tensor: Tensor, source: torch.dtype) -> None:
        """Notes that a conversion made it from ``source``, so that its values are of that."""
        self._widened[self._key(tensor)] = (_weak(tensor), source)

    def widened(self, tensor: Tensor) -> torch.dtype | None:
        """What ``tensor`` was converted from, where that is known; its whole storage was."""
        found = self._widened.get(self._key(tensor))
        return found[1] if found is not None else None

    def mark_computed(self, tensor: Tensor, source: torch.dtype) -> None:
        """Notes that it was computed from numbers of the 16-bit dtype ``source``, among others."""
        self._computed[self._key(tensor)] = (_weak(tensor), source)

    def source(self, tensor: Tensor) -> torch.dtype | None:
        """The 16-bit dtype of what ``tensor`` was computed from, if there is one."""
        found = self._computed.get(self._key(tensor))
        return found[1] if found is not None else None

    def mark_codes(self, tensor: Tensor) -> None:
        """Notes that a conversion made it from integers or flags."""
        self._codes[self._key(tensor)] = _weak(tensor)

    def of_codes(self, tensor: Tensor) -> bool:
        return self._key(tensor) in self._codes

    def mark_eighth(self, tensor: Tensor) -> None:
        """Notes that its values are float8 numbers, possibly times factors that a kernel may apply to the sum."""
        self._eighths[self._key(tensor)] = _weak(tensor)

    def of_eighth(self, tensor: Tensor) -> bool:
        """Whether a kernel may give this factor of a product to the tensor cores as float8."""
        return tensor.dtype in FLOAT8 or self._key(tensor) in self._eighths

    def mark_largest(self, tensor: Tensor, source: Tensor) -> None:
        """Notes that it holds the largest values of ``source``."""
        self._largest[self._key(tensor)] = (_weak(tensor), (self._key(source), _weak(source)))

    def is_largest(self, tensor: Tensor, source: Tensor) -> bool:
        """Whether ``tensor`` holds the largest values of the storage of ``source``."""
        found = self._largest.get(self._key(tensor))
        return found is not None and found[1][0] == self._key(source)

    def _sweep(self) -> None:
        # A StorageWeakRef keeps the address of a dead storage from being reused, so keys stay valid; this frees lanes.
        marks = (self._unwritten, self._widened, self._computed, self._eighths, self._codes, self._largest)
        for table in (self._entries, *marks):
            for key in [key for key, held in table.items() if _owner(held).expired()]:  # type: ignore[no-untyped-call]
                del table[key]


def _owner(held: Entry | StorageWeakRef | tuple[StorageWeakRef, Any]) -> StorageWeakRef:
    if isinstance(held, tuple):
        return held[0]
    return held.owner if isinstance(held, Entry) else held


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _elements(tensor: Tensor, dtype: torch.dtype) -> int:
    return tensor.untyped_storage().nbytes() // dtype.itemsize


def exact_lanes(tensor: Tensor) -> Lanes:
    """Lanes of a native tensor that no rounding has touched."""
    if tensor.dtype.is_floating_point:
        value = tensor.detach().to(D, copy=tensor.dtype == D).unsqueeze(0)
        return Lanes(value, value)
    value = tensor.detach().unsqueeze(0)
    return Lanes(value, value)
