# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""``2 * x`` by rows, where a row may begin more than 2**31 elements after the first.

``x`` is ``(rows, cols)`` of any strides: with a large pitch few elements span much memory. The result is contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor


def reference(x: Tensor) -> Tensor:
    return (x.float() * 2.0).to(x.dtype)


@triton.jit
def double_kernel(x, out, cols, row_pitch, col_pitch, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    if BUG == "product-in-int32":
        start = row * tl.cast(row_pitch, tl.int32)
    elif BUG == "cast-after-product":
        # flash-linear-attention #692: the product has overflowed before it is widened.
        start = (row * tl.cast(row_pitch, tl.int32)).to(tl.int64)
    else:
        start = row.to(tl.int64) * row_pitch
    if BUG == "column-in-int32":
        column = c * tl.cast(col_pitch, tl.int32)
    else:
        column = c.to(tl.int64) * col_pitch
    value = tl.load(x + start + column, mask=c < cols, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * cols + c, (value * 2.0).to(out.dtype.element_ty), mask=c < cols)


def double(x: Tensor, *, bug: str = "") -> Tensor:
    rows, cols = x.shape
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if out.numel():
        double_kernel[(rows,)](x, out, cols, *x.stride(), BLOCK=triton.next_power_of_2(cols), BUG=bug)
    return out


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return double(x, bug=bug)

    return FusionSpec(
        name=f"wide {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows cols")},
        dims={"rows": dim(0, 16), "cols": dim(0, 64)},
    )
