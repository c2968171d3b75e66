# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Gated units ``act(gate) * up``: float32 inside, one rounding to ``gate.dtype`` at the end.

``gate`` and ``up`` are ``(rows, cols)`` of one floating dtype; so is the result. ``act`` is SiLU or GELU (erf form).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pytest_fusion import FusionSpec, dim, tensor


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def geglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (functional.gelu(gate.float()) * up.float()).to(gate.dtype)


@triton.jit
def glu_kernel(
    gate, up, out, rows, cols, gate_row, gate_col, up_row, up_col,
    GELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (r < rows) & (c < cols)
    if BUG == "no-mask":
        inside = (r >= 0) & (c >= 0)
    if BUG == "up-pitch":
        up_row = gate_row
    if BUG == "column-mask-only":
        inside = (r >= 0) & (c < cols)
    g = tl.load(gate + r * gate_row + c * gate_col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + r * up_row + c * up_col, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        if BUG == "tanh-for-erf":
            inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
            active = g * (1.0 / (1.0 + tl.exp(-2.0 * inner)))
        else:
            active = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    else:
        active = g * (1.0 / (1.0 + tl.exp(-g)))
    if BUG == "activation-rounded":
        active = active.to(gate.dtype.element_ty).to(tl.float32)
    at = r * cols + c
    if BUG == "output-row":
        at = c + r * 0
    if BUG == "output-tile":
        at = r * cols + tl.arange(0, BLOCK)[None, :]
    tl.store(out + at, (active * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def flat_kernel(gate, up, out, count, BLOCK: tl.constexpr, BUG: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    if BUG == "off-by-one-mask":
        inside = at <= count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=inside)


def glu(gate: Tensor, up: Tensor, *, gelu: bool, bug: str = "") -> Tensor:
    rows, cols = gate.shape
    out = torch.empty((rows, cols), dtype=gate.dtype, device=gate.device)
    if out.numel():
        glu_kernel[(triton.cdiv(rows, 8), triton.cdiv(cols, 64))](
            gate, up, out, rows, cols, *gate.stride(), *up.stride(), GELU=gelu, ROWS=8, BLOCK=64, BUG=bug
        )
    return out


def swiglu_flat(gate: Tensor, up: Tensor, *, bug: str = "") -> Tensor:
    """One flat index over all elements, which only contiguous tensors have."""
    if bug != "flat-on-any-layout":
        gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    count = out.numel()
    if count:
        blocks = count // 256 if bug == "floor-grid" else triton.cdiv(count, 256)
        if blocks:
            flat_kernel[(blocks,)](gate, up, out, count, BLOCK=256, BUG=bug)
    return out


def _spec(name: str, fused: Callable[..., Tensor], reference: Callable[..., Tensor]) -> FusionSpec:
    return FusionSpec(
        name=name.strip(),
        fused=fused,
        reference=reference,
        inputs={"gate": tensor("rows cols"), "up": tensor("rows cols")},
        dims={"rows": dim(0, 64)},
    )


def make_swiglu_spec(bug: str = "") -> FusionSpec:
    def fused(gate: Tensor, up: Tensor) -> Tensor:
        return glu(gate, up, gelu=False, bug=bug)

    return _spec(f"swiglu {bug}", fused, swiglu_reference)


def make_geglu_spec(bug: str = "") -> FusionSpec:
    def fused(gate: Tensor, up: Tensor) -> Tensor:
        return glu(gate, up, gelu=True, bug=bug)

    return _spec(f"geglu {bug}", fused, geglu_reference)


def make_flat_spec(bug: str = "") -> FusionSpec:
    def fused(gate: Tensor, up: Tensor) -> Tensor:
        return swiglu_flat(gate, up, bug=bug)

    return _spec(f"swiglu_flat {bug}", fused, swiglu_reference)
