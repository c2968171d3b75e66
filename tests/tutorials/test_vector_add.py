"""Tutorials 01, 07 and 11: vector addition, a function of libdevice, and programmatic dependent launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tutorials.common import assert_rounded, each_float, normal

triton = pytest.importorskip("triton")
libdevice = pytest.importorskip("triton.language.extra.libdevice")
tl = triton.language


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(output_ptr + offsets, x + y, mask=mask)


def add(x: Tensor, y: Tensor) -> Tensor:
    output = torch.empty_like(x)
    n_elements = output.numel()
    add_kernel[lambda meta: (triton.cdiv(n_elements, meta["BLOCK_SIZE"]),)](x, y, output, n_elements, BLOCK_SIZE=128)
    return output


@triton.jit
def dependent_add_kernel(x_ptr, y_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(output_ptr + offsets, x + y, mask=mask)


def dependent_add(x: Tensor, y: Tensor) -> Tensor:
    output = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 128),)
    dependent_add_kernel[grid](x, y, output, x.numel(), BLOCK_SIZE=128, launch_pdl=True)
    return output


@pytest.mark.parametrize("launch", [add, dependent_add])
@pytest.mark.parametrize("size", [1, 128, 1000])
@each_float
def test_vector_add(dtype: torch.dtype, size: int, launch: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A sum is rounded once, in torch as in Triton: they are equal bit for bit."""
    x, y = normal(2, size, dtype=dtype)
    assert torch.equal(launch(x, y), x + y)


@triton.jit
def asin_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    # libdevice has asin for float32 and float64 alone.
    tl.store(y_ptr + offsets, libdevice.asin(x.to(tl.float32)), mask=mask)


def asin(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    asin_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK_SIZE=64)
    return y


@each_float
def test_libdevice_asin(dtype: torch.dtype) -> None:
    """Within the 2 ulp that the CUDA Programming Guide states for asinf (4 roundings); NaN outside [-1, 1]."""
    x = torch.cat([torch.linspace(-1, 1, 301), torch.tensor([1.5, -2.0, float("inf"), float("nan"), -0.0])]).to(dtype)
    exact = torch.asin(x.double())
    assert exact.isnan().sum() == 4
    assert_rounded(asin(x), exact, roundings=4)
