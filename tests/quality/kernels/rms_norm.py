# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""RMS norm in two conventions.

Llama: float32 inside, rounded to ``x.dtype`` before the product with ``weight``. Gemma: float32 throughout with
``1 + weight``, one rounding to ``x.dtype`` at the end. ``x`` is ``(rows, hidden)`` or ``(outer, inner, hidden)``,
``weight`` is ``(hidden,)``, all of one floating dtype; so is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    xf = x.float()
    return (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def gemma_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    xf = x.float()
    return (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(x.dtype)


@triton.jit
def tile_kernel(
    x, weight, out, rows, hidden, row_pitch, col_pitch, weight_pitch, eps,
    GEMMA: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (c < hidden)[None, :]
    if BUG == "row-mask":
        inside = (r >= 0)[:, None] & (c < hidden)[None, :]
    if BUG == "ignores-row-stride":
        row_pitch = hidden
    if BUG == "ignores-column-stride":
        col_pitch = 1
    loaded = tl.load(x + r[:, None] * row_pitch + c[None, :] * col_pitch, mask=inside, other=0.0)
    value = loaded.to(tl.float32)
    if BUG == "sum-in-input-dtype":
        square = tl.sum(loaded * loaded, axis=1).to(tl.float32)
    else:
        square = tl.sum(value * value, axis=1)
    if BUG == "mean-over-block":
        mean = square / BLOCK
    else:
        mean = square / hidden
    if BUG == "eps-outside":
        scale = tl.rsqrt(mean) + eps
    else:
        scale = tl.rsqrt(mean + eps)
    w = tl.load(weight + c * weight_pitch, mask=c < hidden, other=0.0)
    normed = value * scale[:, None]
    factor = w.to(tl.float32)[None, :]
    if GEMMA:
        factor += 1.0
        if BUG == "cast-before-weight":
            normed = normed.to(out.dtype.element_ty).to(tl.float32)
    else:
        if BUG != "weight-before-cast":
            normed = normed.to(out.dtype.element_ty).to(tl.float32)
    result = normed * factor
    tl.store(out + r[:, None] * hidden + c[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def persistent_kernel(
    x, weight, out, rows, hidden, row_pitch, col_pitch, weight_pitch, eps, programs,
    BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK)
    w = tl.load(weight + c * weight_pitch, mask=c < hidden, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, programs):
        base = tl.cast(row, tl.int64)
        value = tl.load(x + base * row_pitch + c * col_pitch, mask=c < hidden, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps)
        result = (value * scale).to(out.dtype.element_ty).to(tl.float32) * w
        tl.store(out + base * hidden + c, result.to(out.dtype.element_ty), mask=c < hidden)


@triton.jit
def looped_kernel(
    x, weight, out, hidden, row_pitch, col_pitch, weight_pitch, eps,
    BLOCK: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(hidden, BLOCK)
    partial = tl.zeros([BLOCK], tl.float32)
    for i in range(blocks):
        block = i
        if BACKWARDS:
            block = blocks - 1 - i
        c = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < hidden, other=0.0).to(tl.float32)
        partial += value * value
    scale = 1.0 / tl.sqrt(tl.sum(partial, axis=0) / hidden + eps)
    for i in range(blocks):
        c = i * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < hidden, other=0.0).to(tl.float32)
        w = tl.load(weight + c * weight_pitch, mask=c < hidden, other=0.0).to(tl.float32)
        result = (value * scale).to(out.dtype.element_ty).to(tl.float32) * w
        tl.store(out + row * hidden + c, result.to(out.dtype.element_ty), mask=c < hidden)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, gemma: bool = False, bug: str = "", rows_per_program: int = 4
) -> Tensor:
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if bug == "no-empty-guard":
        # The host works out the number of columns from the number of rows, as in vllm-xpu-kernels #609.
        hidden = x.numel() // rows
    if out.numel() == 0:
        return out
    if bug == "ignores-offset":
        x = torch.as_strided(x, x.shape, x.stride(), 0)
    block = triton.next_power_of_2(hidden)
    if bug == "width-cap":
        block = min(block, 256)
    programs = triton.cdiv(rows, rows_per_program)
    if bug == "grid-cap":
        # 65535 programs on a real grid axis (apex #411); 8 here, so that an interpreter reaches it.
        programs = min(programs, 8)
    tile_kernel[(programs,)](
        x, weight, out, rows, hidden, x.stride(0), x.stride(1), weight.stride(0), eps,
        GEMMA=gemma, ROWS=rows_per_program, BLOCK=block, BUG=bug,
    )  # fmt: skip
    return out


def rms_norm_persistent(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if out.numel():
        programs = min(rows, 8)
        persistent_kernel[(programs,)](
            x, weight, out, rows, hidden, x.stride(0), x.stride(1), weight.stride(0), eps, programs,
            BLOCK=triton.next_power_of_2(hidden),
        )  # fmt: skip
    return out


def rms_norm_looped(x: Tensor, weight: Tensor, eps: float, *, backwards: bool = False) -> Tensor:
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if out.numel():
        looped_kernel[(rows,)](
            x, weight, out, hidden, x.stride(0), x.stride(1), weight.stride(0), eps, BLOCK=64, BACKWARDS=backwards,
        )  # fmt: skip
    return out


def rms_norm_by_copy(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The wrapper materialises whatever is not contiguous, and the kernel sees one pitch."""
    return rms_norm(x.contiguous(), weight.contiguous(), eps)


def rms_norm_strict(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The wrapper refuses what the kernel does not support.

    Raises ``ValueError`` for an input that is not contiguous or does not start on 16 bytes.
    """
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("rms_norm_strict needs contiguous tensors: call .contiguous()")
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        raise ValueError("rms_norm_strict needs tensors that start on 16 bytes: call .clone()")
    return rms_norm(x, weight, eps)


@triton.jit
def nested_kernel(
    x, weight, out, inner, hidden, outer_pitch, inner_pitch, col_pitch, weight_pitch, eps,
    BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    if BUG == "flattens":
        base = row * inner_pitch
    else:
        base = (row // inner) * outer_pitch + (row % inner) * inner_pitch
    value = tl.load(x + base + c * col_pitch, mask=c < hidden, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps)
    w = tl.load(weight + c * weight_pitch, mask=c < hidden, other=0.0).to(tl.float32)
    result = (value * scale).to(out.dtype.element_ty).to(tl.float32) * w
    tl.store(out + row * hidden + c, result.to(out.dtype.element_ty), mask=c < hidden)


def rms_norm_nested(x: Tensor, weight: Tensor, eps: float, *, bug: str = "") -> Tensor:
    outer, inner, hidden = x.shape
    out = torch.empty((outer, inner, hidden), dtype=x.dtype, device=x.device)
    if out.numel():
        nested_kernel[(outer * inner,)](
            x, weight, out, inner, hidden, *x.stride(), weight.stride(0), eps,
            BLOCK=triton.next_power_of_2(hidden), BUG=bug,
        )  # fmt: skip
    return out


def make_spec(bug: str = "", *, gemma: bool = False, rows_per_program: int = 4) -> FusionSpec:
    def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, gemma=gemma, bug=bug, rows_per_program=rows_per_program)

    return FusionSpec(
        name=f"rms_norm{'_gemma' if gemma else ''} {bug or rows_per_program}",
        fused=fused,
        reference=gemma_reference if gemma else reference,
        inputs={"x": tensor("rows hidden"), "weight": tensor("hidden"), "eps": 1e-6},
        dims={"rows": dim(0, 80)},
    )


def make_variant(fused: Callable[..., Any], *, rejects: tuple[type[BaseException], ...] = ()) -> FusionSpec:
    """The same maths by another honest kernel; ``fused`` has the signature of ``reference``."""
    return FusionSpec(
        name=getattr(fused, "__name__", "variant"),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows hidden"), "weight": tensor("hidden"), "eps": 1e-6},
        dims={"rows": dim(0, 16)},
        rejects=rejects,
    )


def make_nested_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_nested(x, weight, eps, bug=bug)

    return FusionSpec(
        name=f"rms_norm_nested {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("outer inner hidden"), "weight": tensor("hidden"), "eps": 1e-6},
        dims={"outer": dim(0, 4), "inner": dim(0, 4)},
    )
