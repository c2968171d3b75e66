"""Results on a device that are read on the host later, by somebody who may wait, never by who asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.canary.live.calls.captures import beside_captures


class Readback:
    """Copies of tensors on their way to the host. Making one waits for no device.

    ``host`` holds them in order, those of the CPU as they are; their contents mean nothing before ``done``.
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
            # A default device that somebody set must not become that of pinned memory.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            with torch.cuda.device(tensor.device):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            self._events.append(event)
            self.host.append(host)

    @property
    def done(self) -> bool:
        """Whether all of them have arrived."""
        with beside_captures():
            return all(event.query() for event in self._events)
