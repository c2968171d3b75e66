# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Running sums over rows, forwards or backwards.

Float32 inside, one rounding to ``x.dtype`` at the end. ``x`` is ``(rows, cols)``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor


def forward_reference(x: Tensor) -> Tensor:
    return torch.cumsum(x.float(), -1).to(x.dtype)


def backward_reference(x: Tensor) -> Tensor:
    return x.float().flip(-1).cumsum(-1).flip(-1).to(x.dtype)


@triton.jit
def scan_kernel(
    x, out, cols, row_pitch, col_pitch, REVERSE: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    carry = tl.zeros([], tl.float32)
    if BUG == "total-minus-prefix":
        for start in range(0, cols, BLOCK):
            c = start + tl.arange(0, BLOCK)
            carry += tl.sum(
                tl.load(x + row * row_pitch + c * col_pitch, mask=c < cols, other=0.0).to(tl.float32), axis=0
            )
    blocks = tl.cdiv(cols, BLOCK)
    for step in range(blocks):
        block = step
        if REVERSE:
            if BUG != "total-minus-prefix":
                block = blocks - 1 - step
        c = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < cols, other=0.0).to(tl.float32)
        if BUG == "total-minus-prefix":
            result = carry - tl.cumsum(value, axis=0) + value
            carry -= tl.sum(value, axis=0)
        else:
            result = carry + tl.cumsum(value, axis=0, reverse=REVERSE)
            if BUG != "no-carry":
                carry += tl.sum(value, axis=0)
        tl.store(out + row * cols + c, result.to(out.dtype.element_ty), mask=c < cols)


def scan(x: Tensor, *, reverse: bool, bug: str = "") -> Tensor:
    cols = x.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // cols if bug == "rows-by-division" else x.shape[0]
    if out.numel():
        scan_kernel[(rows,)](x, out, cols, *x.stride(), REVERSE=reverse, BLOCK=32, BUG=bug)
    return out


def make_spec(bug: str = "", *, reverse: bool = False) -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return scan(x, reverse=reverse, bug=bug)

    return FusionSpec(
        name=f"{'reverse_' if reverse else ''}cumsum {bug}".strip(),
        fused=fused,
        reference=backward_reference if reverse else forward_reference,
        inputs={"x": tensor("rows cols")},
        dims={"rows": dim(0, 16), "cols": dim(0, 160)},
    )
