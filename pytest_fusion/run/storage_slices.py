"""Storages that are a slice of a larger block of memory and cannot reach the rest."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack


def storage_of(memory: torch.Tensor, start: int, nbytes: int) -> torch.UntypedStorage:
    """Bytes ``start`` to ``start + nbytes`` (at least one) of the contiguous uint8 tensor ``memory`` as a storage.

    It has exactly these bytes and keeps all of the memory alive: DLPack makes such a storage on every device.
    """
    return from_dlpack(torch._C._to_dlpack(memory[start : start + nbytes])).untyped_storage()
