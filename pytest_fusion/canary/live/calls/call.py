"""What is asked of a call beside its result: whether it is recorded, its devices, what was written."""

from __future__ import annotations

from typing import Any

import torch

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.run.process.fork import cuda_is_poisoned


def recorded() -> bool:
    """Whether this call is captured or traced, and so decided once for many."""
    if torch.compiler.is_compiling():
        return True
    started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def devices_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[torch.device]:
    return {tensor.device for tensor in tensors_of([args, kwargs])}


def versions_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, int]]:
    """The tensors with the counters of their in-place writes; inference tensors have none, and raise when asked."""
    return [(tensor, tensor._version) for tensor in tensors_of([args, kwargs]) if not tensor.is_inference()]


def poisoned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the CUDA context of the call is lost."""
    return any(device.type == "cuda" for device in devices_of(args, kwargs)) and cuda_is_poisoned()
