"""A tensor as its bytes, to compare, store and send results bit for bit; bytes as a storage of their own."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """The elements in logical order, uint8 of shape ``(numel * itemsize,)``, on the device of ``t``.

    Takes any dtype, layout and size. A view where ``t`` is contiguous, so it is for reading; a copy elsewhere.
    """
    whole = t.detach().resolve_conj().resolve_neg().contiguous()
    # Along a size of 1 what is contiguous may have any stride, and view(torch.uint8) refuses such a tensor.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def storage_of(memory: torch.Tensor, start: int, nbytes: int) -> torch.UntypedStorage:
    """Bytes ``start`` to ``start + nbytes`` (at least one) of the contiguous uint8 tensor ``memory`` as a storage.

    It has exactly these bytes and keeps all of the memory alive: DLPack makes such a storage on every device.
    """
    return from_dlpack(torch._C._to_dlpack(memory[start : start + nbytes])).untyped_storage()
