# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""One-argument activations on a strided vector ``x`` of shape ``(n,)``.

Float32 inside, one rounding to ``x.dtype`` at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pytest_fusion import FusionSpec, tensor


def softplus_reference(x: Tensor) -> Tensor:
    return functional.softplus(x.float()).to(x.dtype)


def log_sigmoid_reference(x: Tensor) -> Tensor:
    return functional.logsigmoid(x.float()).to(x.dtype)


def negative_reciprocal_reference(x: Tensor) -> Tensor:
    return torch.reciprocal(torch.neg(x.float())).to(x.dtype)


def clipped_reference(x: Tensor) -> Tensor:
    """In the dtype of ``x``, which holds none of these numbers but one half."""
    return torch.where((x > 0.3) | (x <= -0.5), x.clamp(-1.7, 1.7) * 0.6, 0.1)


REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": softplus_reference,
    "log_sigmoid": log_sigmoid_reference,
    "negative_reciprocal": negative_reciprocal_reference,
    "clipped": clipped_reference,
}


@triton.jit
def log1p(e):
    """log(1 + e) for e in [0, 1] without losing a small e: Kahan's quotient."""
    u = 1.0 + e
    return tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def activation_kernel(x, out, count, pitch, OP: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at * pitch, mask=at < count, other=1.0).to(tl.float32)
    if OP == "softplus":
        if BUG == "no-threshold":
            result = tl.log(1.0 + tl.exp(value))
        else:
            result = tl.where(value < 0.0, 0.0, value) + log1p(tl.exp(-tl.abs(value)))
    elif OP == "log_sigmoid":
        if BUG == "log-of-sigmoid":
            result = tl.log(1.0 / (1.0 + tl.exp(-value)))
        else:
            result = tl.where(value > 0.0, 0.0, value) - log1p(tl.exp(-tl.abs(value)))
    elif OP == "clipped":
        bound = 1.75 if BUG == "other-bound" else 1.7
        below = value < -0.5 if BUG == "open-at-the-threshold" else value <= -0.5
        within = tl.clamp(value, -bound, bound, propagate_nan=tl.PropagateNan.ALL)
        result = tl.where((value > 0.3) | below, within * 0.6, 0.1)
    else:
        if BUG == "zero-minus-x":
            result = 1.0 / (0.0 - value)
        else:
            result = -1.0 / value
    tl.store(out + at, result.to(out.dtype.element_ty), mask=at < count)


def activation(x: Tensor, *, op: str, bug: str = "") -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        activation_kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), x.stride(0), OP=op, BLOCK=128, BUG=bug)
    return out


def make_spec(op: str, bug: str = "") -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return activation(x, op=op, bug=bug)

    return FusionSpec(name=f"{op} {bug}".strip(), fused=fused, reference=REFERENCES[op], inputs={"x": tensor("n")})
