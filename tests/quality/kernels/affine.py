# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""``act(x * scale + bias)``: float32 inside, one rounding to ``x.dtype`` at the end.

``x`` is ``(rows, cols)``, ``bias`` ``(cols,)`` or None, ``scale`` a float; ``act`` is ReLU (which keeps NaN, as
torch's does) or nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from torch import Tensor

from pytest_fusion import FusionSpec, dim, optional, tensor


def relu_reference(x: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return torch.relu(affine_float(x, bias, scale)).to(x.dtype)


def affine_reference(x: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return affine_float(x, bias, scale).to(x.dtype)


def affine_float(x: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scaled = x.float() * scale
    return scaled if bias is None else scaled + bias.float()


@triton.jit
def affine_kernel(
    x, bias, out, rows, cols, row_pitch, col_pitch, bias_pitch, scale,
    BIASED: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (r < rows) & (c < cols)
    at = x + r * row_pitch + c * col_pitch
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32) * scale
    if BUG == "writes-input":
        tl.store(at, value.to(x.dtype.element_ty), mask=inside)
    if BIASED:
        if BUG == "bias-first-tile":
            b = tl.load(bias + tl.arange(0, BLOCK)[None, :] * bias_pitch, mask=c < cols, other=0.0)
        else:
            b = tl.load(bias + c * bias_pitch, mask=c < cols, other=0.0)
        value += b.to(tl.float32)
    if RELU:
        if BUG == "relu-drops-nan":
            value = tl.maximum(value, 0.0)
        else:
            value = tl.where(value < 0.0, 0.0, value)
    tl.store(out + r * cols + c, value.to(out.dtype.element_ty), mask=inside)


_folded: dict[object, Tensor] = {}


def affine(x: Tensor, bias: Tensor | None, scale: float, *, relu: bool, bug: str = "") -> Tensor:
    rows, cols = x.shape
    if bug == "returns-input" and scale == 1.0 and bias is None:
        return x
    if bug == "caches-bias" and bias is not None:
        # A cache of prepared parameters that is keyed by what they look like, not by what they hold.
        bias = _folded.setdefault((bias.shape, bias.dtype), bias.clone())
    dtype = torch.float32 if bug == "keeps-float32" else x.dtype
    out = torch.empty((rows, cols), dtype=dtype, device=x.device)
    if out.numel():
        affine_kernel[(triton.cdiv(rows, 8), triton.cdiv(cols, 64))](
            x, bias, out, rows, cols, *x.stride(), bias.stride(0) if bias is not None else 0, scale,
            BIASED=bias is not None, RELU=relu, ROWS=8, BLOCK=64, BUG=bug,
        )  # fmt: skip
    return out.squeeze() if bug == "squeezes" else out


def make_spec(bug: str = "", *, relu: bool = True) -> FusionSpec:
    def fused(x: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        return affine(x, bias, scale, relu=relu, bug=bug)

    return FusionSpec(
        name=f"affine{'_relu' if relu else ''} {bug}".strip(),
        fused=fused,
        reference=relu_reference if relu else affine_reference,
        inputs={
            "x": tensor("rows cols"),
            "bias": optional(tensor("cols")),
            "scale": st.sampled_from([1.0, 0.5, -1.7]),
        },
        dims={"rows": dim(0, 64)},
    )


def make_refusing_spec() -> FusionSpec:
    """A wrapper that refuses whatever it is given: nothing is ever computed, so nothing was shown."""

    def fused(x: Tensor) -> Tensor:
        raise ValueError(f"layout of {tuple(x.shape)} is not supported")

    def reference(x: Tensor) -> Tensor:
        return torch.relu(x)

    return FusionSpec(
        name="refuses-everything",
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows cols")},
        rejects=[ValueError],
    )
