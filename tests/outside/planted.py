"""Kernels for the tests of the census: an honest one, a wrong one, one that hangs, one that ends its process."""

from __future__ import annotations

import os
import time

import torch
import triton
import triton.language as tl

from pytest_fusion import dim, tensor
from tests.outside.census.entry import Kernel, kernel


@triton.jit
def shifted_kernel(x, out, by, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=0.0) + by, mask=i < n)


def shifted(x: torch.Tensor, by: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    shifted_kernel[(triton.cdiv(x.numel(), 64),)](x, out, by, x.numel(), BLOCK=64)
    return out


class Unlike:
    """Takes a while, or the process with it, when its spec is made."""

    name = "hangs"
    devices = ("cpu", "cuda")

    def spec(self, _: str) -> None:
        time.sleep(600)


class Dying(Unlike):
    name = "dies"

    def spec(self, _: str) -> None:
        os._exit(3)


def kernels() -> list[Kernel | Unlike]:
    inputs, dims = {"x": tensor("n")}, {"n": dim(1, 200)}
    return [
        kernel("honest", lambda x: shifted(x, 1.0), lambda x: x + 1, inputs, dims=dims),
        kernel("wrong", lambda x: shifted(x, 1.1), lambda x: x + 1, inputs, dims=dims),
        kernel("known", lambda x: shifted(x, 1.1), lambda x: x + 1, inputs, dims=dims,
               proved={"unexplained": "Shifted by 1.1"}),
        Unlike(),
        Dying(),
    ]  # fmt: skip
