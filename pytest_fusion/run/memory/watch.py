"""Guards and poison for the memory that a kernel's launcher allocates itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.case.layouts import Geometry
from pytest_fusion.interpreter.bridge.dispatch import TORCH_NAMESPACES, InnerMode, schema, shares_memory
from pytest_fusion.run.memory.arena import find_damage
from pytest_fusion.run.memory.damage import Damage
from pytest_fusion.run.memory.fill import supported
from pytest_fusion.run.memory.region import Region

# The most to hold at once. Beyond it, dead regions are checked and freed, and too large ones stay unguarded: a guarded
# allocation briefly costs its size twice, and the watched run must not be the one that runs out.
_HELD_BYTES: Final = {"cpu": 1 << 30, "cuda": 8 << 30}
_HELD_REGIONS: Final = 2048
# Each takes 0.1 ms and on the CPU a mapping; a process has 65,530 (vm.max_map_count). A kernel that holds so many
# partial results holds some at smaller sizes too.
_MOST_REGIONS: Final = 4096

# Shape, strides and offset in elements, and bytes of an element: the layout of bytes that were written.
Layout = tuple[tuple[int, ...], tuple[int, ...], int, int]


class Watch:
    """While active, gives every tensor that torch makes on ``device`` guard zones, and ``fill`` where it is empty.

        with Watch(device, "nan") as watch:
            out = fused(x)
        watch.damage(); watch.unwritten(out)

    Custom operators normally pop a dispatch mode; this one stays active (docs/internals/two-fills.md: why a mode). Not
    guarded: other devices, meta and fake tensors, subclasses, sparse, quantised, complex, pinned, without elements,
    named, larger than 1 GiB (CPU) or 8 GiB (CUDA), under CUDA graph capture, too much at once, and allocations by other
    threads (except autograd's), by code of ``torch.compile`` and below torch. Regions live as long as the watch.
    """

    def __init__(self, device: torch.device, fill: str) -> None:
        self.device = device
        self.fill = fill
        # The number of guarded allocations.
        self.allocations = 0
        # The number of operators that did more than allocate, copy or make a view.
        self.computed = 0
        # The number of torch's operators that computed or copied: each may be a kernel.
        self.worked = 0
        self._limit = _HELD_BYTES.get(device.type, 1 << 30)
        self._mode: _Mode | None = None
        self._depth = 0
        self._held = 0
        # Allocations since the last search for dead regions.
        self._since = 0
        self._regions: dict[int, tuple[Region, StorageWeakRef, bool]] = {}
        self._settled: list[Damage] = []
        self._written: dict[int, list[Layout]] = {}

    def __enter__(self) -> Self:
        if self._mode is None:  # twice on the stack, it would guard each allocation twice
            self._mode = _Mode(self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and self._mode is not None:
            # A watch and its mode that refer to each other would hold all regions until garbage collection.
            mode, self._mode = self._mode, None
            mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def damage(self) -> list[Damage]:
        """Writes around the watched allocations; one synchronisation if there are none."""
        with unwatched():
            return [*self._settled, *find_damage([region for region, _, _ in self._regions.values()], self.device)]

    def unwritten(self, tensor: Tensor) -> Tensor | None:
        """Bool mask of ``tensor``'s elements whose bits are still the fill; ``None`` for unwatched memory and memory
        that did not start empty. An element is unwritten if it holds each of two fills in turn: a kernel may compute
        one fill's number."""
        if tensor.numel() == 0 or type(tensor) not in (Tensor, torch.nn.Parameter):
            return None
        entry = self._entry(tensor)
        if entry is None or not entry[2]:
            return None
        with unwatched(), torch.no_grad():
            return entry[0].untouched(tensor)

    def region(self, address: int) -> Region | None:
        """The region whose storage begins at ``address``."""
        entry = self._regions.get(address)
        return entry[0] if entry is not None else None

    def fresh(self, address: int) -> bool:
        """Whether the storage at ``address`` started empty."""
        entry = self._regions.get(address)
        return entry is not None and entry[2]

    def take_written(self, address: int) -> list[Layout]:
        """The bytes of the storage at ``address`` that torch operators wrote since the last call."""
        return self._written.pop(address, [])

    def blocks(self) -> frozenset[int]:
        return frozenset(region.block for region, _, _ in self._regions.values())

    def sizes(self) -> list[int]:
        return [region.nbytes for region, _, _ in self._regions.values()]

    def _entry(self, tensor: Tensor) -> tuple[Region, StorageWeakRef, bool] | None:
        try:
            return self._regions.get(tensor.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, fake, wrapped
            return None

    def _guard(self, op: str, plain: Tensor, *, empty: bool) -> Tensor:
        """A guarded twin of the fresh ``plain`` if possible; its padding counts as own, as a kernel may write there."""
        try:
            nbytes = plain.untyped_storage().nbytes() if self._eligible(plain) else 0
            if not nbytes or not self._has_room(nbytes):
                return plain
            elements = nbytes // plain.element_size()
            name = f"{op} {self.allocations} {tuple(plain.shape)} {plain.dtype}".replace("torch.", "")
            plan, variant = Geometry((elements,), (1,), 0, elements), 2 * self.allocations + 1
            region = Region(name, plan, plain.dtype, plain.device, fill=self.fill, variant=variant)
            twin = region.tensor(plain.shape, plain.stride(), int(plain.storage_offset()))
            if not empty:
                twin.copy_(plain)
        except (MemoryError, RuntimeError, ValueError):  # torch's OutOfMemoryError is a RuntimeError
            return plain
        self._written.pop(region.address, None)
        self._regions[region.address] = (region, StorageWeakRef(twin.untyped_storage()), empty)  # type: ignore[no-untyped-call]
        self._held += region.nbytes
        self.allocations += 1
        return twin

    def _note_written(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            if self.fresh(address):
                layout = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.element_size()
                self._written.setdefault(address, []).append(layout)

    def _eligible(self, plain: Tensor) -> bool:
        return (
            type(plain) is Tensor
            and plain.device.type == self.device.type
            and self.device.index in (None, plain.device.index)
            and plain.layout is torch.strided
            and not plain.is_nested
            and plain.numel() > 0
            and plain.nbytes <= self._limit
            and not plain.is_complex()
            and supported(plain.dtype)
            and not (plain.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        )

    def _has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more may be held, after dead regions are released; it searches again only after an eighth
        as many allocations: with 16,385 results of chunks, looking at thousands of live regions each time took 25 s in
        all and looked like a hang."""
        crowded = len(self._regions) >= _HELD_REGIONS
        if (crowded or self._held + nbytes > self._limit) and self._since >= len(self._regions) // 8:
            self._settle()
        self._since += 1
        return len(self._regions) < _MOST_REGIONS and self._held + nbytes <= self._limit

    def _settle(self) -> None:
        """Check and free the regions whose tensors are gone; store their damage."""
        dead = [key for key, (_, storage, _) in self._regions.items() if storage.expired()]  # type: ignore[no-untyped-call]
        regions = [self._regions.pop(key)[0] for key in dead]
        self._settled += find_damage(regions, self.device)
        self._held -= sum(region.nbytes for region in regions)
        self._since = 0


class _Mode(InnerMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        facts = schema(func)
        idle = facts.empty or facts.view or facts.name == "set_"
        self._watch.computed += not (idle or facts.copies)
        self._watch.worked += not idle and func.namespace in TORCH_NAMESPACES
        if facts.writes:
            return self._mutate(func, types, args, kwargs)
        if not facts.makes:
            return self.inside(func, types, args, kwargs)
        made = func(*args, **kwargs)
        if made is None or kwargs.get("pin_memory") or shares_memory(made, tensors_of((args, kwargs))):
            return made
        # With values too: x.clone(), x.float() and x + y are common buffers for a kernel that writes in place.
        return self._watch._guard(func.overloadpacket.__name__, made, empty=facts.empty)

    def _mutate(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that writes arguments; one that resizes a guarded tensor gets an ordinary storage for it."""
        ours = [t for t in tensors_of((args, kwargs)) if self._watch._entry(t) is not None]
        if func.namespace in TORCH_NAMESPACES:
            self._watch._note_written(ours)
        before = [(t, t.shape, t.stride(), int(t.storage_offset())) for t in ours]
        try:
            return self.inside(func, types, args, kwargs)
        except RuntimeError as error:
            if not before or "not resizable" not in str(error):
                raise
            for tensor, size, strides, offset in before:
                # Guarded storages cannot grow, and the failed resize has already changed the sizes.
                ordinary = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    tensor.set_(ordinary, offset, size, strides)
        return self.inside(func, types, args, kwargs)


def unwatched() -> Any:
    """Run the body unwatched, and unseen by other dispatch modes: it is the plugin's own work."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()  # usually called after the run; the other takes 10 us
    disable: Callable[[], Any] = torch.utils._python_dispatch._disable_current_modes
    return disable()
