"""The activations that the kernels share, on every number that 16 bits hold."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from reference_kernels._activations import activated
from reference_kernels._common import jit, placed

NUMBERS = 2**16


@jit
def _gelu_kernel(y_ptr: tl.tensor, x_ptr: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, activated(tl.load(x_ptr + at), "gelu", tl.bfloat16))


def _gelu(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every number of ``dtype``, and its gelu before it is rounded, as float32."""
    x = torch.arange(NUMBERS, dtype=torch.int32).to(torch.int16).view(dtype).float()
    y = torch.empty_like(x)
    with placed(x.device):
        _gelu_kernel[(1,)](y, x, BLOCK=NUMBERS)
    return x, y


@pytest.mark.parametrize(
    ("dtype", "lowest", "units"),
    [(torch.float16, -65504, 0.012), (torch.bfloat16, -6.5, 0.0015), (torch.bfloat16, -7.6, 0.5)],
)
def test_gelu_of_16_bits_is_right_before_it_is_rounded(dtype: torch.dtype, lowest: float, units: float) -> None:
    """Of any number from ``lowest`` on it is off by few ``units`` of the result, which are relative in bfloat16; so
    rounding it gives what rounding the exact one gives, or a neighbour as near."""
    x, y = _gelu(dtype)
    inside = x.isfinite() & (x >= lowest)
    x, y = x[inside].double(), y[inside].double()
    wanted = x * torch.special.log_ndtr(x).exp()

    rounded = wanted.to(dtype).abs()
    unit = torch.nextafter(rounded, torch.full_like(rounded, torch.inf)).double() - rounded.double()
    unit[unit.isinf()] = torch.inf  # the largest number has no next one

    assert ((y - wanted).abs() / unit).max() <= units


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gelu_of_infinities(dtype: torch.dtype) -> None:
    """Infinity stays, minus infinity is NaN as in the formula by erf (``-inf * 0``), and of finite numbers all are
    finite."""
    x, y = _gelu(dtype)

    assert torch.equal(y.isnan(), x.isnan() | x.isneginf())
    assert torch.equal(y.isinf(), x.isposinf())
