"""`Readback`: copies tensors from a device to the host without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.canary.live.calls.captures import beside_captures


class Readback:
    """Asynchronous copies of tensors to the host.

    ``host`` holds them in order, those of the CPU as they are; their contents are valid once ``done``.
    """

    __slots__ = ("_events", "host")

    @beside_captures()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.host: list[Tensor] = []
        self._events: list[Any] = []
        for tensor in tensors:
            if tensor.device.type != "cuda":
                self.host.append(tensor)
                continue
            # Explicit, because pinned memory must not follow torch's default device.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            with torch.cuda.device(tensor.device):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            self._events.append(event)
            self.host.append(host)

    @property
    def done(self) -> bool:
        """Whether all copies have arrived."""
        with beside_captures():
            return all(event.query() for event in self._events)
