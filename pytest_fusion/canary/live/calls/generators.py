"""`Generators`: saves and restores the random generators that a kernel may use, without waiting for a device."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


class Generators:
    """The states of torch's generators (CPU and ``devices``), of ``random``, and of numpy where it is loaded.

    ``put_back`` touches only generators whose state has changed: another thread may have drawn meanwhile, and would
    draw the same numbers again.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._torch = torch.get_rng_state()
        # The generator of a CUDA device lives on the host: seed and offset of Philox.
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
        self._random = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random.get_state(legacy=False)

    def put_back(self) -> None:
        if not torch.equal(torch.get_rng_state(), self._torch):
            torch.set_rng_state(self._torch)
        for device, state in self._cuda.items():
            if not torch.equal(torch.cuda.get_rng_state(device), state):
                torch.cuda.set_rng_state(state, device)
        if random.getstate() != self._random:
            random.setstate(self._random)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy is not None:
            now = numpy.random.get_state(legacy=False)
            if (
                now["state"]["pos"] != self._numpy["state"]["pos"]
                or (now["state"]["key"] != self._numpy["state"]["key"]).any()
            ):
                numpy.random.set_state(self._numpy)
