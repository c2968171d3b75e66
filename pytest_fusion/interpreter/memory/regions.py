"""The storages behind the tensors of a launch, and the tensor that a pointer came from."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.control.batch import some
from pytest_fusion.interpreter.scoped import listed

# A larger storage is mostly gap, or an interpreted kernel would never finish. Masks and copies cover only its elements:
# a whole one would need memory that its untouched pages do not.
FAR_BYTES = 1 << 30


class Owned:
    """A computed mask of a storage that is too large for a mask of bytes; indexed by offsets like one.

    ``layouts``: first byte, shape, strides in elements, itemsize; each stride exceeds the reach of all smaller ones.
    """

    def __init__(self, layouts: Sequence[tuple[int, tuple[int, ...], tuple[int, ...], int]]) -> None:
        self._layouts = [layout for layout in layouts if 0 not in layout[1]]

    def __getitem__(self, offsets: Array) -> Array:
        found = np.zeros(np.shape(offsets), np.bool_)
        for start, shape, strides, itemsize in self._layouts:
            rest = (np.asarray(offsets).astype(np.int64) - start) // itemsize
            inside = rest >= 0
            for stride, size in sorted(zip(strides, shape, strict=True), reverse=True):
                if stride and size > 1:
                    index = rest // stride
                    inside &= index < size
                    rest = rest - index * stride
            found |= inside & (rest == 0)
        return found


@dataclass(slots=True)
class Facts:
    """Facts about a storage beyond its size.

    Bool (bytes,), or ``None`` for all: ``own`` bytes may be written; ``written`` bytes hold a value (stores set it).
    """

    own: Array | Owned | None = None
    written: Array | None = None
    # Whether the bytes at these offsets (int64) still hold the fill of fresh memory; same shape.
    untouched: Callable[[Array], Array] | None = None


Provider = Callable[[int], Facts | None]
# With each provider the addresses of storages that hold tensors with their guards, and are no tensors of the user.
_providers: list[tuple[Provider, Callable[[], frozenset[int]]]] = []


def described_by(
    provider: Provider, hidden: Callable[[], frozenset[int]] = frozenset
) -> AbstractContextManager[object]:
    """Call ``provider(storage address)`` for facts about the storages of launches; ``hidden()`` are not the user's."""
    return listed(_providers, (provider, hidden))


def _facts(address: int) -> Facts | None:
    for provider, _ in reversed(_providers):
        found = provider(address)
        if found is not None:
            return found
    return None


class _Bytes:
    """Memory by address, for numpy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def memory_at(address: int, nbytes: int) -> Array:
    """The bytes at ``address``, uint8, as a view that does not own them."""
    return np.asarray(_Bytes(address, nbytes))


def holds_still(memory: Array, pattern: Array) -> Callable[[Array], Array]:
    """Whether the bytes of ``memory`` at some offsets are those of the repeated ``pattern``; both uint8."""
    return lambda offsets: memory[offsets] == pattern[offsets % len(pattern)]


def bytes_of(storage: Array, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Array:
    """The entries (*shape, itemsize), no copy, of a layout's elements in ``storage``, which has one per byte."""
    if 0 in shape:
        return storage[:0]
    steps = (*(stride * itemsize for stride in strides), 1)
    return np.lib.stride_tricks.as_strided(storage, (*shape, itemsize), steps)


def mark(mask: Array, shape: Sequence[int], strides: Sequence[int], offset: int, itemsize: int) -> None:
    """Set the bytes of a layout's elements in ``mask``, bool (bytes,); strides and offset are in elements."""
    bytes_of(mask[offset * itemsize :], shape, strides, itemsize)[...] = True


_saves = itertools.count()


