# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""``relu(x * scale)`` and a row sum where the matter is how many kernels they take.

``x`` is ``(rows, hidden)`` in any layout, ``scale`` ``(hidden,)``; float32 inside, one rounding to ``x.dtype``. The row
sum adds blocks of a row by atomics into float32 zeros: two kernels, of which one clears.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

BLOCK = 64


def scaled_reference(x: Tensor, scale: Tensor) -> Tensor:
    return torch.relu(x.float() * scale.float()).to(x.dtype)


def sum_reference(x: Tensor) -> Tensor:
    return x.float().sum(-1)


@triton.jit
def scale_kernel(
    x, scale, out, hidden, row_pitch, pitch, scale_pitch, SCALE: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < hidden
    value = tl.load(x + row * row_pitch + h * pitch, mask=inside, other=0.0).to(tl.float32)
    if SCALE:
        value *= tl.load(scale + h * scale_pitch, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value < 0, 0.0, value)
    tl.store(out + row * hidden + h, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(x, out, hidden, row_pitch, pitch, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * row_pitch + h * pitch, mask=h < hidden, other=0.0).to(tl.float32)
    tl.atomic_add(out + row, tl.sum(value))


def _launch(x: Tensor, scale: Tensor, out: Tensor, *, multiplies: bool = True, relu: bool = True) -> Tensor:
    rows, hidden = x.shape
    if x.numel():
        grid = (rows, triton.cdiv(hidden, BLOCK))
        scale_kernel[grid](x, scale, out, hidden, *x.stride(), scale.stride(0), multiplies, relu, BLOCK)
    return out


def scaled(x: Tensor, scale: Tensor, *, bug: str = "") -> Tensor:
    if bug == "operators-of-torch" and x.dtype != torch.float32:
        # vllm #53203: a condition on dtypes is no longer met, and the formula runs in place of the kernel.
        return torch.relu(x.float() * scale.float()).to(x.dtype)
    if bug == "copies-strided":
        x = x.contiguous()
    if bug == "converts-scale":
        scale = scale.float()
    if bug == "converts-result":
        return _launch(x, scale, torch.empty(x.shape, dtype=torch.float32, device=x.device)).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if bug == "clears-first":
        out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if bug == "two-kernels":
        middle = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        return _launch(_launch(x, scale, middle, relu=False), scale, out, multiplies=False)
    return _launch(x, scale, out)


def row_sum(x: Tensor, *, bug: str = "") -> Tensor:
    rows, hidden = x.shape
    out = torch.zeros(rows, dtype=torch.float32, device=x.device)
    if bug == "clears-twice":
        out.zero_()
    if x.numel():
        sum_kernel[(rows, triton.cdiv(hidden, BLOCK))](x, out, hidden, *x.stride(), BLOCK)
    return out


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, scale: Tensor) -> Tensor:
        return scaled(x, scale, bug=bug)

    return FusionSpec(
        name=f"launch_count {bug}".strip(),
        fused=fused,
        reference=scaled_reference,
        inputs={"x": tensor("rows hidden"), "scale": tensor("hidden")},
        dims={"rows": dim(0, 64), "hidden": dim(0, 512)},
        max_launches=1,
    )


def make_sum_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return row_sum(x, bug=bug)

    return FusionSpec(
        name=f"row_sum_launches {bug}".strip(),
        fused=fused,
        reference=sum_reference,
        inputs={"x": tensor("rows hidden")},
        dims={"rows": dim(0, 64), "hidden": dim(0, 512)},
        deterministic=False,
        max_launches=2,
    )
