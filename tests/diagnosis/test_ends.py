"""Accesses one element past the end of a tensor, beside those that are further past it where another dim is longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pytest_fusion import FusionSpec, dim, tensor, values
from pytest_fusion.plugin.testing import examine

T = torch.Tensor


@triton.jit
def doubled_kernel(x, out, rows, n, HOW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * n + at, mask=(at < n) & (row < rows), other=0.0)
    pitch = n + 1 if HOW == "pitch" else n
    end = n + 1 if HOW == "columns" else n
    tl.store(out + row * pitch + at, value * 2, mask=at < end)


def doubled_spec(how: str) -> FusionSpec:
    def fused(x: T) -> T:
        out, (rows, n) = torch.empty_like(x), x.shape
        block = triton.next_power_of_2(n + 1)
        doubled_kernel[(rows + (how == "rows"),)](x.contiguous(), out, rows, n, HOW=how, BLOCK=block)
        return out

    inputs: dict[str, Any] = {"x": tensor("rows n", layouts=("contiguous",), values=values.normal())}
    bounds = {"rows": dim(1, 30), "n": dim(2 if how == "pitch" else 1, 30)}
    return FusionSpec(fused=fused, reference=lambda x: x * 2, inputs=inputs, dtypes="float32", dims=bounds, name=how)


@pytest.mark.parametrize(
    ("how", "cause"), [("pitch", "out-of-bounds"), ("columns", "off-by-one-mask"), ("rows", "off-by-one-mask")]
)
def test_rows_too_far_apart_are_not_off_by_one(how: str, cause: str, tmp_path: Path) -> None:
    """Two such rows end one element past the tensor, and four three; one column or row too many is one at any size."""
    record = examine(doubled_spec(how), seed=0, root=tmp_path)
    assert record.failed_check == "bounds"
    assert record.cause == cause, record.diagnosis
