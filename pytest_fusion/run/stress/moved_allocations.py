"""Blocks allocated and freed between calls, so that the next call gets other memory with other contents."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from pytest_fusion.run.memory.backing import Backing

# What decoys may take at once; a case's own tensors are bounded by its profile.
_MOST_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
# Handing cached memory back to the driver costs milliseconds and a synchronisation, so it happens now and then.
_EMPTY_EVERY = 5


class Decoys:
    """Blocks of the sizes that a call was seen to allocate, on ``device``.

    Allocators hand out the block that was freed last: without decoys, call after call gets the same addresses and finds
    in fresh memory what the call before it left there, often the right answer.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int], seed: int) -> None:
        self._device = device
        self._random = random.Random(seed)
        self._held: list[object] = []
        self._rounds = 0
        room = _MOST_BYTES.get(device.type, 64 << 20)
        self._sizes: list[int] = []
        for size in sorted(sizes):
            room -= 2 * size
            if size and room >= 0:
                self._sizes.append(size)

    def shuffle(self) -> None:
        """Take blocks of every size, dirty them, give about half of them back and keep the others until the next time.

        Raises nothing where memory is short; then there are fewer blocks.
        """
        before, self._held = self._held, []
        self._rounds += 1
        taken: list[object] = []
        try:
            for size in self._sizes:
                taken += [self._block(size), self._block(size)]
        except (MemoryError, RuntimeError):  # torch's OutOfMemoryError is a RuntimeError
            taken.clear()
        before.clear()
        self._random.shuffle(taken)
        self._held = taken[: (len(taken) + 1) // 2]
        del taken
        if self._device.type == "cuda" and self._rounds % _EMPTY_EVERY == 0:
            torch.cuda.empty_cache()

    def _block(self, size: int) -> object:
        # Other bytes each time: what finds its way from fresh memory into a result must not look the same twice.
        dirt = torch.empty(size, dtype=torch.uint8, device=self._device).fill_(self._random.randrange(256))
        # Guarded memory is mapped, not allocated: an untouched mapping takes its address and no memory.
        return (dirt, Backing(size, self._device)) if self._device.type == "cpu" else dirt
