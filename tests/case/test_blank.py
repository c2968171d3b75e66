"""Zeros that take no memory until they are written to are zeros like any others."""

from __future__ import annotations

import resource

import pytest
import torch

from pytest_fusion.case import blank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 5), (3, 5), (2048, 1024), (1, 1 << 22)])
def test_they_are_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Shape, strides, dtype and every element are those of torch.zeros; they can be written and read again."""
    made, wanted = blank.zeros(shape, dtype), torch.zeros(shape, dtype=dtype)
    assert (made.shape, made.stride(), made.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert made.data_ptr() % 16 == 0
    assert not made.view(torch.uint8).any() if made.dim() else made == 0
    made.fill_(1)
    assert torch.equal(made.float(), torch.ones(shape))


def test_what_is_not_written_takes_no_memory() -> None:
    """64 GiB of which one element is written; the process grows by less than a hundredth of it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = blank.zeros((1 << 20, 1 << 14), torch.float32)
    made[-1, -1] = 3.0
    assert (float(made[-1, -1]), float(made[5, 5])) == (3.0, 0.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000


def test_like() -> None:
    """The shape, the strides, the dtype and the wish for a gradient of a tensor without data."""
    form = torch.empty(300, 4096, dtype=torch.float16, device="meta").t().requires_grad_()
    made = blank.like(form)
    assert (made.shape, made.stride(), made.dtype, made.requires_grad) == ((4096, 300), (1, 4096), torch.float16, True)
    assert not made.any()
    assert blank.like(torch.empty(0, 7, device="meta")).shape == (0, 7)
