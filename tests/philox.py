"""Philox in numpy: what draws of kernels are compared with, on any device."""

from __future__ import annotations

import numpy as np


def philox(counter: tuple[np.ndarray, ...], key: tuple[int, int], rounds: int = 10) -> tuple[np.ndarray, ...]:
    """Philox-4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), figure 2 in numpy."""
    c = [np.asarray(word, np.uint64) for word in counter]
    low, high = key
    for _ in range(rounds):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        word = np.uint64(0xFFFFFFFF)
        thirty_two = np.uint64(32)
        c = [b >> thirty_two ^ c[1] ^ np.uint64(low), b & word, a >> thirty_two ^ c[3] ^ np.uint64(high), a & word]
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return tuple(word.astype(np.uint32) for word in c)
