# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""One step of Adam with L2 regularisation, in place: float32 inside, one rounding of the parameter at the end.

``parameter`` and ``gradient`` are ``(n,)`` of one floating dtype, the moments float32 ``(n,)``; ``step`` counts from 1.
``weight_decay`` is added to the gradient (Adam); AdamW would shrink the parameter instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

RATE, BETA1, BETA2, EPS = 0.1, 0.9, 0.99, 1e-3


def reference(
    parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, weight_decay: float
) -> None:
    value = parameter.float()
    g = gradient.float() + weight_decay * value
    first.copy_(BETA1 * first + (1 - BETA1) * g)
    second.copy_(BETA2 * second + (1 - BETA2) * g * g)
    size = torch.sqrt(second / (1 - BETA2**step)) + EPS
    parameter.copy_((value - RATE * (first / (1 - BETA1**step)) / size).to(parameter.dtype))


@triton.jit
def adam_kernel(
    parameter, gradient, first, second, n, parameter_pitch, gradient_pitch, first_pitch, second_pitch,
    weight_decay, correction1, correction2,
    RATE: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
    BUG: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    if BUG == "moment-pitch":
        second_pitch = first_pitch
    value = tl.load(parameter + i * parameter_pitch, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + i * gradient_pitch, mask=inside, other=0.0).to(tl.float32)
    if BUG != "decoupled":
        g += weight_decay * value
    m = tl.load(first + i * first_pitch, mask=inside, other=0.0)
    v = tl.load(second + i * second_pitch, mask=inside, other=0.0)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    if BUG == "moment-rounded":
        v = v.to(parameter.dtype.element_ty).to(tl.float32)
    tl.store(first + i * first_pitch, m, mask=inside)
    if BUG != "second-not-kept":
        tl.store(second + i * second_pitch, v, mask=inside)
    if BUG == "eps-inside":
        size = tl.sqrt(v / correction2 + EPS)
    else:
        size = tl.sqrt(v / correction2) + EPS
    value -= RATE * (m / correction1) / size
    if BUG == "decoupled":
        value -= RATE * weight_decay * value
    tl.store(parameter + i * parameter_pitch, value.to(parameter.dtype.element_ty), mask=inside)


def adam(
    parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, weight_decay: float, *, bug: str = ""
) -> None:
    n = parameter.numel()
    if bug == "counts-from-zero":
        step += 1
    if n:
        adam_kernel[(triton.cdiv(n, 128),)](
            parameter, gradient, first, second, n,
            *(t.stride(0) for t in (parameter, gradient, first, second)),
            weight_decay, 1 - BETA1**step, 1 - BETA2**step,
            RATE=RATE, BETA1=BETA1, BETA2=BETA2, EPS=EPS, BLOCK=128, BUG=bug,
        )  # fmt: skip


def make_spec(bug: str = "") -> FusionSpec:
    def fused(
        parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, weight_decay: float
    ) -> None:
        adam(parameter, gradient, first, second, step, weight_decay, bug=bug)

    layouts = ("contiguous", "step", "offset")
    return FusionSpec(
        name=f"adam {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "parameter": tensor("n", layouts=layouts),
            "gradient": tensor("n"),
            "first": tensor("n", dtype=torch.float32, layouts=layouts, values=values.normal(0.0, 1.0)),
            "second": tensor("n", dtype=torch.float32, layouts=layouts, values=values.positive(1e-6, 4.0)),
            "step": st.sampled_from([1, 2, 100]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
        },
        dims={"n": dim(0, 600)},
        mutates=["parameter", "first", "second"],
    )
