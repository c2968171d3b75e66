# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Scaled, optionally masked softmax over rows: float32 inside, one rounding to ``x.dtype`` at the end.

``x`` is ``(rows, cols)``, ``mask`` a bool tensor of that shape (True keeps) or None. A row that is masked as a whole
is zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, optional, tensor, values

LOG2_E = 1.4426950408889634


def reference(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    score = x.float() * scale
    if mask is None:
        return torch.softmax(score, -1).to(x.dtype)
    weights = torch.softmax(score.masked_fill(~mask, -torch.inf), -1)
    return torch.where(mask.any(-1, keepdim=True), weights, 0.0).to(x.dtype)


@triton.jit
def row_kernel(
    x, mask, out, cols, row_pitch, col_pitch, mask_row_pitch, mask_col_pitch, scale,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < cols
    if BUG == "pads-with-zero":
        score = tl.load(x + row * row_pitch + c * col_pitch, mask=inside, other=0.0).to(tl.float32) * scale
    else:
        score = tl.load(x + row * row_pitch + c * col_pitch, mask=inside, other=-float("inf")).to(tl.float32) * scale
    visible = inside
    if MASKED:
        if BUG == "mask-pitch":
            mask_row_pitch = row_pitch
        visible = tl.load(mask + row * mask_row_pitch + c * mask_col_pitch, mask=inside, other=0) != 0
        if BUG != "masks-by-product":
            score = tl.where(visible, score, -float("inf"))
    if BUG == "no-max":
        weight = tl.exp(score)
    else:
        weight = tl.exp(score - tl.max(score, axis=0))
    if BUG == "masks-by-product":
        weight = weight * visible.to(tl.float32)
    result = weight / tl.sum(weight, axis=0)
    if MASKED:
        if BUG != "masked-row":
            result = tl.where(tl.max(visible.to(tl.int32), axis=0) > 0, result, 0.0)
    tl.store(out + row * cols + c, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def online_kernel(
    x, mask, out, cols, row_pitch, col_pitch, mask_row_pitch, mask_col_pitch, scale,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    seen = tl.zeros([], tl.int32)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < cols
        score = tl.load(x + row * row_pitch + c * col_pitch, mask=inside, other=-float("inf")).to(tl.float32) * scale
        if MASKED:
            visible = tl.load(mask + row * mask_row_pitch + c * mask_col_pitch, mask=inside, other=0) != 0
            score = tl.where(visible, score, -float("inf"))
            seen = tl.maximum(seen, tl.max(visible.to(tl.int32), axis=0))
        higher = tl.maximum(top, tl.max(score, axis=0))
        # exp(-inf - -inf) is NaN: until something finite was seen, zero stands in for the maximum.
        shift = higher if BUG == "empty-first-block" else tl.where(higher == -float("inf"), 0.0, higher)
        fresh = tl.sum(tl.exp2((score - shift) * 1.4426950408889634), axis=0)
        if BUG == "no-rescale":
            total = total + fresh
        else:
            total = total * tl.exp2((top - shift) * 1.4426950408889634) + fresh
        top = higher
    shift = tl.where(top == -float("inf"), 0.0, top)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < cols
        score = tl.load(x + row * row_pitch + c * col_pitch, mask=inside, other=-float("inf")).to(tl.float32) * scale
        if MASKED:
            visible = tl.load(mask + row * mask_row_pitch + c * mask_col_pitch, mask=inside, other=0) != 0
            score = tl.where(visible, score, -float("inf"))
        result = tl.exp2((score - shift) * 1.4426950408889634) / total
        if MASKED:
            result = tl.where(seen > 0, result, 0.0)
        tl.store(out + row * cols + c, result.to(out.dtype.element_ty), mask=inside)


def _launch(kernel, x: Tensor, mask: Tensor | None, out: Tensor, scale: float, block: int, bug: str) -> Tensor:
    rows, cols = x.shape
    if out.numel():
        pitches = mask.stride() if mask is not None else (0, 0)
        # A bool tensor is one byte per element, 0 or 1.
        raw = mask.view(torch.uint8) if mask is not None else None
        kernel[(rows,)](x, raw, out, cols, *x.stride(), *pitches, scale, MASKED=mask is not None, BLOCK=block, BUG=bug)
    return out


def softmax(x: Tensor, mask: Tensor | None, scale: float, *, bug: str = "") -> Tensor:
    block = triton.next_power_of_2(x.shape[1])
    if bug == "width-cap":
        block = min(block, 512)
    return _launch(row_kernel, x, mask, torch.empty(x.shape, dtype=x.dtype, device=x.device), scale, block, bug)


def softmax_online(x: Tensor, mask: Tensor | None, scale: float, *, bug: str = "") -> Tensor:
    return _launch(online_kernel, x, mask, torch.empty(x.shape, dtype=x.dtype, device=x.device), scale, 64, bug)


@triton.jit
def in_place_kernel(x, cols, row_pitch, col_pitch, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    at = x + row * row_pitch + c * col_pitch
    score = tl.load(at, mask=c < cols, other=-float("inf")).to(tl.float32)
    weight = tl.exp(score - tl.max(score, axis=0))
    tl.store(at, (weight / tl.sum(weight, axis=0)).to(x.dtype.element_ty), mask=c < cols)


def in_place_reference(x: Tensor) -> None:
    x.copy_(torch.softmax(x.float(), -1).to(x.dtype))


def softmax_in_place(x: Tensor) -> None:
    rows, cols = x.shape
    if x.numel():
        in_place_kernel[(rows,)](x, cols, *x.stride(), BLOCK=triton.next_power_of_2(cols))


def make_spec(bug: str = "", *, online: bool = False) -> FusionSpec:
    launch = softmax_online if online else softmax

    def fused(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        return launch(x, mask, scale, bug=bug)

    return FusionSpec(
        name=f"{launch.__name__} {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "x": tensor("rows cols"),
            "mask": optional(tensor("rows cols", dtype=torch.bool, values=values.booleans())),
            "scale": 0.3,
        },
        dims={"rows": dim(0, 12)},
    )


def make_in_place_spec() -> FusionSpec:
    return FusionSpec(
        name="softmax_in_place",
        fused=softmax_in_place,
        reference=in_place_reference,
        inputs={"x": tensor("rows cols")},
        dims={"rows": dim(0, 12)},
        mutates=["x"],
    )
