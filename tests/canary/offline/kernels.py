"""Kernels that stand on either side of a canary: as good as each other, better, worse, and wrong in the same way."""

from __future__ import annotations

import itertools
import os
import signal

import numpy as np
import torch

from pytest_fusion import FusionSpec, dim, tensor
from pytest_fusion.interpreter.launch import Launch, announce

T = torch.Tensor
_CALLS = itertools.count()


def reference(x: T) -> T:
    return torch.exp(x.float() / 8).to(x.dtype)


def right(x: T) -> T:
    return reference(x)


def another(x: T) -> T:
    """As right as `right`, by another way to the same number."""
    return torch.exp(x.double() / 8).to(x.dtype)


def wrong(x: T) -> T:
    return reference(x) * 1.01


def wrong_alone(x: T) -> T:
    """Wrong where rows are one element long, and nowhere else."""
    return reference(x) * (1.01 if x.shape[-1] == 1 else 1)


def far_wrong_alone(x: T) -> T:
    return reference(x) * (1.5 if x.shape[-1] == 1 else 1)


def careless(x: T) -> T:
    """Within tolerance, with a good part of it used up."""
    result = torch.exp(x.float() / 8)
    signs = torch.arange(result.numel()).reshape(result.shape) % 2 * 2 - 1
    return (result * (1 + signs * 2.0**-23)).to(x.dtype)


def refuses_alone(x: T) -> T:
    if x.shape[-1] == 1:
        raise NotImplementedError("rows of one element")
    return reference(x)


def refuses_long(x: T) -> T:
    if x.shape[0] > 8:
        raise NotImplementedError("more than 8 rows")
    return reference(x)


def dies_alone(x: T) -> T:
    if x.shape[-1] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return reference(x)


def other_inputs(x: T, y: T) -> T:
    return x + y


def varies(x: T) -> T:
    """Another last bit in every other call."""
    result = torch.exp(x.float() / 8)
    return (result * (1 + next(_CALLS) % 2 * 2.0**-24 * 1.5)).to(x.dtype)


def launched(x: T, times: int = 1) -> T:
    """Stands for Triton kernels in any layout: launches, and a result in fresh memory."""
    for number in range(times if x.numel() else 0):
        announce(Launch(f"kernel_{number}", (1, 1, 1)))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out.numpy()[...] = np.exp(x.detach().numpy() / 8)
    return out


def launched_twice(x: T) -> T:
    return launched(x, 2)


INPUTS = {"x": tensor("rows hidden")}
SPEC = FusionSpec(
    fused=right, reference=reference, inputs=INPUTS, dtypes="float32", dims={"rows": dim(1, 20), "hidden": dim(1, 40)}
)
