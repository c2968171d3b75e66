"""Inputs that families share: random tensors, and Liger's functions, imported where they are called."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from benchmarks.suite.model import Call

BF16 = torch.bfloat16


def normal(device: torch.device, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers times ``scale``, without a float32 copy of them."""
    made = torch.empty(shape, dtype=dtype, device=device).normal_()
    return made.mul_(scale) if scale != 1.0 else made


def near_one(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A weight as norms have it: around 1."""
    return normal(device, *shape, dtype=dtype, scale=0.1).add_(1.0)


def liger(module: str, function: str, *more: Any) -> Call:
    """``liger_kernel.ops.<module>.<function>`` on the inputs in their order, then on ``more``.

    The call raises `ModuleNotFoundError` where Liger is not installed.
    """

    def call(*positional: Any, **inputs: Any) -> Any:
        found = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function)
        return found.apply(*positional, *inputs.values(), *more)

    return call
