"""Tutorial 02: softmax in one pass over each row, one program a row and with programs that loop over the rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tutorials.common import assert_rounded, each_float, normal

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def softmax_row_kernel(output_ptr, input_ptr, input_row_stride, output_row_stride, n_cols, BLOCK_SIZE: tl.constexpr):
    row_idx = tl.program_id(0)
    col_offsets = tl.arange(0, BLOCK_SIZE)
    mask = col_offsets < n_cols
    row = tl.load(input_ptr + row_idx * input_row_stride + col_offsets, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(row - tl.max(row, axis=0))
    tl.store(output_ptr + row_idx * output_row_stride + col_offsets, numerator / tl.sum(numerator, axis=0), mask=mask)


@triton.jit
def softmax_kernel(
    output_ptr,
    input_ptr,
    input_row_stride,
    output_row_stride,
    n_rows,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    num_stages: tl.constexpr,
):
    row_start = tl.program_id(0)
    row_step = tl.num_programs(0)
    for row_idx in tl.range(row_start, n_rows, row_step, num_stages=num_stages):
        row_start_ptr = input_ptr + row_idx * input_row_stride
        col_offsets = tl.arange(0, BLOCK_SIZE)
        mask = col_offsets < n_cols
        row = tl.load(row_start_ptr + col_offsets, mask=mask, other=-float("inf")).to(tl.float32)
        row_minus_max = row - tl.max(row, axis=0)
        numerator = tl.exp(row_minus_max)
        denominator = tl.sum(numerator, axis=0)
        output_row_start_ptr = output_ptr + row_idx * output_row_stride
        tl.store(output_row_start_ptr + col_offsets, numerator / denominator, mask=mask)


def softmax_by_row(x: Tensor) -> Tensor:
    n_rows, n_cols = x.shape
    y = torch.empty(n_rows, n_cols, dtype=x.dtype)
    block = triton.next_power_of_2(n_cols)
    softmax_row_kernel[(n_rows,)](y, x, x.stride(0), y.stride(0), n_cols, BLOCK_SIZE=block, num_warps=4)
    return y


def softmax(x: Tensor) -> Tensor:
    n_rows, n_cols = x.shape
    properties = triton.runtime.driver.active.utils.get_device_properties(0)
    y = torch.empty(n_rows, n_cols, dtype=x.dtype)
    sizes = (x.stride(0), y.stride(0), n_rows, n_cols)
    block = triton.next_power_of_2(n_cols)
    kernel = softmax_kernel.warmup(y, x, *sizes, BLOCK_SIZE=block, num_stages=4, num_warps=8, grid=(1,))
    kernel._init_handles()
    fitting = properties["max_num_regs"] // (kernel.n_regs * properties["warpSize"] * 8)
    fitting = min(fitting, properties["max_shared_mem"] // kernel.metadata.shared)
    programs = min(properties["multiprocessor_count"] * fitting, n_rows)
    kernel[(programs, 1, 1)](y, x, *sizes, block, 4)
    return y


@each_float
@pytest.mark.parametrize(
    ("launch", "shape"),
    [(softmax_by_row, (23, 61)), (softmax_by_row, (3, 300)), (softmax, (2, 61)), (softmax, (150, 61))],
)
def test_softmax(launch: Callable[[Tensor], Tensor], shape: tuple[int, int], dtype: torch.dtype) -> None:
    """As torch's, on rows that lie apart; every program of the loop does all of its rows, one or two.

    Subtracting the maximum, at most 16 away, moves the exponential by 16 roundings at most; sum, exponential and
    division add no more than 16 others.
    """
    rows, columns = shape
    x = (2 * normal(rows, columns + 7, dtype=dtype))[:, :columns]
    exact = torch.softmax(x.double(), dim=1)
    assert (x.amax(1) - x.amin(1)).max() < 16
    assert_rounded(launch(x), exact, roundings=32)


def test_softmax_of_infinities() -> None:
    """Minus infinity has no weight; a row of nothing else has no softmax."""
    x = torch.tensor([[0.0, -torch.inf, 0.0], [-torch.inf] * 3])
    for launch in (softmax_by_row, softmax):
        assert torch.equal(launch(x)[0], torch.tensor([0.5, 0.0, 0.5]))
        assert launch(x)[1].isnan().all()
