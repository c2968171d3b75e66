"""Activations and their slopes in float32, for kernels that apply one before they store."""

from __future__ import annotations

import triton.language as tl

from reference_kernels._common import jit


@jit
def activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """The activation in float32, by formulas that give what torch's own kernels give at infinities and NaN."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)  # not tl.maximum, which turns NaN into 0
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(t)) is sigmoid(2 * t), which needs no libdevice and keeps its digits where tanh is near -1.
        x = x / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@jit
def slope(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """The derivative of `activated` at ``x`` in float32."""
    if ACTIVATION == "relu":
        x = tl.where(x <= 0, 0.0, 1.0)  # 0 at 0 and 1 at NaN, as torch's own
    elif ACTIVATION == "gelu":
        bell = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        x = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * bell
    elif ACTIVATION == "gelu_tanh":
        gate = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
        x = gate + x * gate * (1.0 - gate) * (1.5957691216057308 + 0.21406444881780073 * x * x)
    elif ACTIVATION == "silu":
        gate = 1.0 / (1.0 + tl.exp(-x))
        x = gate * (1.0 + x * (1.0 - gate))
    return x