@dataclass(slots=True, eq=False)
class Region:
    """One storage. ``address`` and ``nbytes`` bound it; ``shadow`` is its history in ``races``."""

    address: int
    nbytes: int
    facts: Facts | None
    views: list[View] = field(default_factory=list)
    shadow: Any = None
    saved: tuple[list[Array], Array | None] | None = None
    saved_as: int = -1
    # Addresses computed from its pointers are multiples of this: no access of so many bytes or fewer is misaligned.
    step: int = 1 << 30
    _typed: dict[int, Array] = field(default_factory=dict)
    _own: tuple[int, Array | Owned | None] | None = None

    @property
    def far(self) -> bool:
        """Whether only the elements of its tensors may be touched, not the gaps between them."""
        return self.nbytes > FAR_BYTES and bool(self.views) and not any(view.whole for view in self.views)

    def _content(self) -> list[Array]:
        return [view.within(self.typed(1)) for view in self.views] if self.far else [self.typed(1)]

    def typed(self, itemsize: int) -> Array:
        """The storage as unsigned integers of ``itemsize`` bytes."""
        found = self._typed.get(itemsize)
        if found is None:
            whole = memory_at(self.address, self.nbytes)
            found = whole[: self.nbytes // itemsize * itemsize].view(f"u{itemsize}")
            self._typed[itemsize] = found
        return found

    def counted_in(self, itemsize: int) -> None:
        """Record a pointer into it to elements of ``itemsize`` bytes."""
        self.step = min(self.step, itemsize)

    def save(self) -> None:
        """Copy the content, before the launch's first store."""
        if self.saved is None:
            written = self.facts.written.copy() if self.facts and self.facts.written is not None else None
            self.saved = [part.copy() for part in self._content()], written
            self.saved_as = next(_saves)

    def restore(self) -> None:
        """Restore the saved content, and drop the access history."""
        self.shadow = None
        if self.saved is None:
            return
        content, written = self.saved
        for part, copied in zip(self._content(), content, strict=True):
            part[...] = copied
        if written is not None and self.facts is not None and self.facts.written is not None:
            self.facts.written[:] = written

    def own(self) -> Array | Owned | None:
        """Bool (bytes,): the bytes that the launch may write; ``None`` for all."""
        if self.facts is not None:
            return self.facts.own
        if not self.views:
            return None
        if self._own is None or self._own[0] != len(self.views):
            self._own = (len(self.views), self._owned())
        return self._own[1]

    def _owned(self) -> Array | Owned | None:
        if any(view.whole for view in self.views):
            return None
        if self.far:
            return Owned([(view.start, view.shape, view.strides, view.itemsize) for view in self.views])
        mask = np.zeros(self.nbytes, np.bool_)
        for view in self.views:
            view.within(mask)[...] = True
        return None if bool(mask.all()) else mask


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One tensor argument: ``start`` is its first element's byte in ``region``; strides in elements of ``itemsize``."""

    name: str
    region: Region
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str

    @property
    def whole(self) -> bool:
        """Whether the elements fill the region without a gap: a cache of gigabytes needs no mask then."""
        reach = self.itemsize
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size != 1 and stride * self.itemsize != reach:
                return False
            reach *= size
        return self.start == 0 and reach == self.region.nbytes

    def within(self, storage: Array) -> Array:
        """The entries of its elements' bytes, (*shape, itemsize), in an array with one per byte of the region."""
        return bytes_of(storage[self.start :], self.shape, self.strides, self.itemsize)

    def index(self, byte: int) -> tuple[int, ...] | None:
        """The logical index of the element at ``byte`` of the region; ``None`` if the view has none there."""
        distance = byte - self.start
        if distance % self.itemsize:
            return None
        rest = distance // self.itemsize
        index = [0] * len(self.shape)
        for axis in sorted(range(len(self.shape)), key=lambda a: -abs(self.strides[a])):
            stride = self.strides[axis]
            if stride == 0 or self.shape[axis] < 2:
                continue
            index[axis], rest = divmod(rest, stride)
            if not 0 <= index[axis] < self.shape[axis]:
                return None
        return tuple(index) if rest == 0 and 0 not in self.shape else None


Origin = frozenset[View]


def nearest(origin: Origin, address: int) -> View:
    """The tensor that an access at ``address``, outside of them all, most likely belongs to."""

    def distance(view: View) -> tuple[int, str]:
        first = view.region.address
        return max(first - address, address - (first + view.region.nbytes - 1)), view.name

    return min(origin, key=distance)


def joined(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a pointer with ``a`` in some lanes and ``b`` in others: both origins, if both are known."""
    if "origin" not in a or "origin" not in b:
        return {}
    return {"origin": a["origin"] | b["origin"]}


class Regions:
    """The regions of one launch."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        # Includes those that a larger storage at the same address has replaced.
        self._every: list[Region] = []
        self._scanned = False

    def __iter__(self) -> Iterator[Region]:
        return iter(self._every)

    def restore(self) -> None:
        """Restore the content from before the launch; the last saved first, since storages may overlap."""
        for region in sorted(self._every, key=lambda region: region.saved_as, reverse=True):
            region.restore()

    def add(self, name: str, tensor: Any) -> View | None:
        """The view of a tensor argument; ``None`` for one whose memory is unknown."""
        base = getattr(tensor, "base", tensor) if not hasattr(tensor, "untyped_storage") else tensor
        if not hasattr(base, "untyped_storage"):
            return None
        try:
            storage = base.untyped_storage()
            address, nbytes = int(storage.data_ptr()), int(storage.nbytes())
        except (RuntimeError, NotImplementedError):  # fake, sparse and wrapped tensors have no storage
            return None
        region = self.region(address, nbytes)
        itemsize = base.element_size()
        # torch reports the address 0 for an empty tensor.
        first, dtype = int(base.data_ptr()), str(base.dtype).removeprefix("torch.")
        start = first - address if first else int(getattr(base, "storage_offset", lambda: 0)()) * itemsize
        view = View(name, region, start, tuple(base.shape), tuple(base.stride()), itemsize, dtype)
        region.views.append(view)
        region.counted_in(view.start & -view.start or itemsize)
        region.counted_in(itemsize)
        return view

    def region(self, address: int, nbytes: int) -> Region:
        found = self._regions.get(address)
        if found is None or found.nbytes < nbytes:
            found = self._regions[address] = Region(address, nbytes, _facts(address))
            self._every.append(found)
        return found

    def containing(self, pointers: Array, among: Iterable[Region] | None = None) -> list[tuple[Region | None, Array]]:
        """The region of each address (uint64, any shape): pairs of a region, ``None`` for none, and a bool array.

        Tables of pointers reach live tensors other than the arguments; these are searched once a launch.
        """
        found: list[tuple[Region | None, Array]] = []
        left = np.ones(pointers.shape, np.bool_)
        # With tables of pointers some hundred storages are live, and a block of pointers is near one of them.
        low, high = (int(pointers.min()), int(pointers.max())) if pointers.size else (0, 0)
        for region in list(self._regions.values()) if among is None else among:
            if region.address > high or region.address + region.nbytes <= low:
                continue
            inside = (pointers - np.uint64(region.address) < np.uint64(region.nbytes)) & left
            if some(inside):
                found.append((region, inside))
                left &= ~inside
                if not some(left):
                    return found
        if among is None and not self._scanned:
            self._scanned = True
            for address, nbytes in _live_storages():
                self.region(address, nbytes)
            return self.containing(pointers)
        found.append((None, left))
        return found


def _live_storages() -> Iterator[tuple[int, int]]:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    # torch.compile and opcheck leave some behind, whose address warns or raises.
    fake: Any = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    hidden: frozenset[int] = frozenset().union(*(addresses() for _, addresses in _providers))
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor) or issubclass(type(thing), fake):
            continue
        try:
            if thing.device.type == "cpu":
                storage = thing.untyped_storage()
                if int(storage.data_ptr()) not in hidden:
                    yield int(storage.data_ptr()), int(storage.nbytes())
        except (RuntimeError, NotImplementedError):
            continue
