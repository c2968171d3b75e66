"""Kernels whose last program spins: slower by a chosen time, with nothing else about them changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _spun(sink, spins):
    """A chain of ``spins`` dependent multiply-adds, about 2 ns each."""
    value = spins * 1.0
    for _ in range(spins):
        value = value * 0.999 + 0.5
    tl.store(sink, value)


@triton.jit
def softmax_kernel(x, y, sink, spins, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + row * n + at, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * n + at, value / tl.sum(value, 0), mask=inside)
    if row == tl.num_programs(0) - 1:
        _spun(sink, spins)


@triton.jit
def relu_kernel(x, y, sink, spins, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + row * n + at, mask=inside, other=0.0)
    tl.store(y + row * n + at, tl.where(value > 0, value, 0.0), mask=inside)
    if row == tl.num_programs(0) - 1:
        _spun(sink, spins)


def spinning(kernel: Any, spins: int, device: torch.device) -> Callable[..., torch.Tensor]:
    """``kernel`` as a function of its input (rows, n), delayed by ``spins`` steps at its end."""
    sink = torch.empty(1, dtype=torch.float32, device=device)

    def call(input: torch.Tensor) -> torch.Tensor:
        rows, n = input.shape
        output = torch.empty_like(input)
        # As 1 it would be compiled in, and another kernel timed.
        kernel[(rows,)](input, output, sink, max(2, spins), n, BLOCK=triton.next_power_of_2(n))
        return output

    return call
