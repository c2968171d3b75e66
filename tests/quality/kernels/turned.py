"""Pairs turned by a phase, without complex numbers where the reference has them; and parts of a row as its views.

``x`` is ``(seq, 2 * half)`` of neighbouring pairs, ``phase`` float32 ``(seq, half)``; float32 inside, one rounding at
the end. The gradient of ``x`` is the upstream one turned back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values


def reference(x: Tensor, phase: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*phase.shape, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(phase), phase)).flatten(-2).to(x.dtype)


def _turn(x: Tensor, phase: Tensor) -> Tensor:
    a, b, c, s = x[:, 0::2].float(), x[:, 1::2].float(), phase.cos(), phase.sin()
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2).to(x.dtype)


class Turn(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, phase: Tensor) -> Tensor:
        return _turn(x, phase)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (phase,) = ctx.saved_tensors
        return _turn(upstream[0], -phase), None


def turned(x: Tensor, phase: Tensor) -> Tensor:
    result: Tensor = Turn.apply(x, phase)  # type: ignore[no-untyped-call]
    return result


def make_spec() -> FusionSpec:
    return FusionSpec(
        name="turned pairs",
        fused=turned,
        reference=reference,
        inputs={
            "x": tensor("seq 2*half", values=values.finite()),
            "phase": tensor("seq half", dtype=torch.float32, values=values.uniform(-3, 3)),
        },
        dims={"half": dim(1)},
        grad="x",
    )


def parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width = qkv.shape[1] // 3
    return qkv[:, :width], qkv[:, width : 2 * width], qkv[:, 2 * width :]


def make_views_spec() -> FusionSpec:
    return FusionSpec(
        name="parts of a row",
        fused=parts,
        reference=lambda qkv: qkv.chunk(3, -1),
        inputs={"qkv": tensor("rows 3*width")},
        dims={"width": dim(1)},
        grad=True,
    )
