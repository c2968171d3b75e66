# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""``relu(x @ weight.T + bias)``: float32 inside, one rounding to ``x.dtype`` at the end.

``x`` is ``(rows, inner)``, ``weight`` ``(cols, inner)``, ``bias`` ``(cols,)``, all of one floating dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

TILE = 16
SPLITS = 3


def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x.float() @ weight.float().T + bias.float()).to(x.dtype)


@triton.jit
def linear_kernel(
    x, weight, bias, out, rows, cols, inner, x_row, x_col, w_row, w_col, bias_pitch,
    TILE: tl.constexpr, BACKWARDS: tl.constexpr, BIAS_FIRST: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    c = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    b = tl.load(bias + c * bias_pitch, mask=c < cols, other=0.0).to(tl.float32)
    if BUG == "low-precision-accumulator":
        total = tl.zeros([TILE, TILE], x.dtype.element_ty)
    else:
        total = tl.zeros([TILE, TILE], tl.float32)
        if BIAS_FIRST:
            total += b
    steps = tl.cdiv(inner, TILE)
    if BUG == "floor-steps":
        steps = inner // TILE
    for i in range(steps):
        step = i
        if BACKWARDS:
            step = steps - 1 - i
        k = step * TILE + tl.arange(0, TILE)
        across, down = k[None, :], k[:, None]
        left_mask = (r < rows) & (across < inner)
        right_mask = (c < cols) & (down < inner)
        if BUG == "weight-tail":
            right_mask = (c < cols) & (down >= 0)
        left = tl.load(x + r * x_row + across * x_col, mask=left_mask, other=0.0)
        right = tl.load(weight + c * w_row + down * w_col, mask=right_mask, other=0.0)
        if BUG == "bf16-operands":
            left = left.to(tl.bfloat16)
            right = right.to(tl.bfloat16)
        product = tl.dot(left, right, input_precision="ieee")
        total += product.to(total.dtype)
    result = total.to(tl.float32)
    if not BIAS_FIRST:
        result += b
    result = tl.where(result < 0.0, 0.0, result)
    keep = (r < rows) & (c < cols)
    if BUG == "store-columns":
        keep = (r < rows) & (c >= 0)
    tl.store(out + r * cols + c, result.to(out.dtype.element_ty), mask=keep)


def linear(x: Tensor, weight: Tensor, bias: Tensor, *, order: str = "", bug: str = "") -> Tensor:
    rows, inner = x.shape
    cols = weight.shape[0]
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if out.numel():
        linear_kernel[(triton.cdiv(rows, TILE), triton.cdiv(cols, TILE))](
            x, weight, bias, out, rows, cols, inner, *x.stride(), *weight.stride(), bias.stride(0),
            TILE=TILE, BACKWARDS=order == "backwards", BIAS_FIRST=order == "bias-first", BUG=bug,
        )  # fmt: skip
    return out


@triton.jit
def partial_kernel(
    x, weight, bias, partial, rows, cols, inner, chunk, x_row, x_col, w_row, w_col, bias_pitch,
    TILE: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(2)
    r = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    c = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    total = tl.zeros([TILE, TILE], tl.float32)
    start = split * chunk
    for step in range(tl.cdiv(chunk, TILE)):
        k = start + step * TILE + tl.arange(0, TILE)
        end = tl.minimum(inner, start + chunk)
        left = tl.load(x + r * x_row + k[None, :] * x_col, mask=(r < rows) & (k[None, :] < end), other=0.0)
        right = tl.load(weight + c * w_row + k[:, None] * w_col, mask=(c < cols) & (k[:, None] < end), other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    b = tl.load(bias + c * bias_pitch, mask=c < cols, other=0.0).to(tl.float32)
    if BUG == "bias-in-each-split":
        total += b
    else:
        total += tl.where(split == 0, b, 0.0)
    tl.store(partial + (split.to(tl.int64) * rows + r) * cols + c, total, mask=(r < rows) & (c < cols))


@triton.jit
def finish_kernel(partial, out, count, splits, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(partial + tl.cast(split, tl.int64) * count + at, mask=at < count, other=0.0)
    tl.store(out + at, tl.where(total < 0.0, 0.0, total).to(out.dtype.element_ty), mask=at < count)


def linear_split(x: Tensor, weight: Tensor, bias: Tensor, *, bug: str = "") -> Tensor:
    """The inner dimension in splits, summed in float32 by a second kernel."""
    rows, inner = x.shape
    cols = weight.shape[0]
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if out.numel():
        splits = max(1, min(SPLITS, triton.cdiv(inner, TILE)))
        chunk = triton.cdiv(inner, splits)
        if bug == "floor-chunk":
            chunk = inner // splits
        partial = torch.empty((splits, rows, cols), dtype=torch.float32, device=x.device)
        partial_kernel[(triton.cdiv(rows, TILE), triton.cdiv(cols, TILE), splits)](
            x, weight, bias, partial, rows, cols, inner, chunk, *x.stride(), *weight.stride(), bias.stride(0),
            TILE=TILE, BUG=bug,
        )  # fmt: skip
        finish_kernel[(triton.cdiv(out.numel(), 256),)](partial, out, out.numel(), splits, BLOCK=256)
    return out


def make_spec(bug: str = "", *, order: str = "", split: bool = False) -> FusionSpec:
    def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if split:
            return linear_split(x, weight, bias, bug=bug)
        return linear(x, weight, bias, order=order, bug=bug)

    return FusionSpec(
        name=f"linear{'_split' if split else ''} {order} {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows inner"), "weight": tensor("cols inner"), "bias": tensor("cols")},
        dims={
            "rows": dim(0, 20),
            "cols": dim(0, 20),
            "inner": dim(0, 5000 if bug == "low-precision-accumulator" else 52),
        },
    )
