"""Activations and their slopes in float32, for kernels that apply one before they store."""

from __future__ import annotations

import triton.language as tl

from reference_kernels._common import jit


@jit
def _tail(t: tl.tensor) -> tl.tensor:
    """How much of a normal distribution is beyond ``t``, from 0 on, where the result is rounded to 16 bits: its
    logarithm is nearly a polynomial.

    Off by 7e-6 of itself at most up to 6, 1e-5 up to 6.5, and by less than half a unit of bfloat16, 2e-3, up to 7.6,
    where gelu is -1e-13; float16 has nothing but 0 from 5.7 on. Beyond, it falls too fast: by 3 % at 9, where gelu is
    -1e-18, and to 0 at 13, -8e-38. ``0.5 * (1 - erf)`` in float32 is off by 0.3 of itself at 5 and has no digit left
    from 5.5 on.
    """
    power = 6.00019739e-05 - 1.76032336e-06 * t
    power = power * t - 9.17044061e-04
    power = power * t + 8.4510725e-03
    power = power * t - 5.38355261e-02
    power = power * t - 4.58597898e-01
    power = power * t - 1.1511941
    return tl.exp2(power * t - 1.0)


@jit
def activated(x: tl.tensor, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """The activation in float32, by formulas that give what torch's own kernels give at infinities and NaN; as exact as
    ``DTYPE``, which the result is rounded to, can tell."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)  # not tl.maximum, which turns NaN into 0
    elif ACTIVATION == "gelu":
        if DTYPE == tl.float32:  # noqa: SIM300 -- a type, not a number
            x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
        else:
            # A third of erf's instructions. The tail is 0 at 13, so that no infinity is multiplied by it.
            near = tl.minimum(tl.abs(x), 13.0)
            half = 0.5 * x
            x = half + tl.abs(half) - near * _tail(near)
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(t)) is sigmoid(2 * t), which needs no libdevice and keeps its digits where tanh is near -1.
        x = x / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@jit
def slope(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """The derivative of `activated` at ``x`` in float32. Gelu's by erf throughout: it is 0 near -0.75, and there even
    float16 sees what it does not see in gelu itself."""
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
