# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Quantisation in groups of 8 columns, and with a given scale.

Grouped: ``x`` is ``(rows, 8 * groups)``; the result is ``(codes, scales)``, codes int8 or float8_e4m3fn of ``x``'s
shape and scales float32 ``(rows, groups)``, ``scale = max(absmax, 1e-4) / limit`` with limit 127 or 448, codes
round-to-nearest-even of ``x / scale``; a NaN code is 0. Static: ``x`` ``(n,)`` and a float32 ``scale`` ``(1,)`` give
int8 codes clamped to [-127, 127].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

GROUP = 8
FLOOR = 1e-4
# Adding and taking away 1.5 * 2**23 rounds a float32 below 2**22 to the nearest integer, ties to even.
ROUNDER = tl.constexpr(12582912.0)


def grouped(x: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    parts = x.float().unflatten(-1, (-1, GROUP)) if x.shape[1] else x.float().reshape(x.shape[0], 0, GROUP)
    scales = parts.abs().amax(-1).clamp(min=FLOOR) / limit
    return torch.nan_to_num(parts / scales[..., None], nan=0.0).reshape(x.shape), scales


def int8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    scaled, scales = grouped(x, 127.0)
    return scaled.round().clamp(-127, 127).to(torch.int8), scales


def fp8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    scaled, scales = grouped(x, 448.0)
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn), scales


def static_reference(x: Tensor, scale: Tensor) -> Tensor:
    return torch.nan_to_num(x.float() / scale, nan=0.0).round().clamp(-127, 127).to(torch.int8)


@triton.jit
def grouped_kernel(
    x, codes, scales, groups, row_pitch, col_pitch,
    FP8: tl.constexpr, GROUPS: tl.constexpr, RECIPROCAL: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    limit = 448.0 if FP8 else 127.0
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GROUPS)[:, None]
    c = g * 8 + tl.arange(0, 8)[None, :]
    inside = (g < groups) & (c >= 0)
    value = tl.load(x + row * row_pitch + c * col_pitch, mask=inside, other=0.0).to(tl.float32)
    if BUG == "signed-max":
        largest = tl.max(value, axis=1)
    else:
        # A maximum on the GPU drops NaN, torch's does not.
        bad = tl.max((value != value).to(tl.int32), axis=1) > 0
        largest = tl.where(bad, float("nan"), tl.max(tl.where(value != value, 0.0, tl.abs(value)), axis=1))
    if BUG == "no-floor":
        scale = largest / limit
    elif BUG == "floors-scale":
        scale = tl.where(largest / limit < 1e-4, 1e-4, largest / limit)
    else:
        scale = tl.where(largest < 1e-4, 1e-4, largest) / limit
    if RECIPROCAL:
        scaled = value * (1.0 / scale)[:, None]
    else:
        scaled = value / scale[:, None]
    if BUG == "rounds-twice":
        scaled = scaled.to(tl.bfloat16).to(tl.float32)
    scaled = tl.where(scaled != scaled, 0.0, scaled)
    scaled = tl.where(scaled > limit, limit, tl.where(scaled < -limit, -limit, scaled))
    at = codes + row * groups * 8 + c
    if FP8:
        tl.store(at, scaled.to(tl.float8e4nv), mask=inside)
    else:
        if BUG != "truncates":
            scaled = (scaled + ROUNDER) - ROUNDER
        tl.store(at, scaled.to(tl.int8), mask=inside)
    s = tl.arange(0, GROUPS)
    slot = row * groups + s
    if BUG == "scale-slot":
        slot = row + s
    tl.store(scales + slot, scale, mask=s < groups)


@triton.jit
def static_kernel(x, scale, codes, count, pitch, BLOCK: tl.constexpr, BUG: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at * pitch, mask=at < count, other=0.0).to(tl.float32) / tl.load(scale)
    value = tl.where(value != value, 0.0, value)
    limit = 127.0
    if BUG == "no-clamp":
        limit = 1048576.0
    value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    if BUG == "ties-away":
        value = tl.where(value < 0, tl.ceil(value - 0.5), tl.floor(value + 0.5))
    else:
        value = (value + ROUNDER) - ROUNDER
    tl.store(codes + at, value.to(tl.int32).to(tl.int8), mask=at < count)


def quantize(x: Tensor, *, fp8: bool, reciprocal: bool = False, bug: str = "") -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    groups = cols // GROUP
    codes = torch.empty((rows, cols), dtype=torch.float8_e4m3fn if fp8 else torch.int8, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if codes.numel():
        grouped_kernel[(rows,)](
            x, codes, scales, groups, *x.stride(),
            FP8=fp8, GROUPS=triton.next_power_of_2(groups), RECIPROCAL=reciprocal, BUG=bug,
        )  # fmt: skip
    return codes, scales


def quantize_static(x: Tensor, scale: Tensor, *, bug: str = "") -> Tensor:
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    if x.numel():
        static_kernel[(triton.cdiv(x.numel(), 128),)](x, scale, codes, x.numel(), x.stride(0), BLOCK=128, BUG=bug)
    return codes


def make_spec(bug: str = "", *, fp8: bool = False, reciprocal: bool = False) -> FusionSpec:
    def fused(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(x, fp8=fp8, reciprocal=reciprocal, bug=bug)

    return FusionSpec(
        name=f"quant_{'fp8' if fp8 else 'int8'} {'reciprocal ' if reciprocal else ''}{bug}".strip(),
        fused=fused,
        reference=fp8_reference if fp8 else int8_reference,
        inputs={"x": tensor("rows 8*groups")},
        dims={"rows": dim(0, 12), "groups": dim(0, 20)},
    )


def make_static_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, scale: Tensor) -> Tensor:
        return quantize_static(x, scale, bug=bug)

    return FusionSpec(
        name=f"quant_static {bug}".strip(),
        fused=fused,
        reference=static_reference,
        inputs={"x": tensor("n"), "scale": tensor("1", dtype=torch.float32, values=values.uniform(0.005, 0.02))},
    )
