"""Launches by the two executors of the CPU lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_fusion.interpreter import Session, interpreted
from tests.sweeps import sweep

EXECUTORS = ("batched", "serial")
each_executor = sweep("executor", EXECUTORS)


def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


def launched(kernel: Any, programs: int, *args: Any) -> torch.Tensor:
    """What the kernel leaves in zeros, one int32 for each program."""
    out = zeros(programs)
    kernel[(programs,)](out, *args)
    return out


def in_both(run: Callable[[], list[torch.Tensor]]) -> tuple[Session, list[torch.Tensor]]:
    """The batched session and its results, which are bit for bit those of the serial one; neither finds anything."""
    results = []
    for executor in reversed(EXECUTORS):
        with interpreted(executor=executor) as session:
            results.append(run())
    serial, batched = results
    for a, b in zip(batched, serial, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return session, batched
