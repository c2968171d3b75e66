"""A tensor as its bytes, to compare, store and send results bit for bit; bytes as a storage."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """The elements in logical order, uint8 ``(numel * itemsize,)``, on the same device; read-only: it may be a view."""
    whole = t.detach().resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor may have any stride along a size of 1, and view(torch.uint8) rejects that.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def storage_of(memory: torch.Tensor, start: int, nbytes: int) -> torch.UntypedStorage:
    """``nbytes`` (at least one) bytes of contiguous uint8 ``memory``, which stays alive; DLPack works on any device."""
    return from_dlpack(torch._C._to_dlpack(memory[start : start + nbytes])).untyped_storage()
