"""Tracks which bytes of memory from ``torch.empty`` hold no value yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_fusion.interpreter.bridge.dispatch import DispatchMode, schema, written_by
from pytest_fusion.interpreter.memory.regions import Facts, holds_still, mark, memory_at

# A signalling NaN in float16, bfloat16 and float32, and no small number in any other dtype of more than one byte.
_PATTERN: Final = (0xA5, 0x7F)


class FreshMemory(DispatchMode):
    """A dispatch mode that is a provider for ``regions.described_by``.

    Within it, CPU memory from ``torch.empty`` and the like holds a pattern and counts as unwritten. Torch operators
    that write an argument, and kernels' stores, mark it written. Writes of other code remove the pattern.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, Facts]] = {}

    def __call__(self, address: int) -> Facts | None:
        """The facts about the storage at ``address``; ``None`` if it is not fresh, or gone."""
        storage, facts = self._known.get(address, (None, None))
        return facts if storage is not None and not storage.expired() else None  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if schema(func).empty:
            self._remember(result)
        else:
            for tensor in written_by(func, args, kwargs):
                self._written(tensor)
        return result

    def _remember(self, made: Tensor) -> None:
        if made.device.type != "cpu" or made.layout is not torch.strided or not made.untyped_storage().nbytes():
            return
        storage = made.untyped_storage()
        memory = memory_at(storage.data_ptr(), storage.nbytes())
        pattern = np.array((1, 1) if made.dtype is torch.bool else _PATTERN, np.uint8)
        memory[:] = np.resize(pattern, len(memory))
        facts = Facts(written=np.zeros(len(memory), np.bool_), untouched=holds_still(memory, pattern))
        self._known[storage.data_ptr()] = (StorageWeakRef(storage), facts)  # type: ignore[no-untyped-call]

    def _written(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        facts = self(tensor.untyped_storage().data_ptr())
        if facts is not None and facts.written is not None:
            mark(facts.written, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.itemsize)
