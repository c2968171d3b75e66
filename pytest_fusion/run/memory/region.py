"""One tensor inside guard zones, and the damage around it; also where its few elements are gigabytes apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pytest_fusion.case.layouts import Geometry
from pytest_fusion.run.bits import storage_of
from pytest_fusion.run.memory.backing import ALIGNMENT, CPU_GUARD_BYTES, DEVICE_GUARD_BYTES, Backing
from pytest_fusion.run.memory.damage import Change, Damage, Part, Zone
from pytest_fusion.run.memory.fill import pattern, word

# Comparing makes a bool per word: in chunks of 64 Mi a 4 GB storage does not need 2 GB more.
_CHUNK_WORDS = 64 * 1024 * 1024


class Region:
    """Memory for one tensor: guard, storage, guard, all of it holding one fill; not the tensor itself, whose end
    ``Watch`` observes. Raises ``ValueError`` for a layout that leaves its storage or a dtype without a fill pattern,
    ``MemoryError`` without room."""

    def __init__(
        self,
        name: str,
        plan: Geometry,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fill: str,
        variant: int,
        guard_bytes: int | None = None,
    ) -> None:
        shape, strides, offset, storage_elements = plan.shape, plan.strides, plan.offset, plan.storage
        if guard_bytes is None:
            guard_bytes = CPU_GUARD_BYTES if device.type == "cpu" else DEVICE_GUARD_BYTES
        reach = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if offset < 0 or min(strides, default=0) < 0 or (reach and offset + reach > storage_elements):
            raise ValueError(
                f"{name}: shape {shape}, strides {strides} and offset {offset} reach element "
                f"{offset + reach - 1}, but the storage has {storage_elements}"
            )
        self.name, self.dtype, self.variant = name, dtype, variant
        self.shape, self.strides, self.offset, self.storage_elements = shape, strides, offset, storage_elements
        self.guard_bytes = -(-guard_bytes // ALIGNMENT) * ALIGNMENT
        self.bits = pattern(dtype, fill, variant)
        word_dtype, self._value = word(dtype, fill, variant)
        self._per = dtype.itemsize // word_dtype.itemsize
        self._backing = Backing(2 * self.guard_bytes + storage_elements * dtype.itemsize, device)
        self._words = self._backing.memory.view(word_dtype)
        self._first = self.guard_bytes // word_dtype.itemsize
        self._last = self._first + storage_elements * self._per
        self.own = self._own_words()
        self._saved: Tensor | None = None
        self._spread()

    def tensor(
        self, shape: Sequence[int] | None = None, strides: Sequence[int] | None = None, offset: int | None = None
    ) -> Tensor:
        """The tensor itself, or another one in its storage of exactly ``storage_elements``, which excludes the guards.
        Like a user's own it is no view: autograd treats in-place writes to views differently."""
        shape, strides = self.shape if shape is None else shape, self.strides if strides is None else strides
        offset = self.offset if offset is None else offset
        made = torch.empty(0, dtype=self.dtype, device=self._words.device)
        if self.storage_elements == 0:
            return made.set_(made.untyped_storage(), 0, shape, strides)
        storage = storage_of(self._backing.memory, self.guard_bytes, self.storage_elements * self.dtype.itemsize)
        with torch.no_grad():
            return made.set_(storage, offset, shape, strides)

    @property
    def address(self) -> int:
        """Where the storage begins."""
        return self._backing.memory.data_ptr() + self.guard_bytes

    @property
    def block(self) -> int:
        """The address of the guarded block around the storage."""
        return int(self._backing.memory.data_ptr())

    @property
    def nbytes(self) -> int:
        return self._backing.memory.nbytes

    def _spread(self) -> None:
        """Put the fill everywhere, own elements too."""
        self._words.fill_(self._value)

    def _fill_guards(self) -> None:
        self._words[: self._first].fill_(self._value)
        self._words[self._last :].fill_(self._value)

    def refill(self, fill: str) -> None:
        """Put another fill into guards and gaps; own elements and addresses stay."""
        self.bits = pattern(self.dtype, fill, self.variant)
        _, self._value = word(self.dtype, fill, self.variant)
        self._backing.forget_strays()
        if self.ungapped:
            self._fill_guards()
            return
        values = self.own.clone()
        self._words.fill_(self._value)
        self.own.copy_(values)

    def suspicion(self) -> Tensor | bool:
        """Whether guards or gaps (not slack) changed, on a device as a 0-dim bool there, without a synchronisation."""
        sides = ((0, self.guard_bytes), (self._backing.memory.nbytes - self.guard_bytes, self._backing.memory.nbytes))
        intact = [self._backing.holds(start, stop, self.bits) for start, stop in sides]
        if False in intact:
            return True
        if self.ungapped:
            if None not in intact:
                return False
            before, after = self._words[: self._first], self._words[self._last :]
            return before.ne(self._value).any().logical_or(after.ne(self._value).any())
        if distinct(self.own.shape, self.own.stride()):
            # Only own elements may differ from the fill: the two counts agree unless a gap changed.
            words = self._words if None in intact else self._words[self._first : self._last]
            first, *rest = [chunk.ne(self._value).count_nonzero() for chunk in _chunks(words)]
            return sum(rest, start=first).ne(self.own.ne(self._value).count_nonzero())
        return self._changed_words().any()

    def strayed(self) -> bool:
        """Whether the slack of a CPU mapping, beyond the guards, was written."""
        return any(True for _ in self._backing.strays())

    def damage(self) -> list[Damage]:
        """Everything that changed outside the own elements, by zone; synchronises with the device."""
        changed = self._changed_words().nonzero().flatten().cpu()
        own = torch.zeros_like(self._words, dtype=torch.bool)
        own.as_strided(self.own.shape, self.own.stride(), self.own.storage_offset()).fill_(True)
        owned = own.nonzero().flatten().cpu()
        low = self._first + self.offset * self._per
        high = int(owned[-1]) if owned.numel() else low - 1
        found: dict[Zone, list[Part]] = {"before": [], "between": [], "after": []}
        zones: tuple[tuple[Zone, Tensor], ...] = (
            ("before", changed[changed < low]),
            ("between", changed[(changed > low) & (changed < high)]),
            ("after", changed[changed > high]),
        )
        for zone, where in zones:
            if where.numel() == 0:
                continue
            if zone == "before":
                away = low - where
            elif zone == "after":
                away = where - high
            else:
                right = torch.searchsorted(owned, where)
                away = torch.minimum(where - owned[right - 1], owned[right] - where)
            nearest, farthest = (-(-int(words) // self._per) for words in away.aminmax())
            flipped = self._words[where.to(self._words.device)].bitwise_xor(self._value)
            found[zone].append((nearest, farthest, int(flipped.view(torch.uint8).count_nonzero())))
        return self._with_strays(found, low, high + 1)

    def _with_strays(self, found: dict[Zone, list[Part]], low: int, high: int) -> list[Damage]:
        """``found`` and writes into the slack; distances count from words ``low`` and ``high - 1``."""
        size = self._words.element_size()
        for start, stop in self._backing.strays():
            zone: Zone = "before" if start < low * size else "after"
            gap = low * size - (stop - 1) if zone == "before" else start - high * size + 1
            nearest, farthest = (-(-at // self.dtype.itemsize) for at in (gap, gap + stop - start - 1))
            found[zone].append((nearest, farthest, stop - start))
        return [Damage.of(self.name, zone, parts) for zone, parts in found.items() if parts]

    def save(self) -> None:
        """Store the own elements' bits for ``altered`` and ``change``."""
        self._saved = self.own.clone()

    def altered(self) -> Tensor | None:
        """0-dim bool on the device: whether an own element differs from what ``save`` stored; ``None`` without it."""
        return None if self._saved is None else self.own.ne(self._saved).any()

    def change(self) -> Change:
        """How many own elements changed since ``save``, if ``altered`` is true, and the first's index; synchronises."""
        assert self._saved is not None
        differs = self.own.ne(self._saved)
        where = (differs.any(-1) if self._per > 1 else differs).nonzero()
        return Change(self.name, len(where), tuple(int(i) for i in where[0].tolist()))

    def untouched(self, tensor: Tensor) -> Tensor:
        """Bool mask in the shape of ``tensor``, a view of this region's storage: elements that still hold the fill."""
        size = tensor.element_size()
        if size == self.dtype.itemsize == self._words.element_size():
            return _in_layout_of(tensor, self._words, self._first).eq(self._value)
        expected = torch.empty_like(self._words).fill_(self._value)
        found, fill = (
            _in_layout_of(tensor, words.view(torch.uint8), self.guard_bytes, (size, 1))
            for words in (self._words, expected)
        )
        return found.eq(fill).all(-1)

    @property
    def ungapped(self) -> bool:
        """Whether only the guards hold the fill: the own elements have no gaps, or these are unfilled."""
        return self.dense

    @property
    def dense(self) -> bool:
        """Whether the own elements are all of the storage, each once."""
        return self.own.numel() == self._last - self._first and distinct(self.own.shape, self.own.stride())

    def _own_words(self) -> Tensor:
        """The own elements as words; a dim of stride 0 counts once, and complex128 gets a last dim of two words."""
        shape = [1 if s == 0 and n > 1 else n for n, s in zip(self.shape, self.strides, strict=True)]
        strides = [s * self._per for s in self.strides]
        if self._per > 1:
            shape, strides = [*shape, self._per], [*strides, 1]
        if 0 in shape:  # as_strided checks the offset even of an empty tensor
            return self._words[:0].as_strided(shape, strides, self._first)
        return self._words.as_strided(shape, strides, self._first + self.offset * self._per)

    def _changed_words(self) -> Tensor:
        changed = torch.cat([chunk.ne(self._value) for chunk in _chunks(self._words)])
        changed.as_strided(self.own.shape, self.own.stride(), self.own.storage_offset()).fill_(False)
        return changed


def which(flags: Sequence[Tensor | bool]) -> list[bool]:
    """The values of flags, some of them 0-dim bools on a device, which need one transfer in all."""
    waiting = [flag for flag in flags if isinstance(flag, Tensor)]
    known = iter(torch.stack(waiting).tolist() if waiting else ())
    return [bool(next(known)) if isinstance(flag, Tensor) else flag for flag in flags]


def _chunks(words: Tensor) -> tuple[Tensor, ...]:
    return (words,) if words.numel() <= _CHUNK_WORDS else torch.split(words, _CHUNK_WORDS)


def distinct(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two indices share an element (sufficient: each stride exceeds the reach of the smaller ones)."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _in_layout_of(tensor: Tensor, base: Tensor, start: int, *more: tuple[int, int]) -> Tensor:
    """``base`` in the layout of ``tensor``, whose storage begins at its element ``start``; ``more`` adds dims (size,
    stride) within one element of ``tensor``, their product being its size in ``base``."""
    unit = math.prod(size for size, _ in more)
    shape = [*tensor.shape, *(size for size, _ in more)]
    strides = [*(s * unit for s in tensor.stride()), *(stride for _, stride in more)]
    return base.as_strided(shape, strides, start + int(tensor.storage_offset()) * unit)


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
