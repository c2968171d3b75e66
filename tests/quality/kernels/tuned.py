# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Autotuned kernels: leaky ReLU in place, the step of Lion, sums of rows, and what their tuning may spoil.

``x`` is ``(rows, cols)``. A benchmark runs a kernel many times on the caller's own tensors; which config it takes
differs from machine to machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

SLOPE, RATE, BETA = 0.25, 0.125, 0.5
WRITABLE = ("contiguous", "step", "offset")


def leaky_reference(x: Tensor) -> None:
    x.copy_(torch.where(x > 0, x.float(), x.float() * SLOPE).to(x.dtype))


def lion_reference(parameter: Tensor, gradient: Tensor, momentum: Tensor) -> None:
    update = torch.sign(BETA * momentum + (1 - BETA) * gradient.float())
    parameter.copy_((parameter.float() - RATE * update).to(parameter.dtype))
    momentum.copy_(BETA * momentum + (1 - BETA) * gradient.float())


def row_sum_reference(x: Tensor) -> Tensor:
    return x.float().sum(-1).to(x.dtype)


@triton.jit
def leaky_kernel(x, n, pitch, SLOPE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i * pitch, mask=i < n, other=0.0).to(tl.float32)
    tl.store(x + i * pitch, tl.where(value > 0, value, value * SLOPE).to(x.dtype.element_ty), mask=i < n)


@triton.jit
def lion_kernel(
    parameter, gradient, momentum, n, parameter_pitch, gradient_pitch, momentum_pitch,
    RATE: tl.constexpr, BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(parameter + i * parameter_pitch, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + i * gradient_pitch, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(momentum + i * momentum_pitch, mask=inside, other=0.0)
    mixed = BETA * m + (1 - BETA) * g
    update = tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, 0.0))
    tl.store(parameter + i * parameter_pitch, (value - RATE * update).to(parameter.dtype.element_ty), mask=inside)
    tl.store(momentum + i * momentum_pitch, mixed, mask=inside)


@triton.jit
def sum_kernel(
    x, out, rows, cols, row_pitch, col_pitch,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    end = cols
    if WHOLE:
        end = cols // BLOCK * BLOCK
    if WIDTH:
        # One tile is the row: right for the width that was tuned.
        end = tl.minimum(cols, BLOCK)
    for start in range(0, end, BLOCK):
        c = start + tl.arange(0, BLOCK)
        at = c
        if STEP:
            # The pointer moves on by the block of another config.
            at = start // BLOCK * STEP + tl.arange(0, BLOCK)
        total += tl.load(x + row * row_pitch + at * col_pitch, mask=c < cols, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, axis=0).to(out.dtype.element_ty))


@triton.jit
def add_kernel(x, total, cols, row_pitch, col_pitch, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < cols, other=0.0).to(tl.float32)
    tl.atomic_add(total + row, tl.sum(value, axis=0))


def _blocks(*sizes: int, **more: Any) -> list[Any]:
    return [triton.Config({"BLOCK": size, **more}) for size in sizes]


def _fitting(configs: Sequence[Any], named: Mapping[str, Any], **_: Any) -> list[Any]:
    """Tiles at least as wide as the row; the widest where none is."""
    wide = [config for config in configs if config.kwargs["BLOCK"] >= named["cols"]]
    return wide or list(configs)[-1:]


def _sums(configs: list[Any], **more: Any) -> Any:
    return triton.autotune(configs, **more)(sum_kernel)


_PLAIN = {"WHOLE": False, "WIDTH": False, "STEP": 0}
_WIDE = {**_PLAIN, "WIDTH": True}
SUMS: Mapping[str, Any] = {
    "": _sums(_blocks(16, 32, 64, **_PLAIN), key=[]),
    "one-config-drops-tail": _sums(
        [*_blocks(16, **_PLAIN), *_blocks(32, **{**_PLAIN, "WHOLE": True}), *_blocks(64, **_PLAIN)], key=[]
    ),
    "one-config-moves-by-64": _sums([*_blocks(16, 64, **_PLAIN), *_blocks(128, **{**_PLAIN, "STEP": 64})], key=[]),
    # pytorch #164124: what a config is right for is missing from the key, so that a choice meets other widths.
    "width-not-in-key": _sums(
        _blocks(8, 64, 512, **_WIDE), key=["rows"], prune_configs_by={"early_config_prune": _fitting}
    ),
    "width-in-key": _sums(
        _blocks(8, 64, 512, **_WIDE), key=["cols"], prune_configs_by={"early_config_prune": _fitting}
    ),
}
LEAKY: Mapping[str, Any] = {
    "": triton.autotune(_blocks(32, 64), key=[], restore_value=["x"])(leaky_kernel),
    "no-restore": triton.autotune(_blocks(32, 64), key=[])(leaky_kernel),
}
LION: Mapping[str, Any] = {
    "": triton.autotune(_blocks(32, 64), key=[], restore_value=["parameter", "momentum"])(lion_kernel),
    "restores-one-of-two": triton.autotune(_blocks(32, 64), key=[], restore_value=["parameter"])(lion_kernel),
}
ADDERS: Mapping[str, Any] = {
    "": triton.autotune(_blocks(32, 64), key=[], reset_to_zero=["total"])(add_kernel),
    "no-reset": triton.autotune(_blocks(32, 64), key=[])(add_kernel),
}


def leaky(x: Tensor, *, bug: str = "") -> None:
    if x.numel():
        LEAKY[bug][lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, x.numel(), x.stride(0), SLOPE=SLOPE)


def lion(parameter: Tensor, gradient: Tensor, momentum: Tensor, *, bug: str = "") -> None:
    n = parameter.numel()
    if n:
        LION[bug][lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](
            parameter, gradient, momentum, n, parameter.stride(0), gradient.stride(0), momentum.stride(0),
            RATE=RATE, BETA=BETA,
        )  # fmt: skip


def row_sum(x: Tensor, *, bug: str = "") -> Tensor:
    rows, cols = x.shape
    out = torch.zeros(rows, dtype=x.dtype, device=x.device)
    if x.numel():
        SUMS[bug][(rows,)](x, out, rows, cols, *x.stride())
    return out


def row_sum_atomic(x: Tensor, *, bug: str = "") -> Tensor:
    rows, cols = x.shape
    total = torch.zeros(rows, dtype=torch.float32, device=x.device)
    if x.numel():
        ADDERS[bug][lambda meta: (rows, triton.cdiv(cols, meta["BLOCK"]))](x, total, cols, *x.stride())
    return total.to(x.dtype)


def make_leaky_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor) -> None:
        leaky(x, bug=bug)

    return FusionSpec(
        name=f"leaky {bug}".strip(),
        fused=fused,
        reference=leaky_reference,
        inputs={"x": tensor("n", layouts=WRITABLE)},
        dims={"n": dim(0, 300)},
        mutates="x",
    )


def make_lion_spec(bug: str = "") -> FusionSpec:
    def fused(parameter: Tensor, gradient: Tensor, momentum: Tensor) -> None:
        lion(parameter, gradient, momentum, bug=bug)

    return FusionSpec(
        name=f"lion {bug}".strip(),
        fused=fused,
        reference=lion_reference,
        inputs={
            "parameter": tensor("n", layouts=WRITABLE),
            "gradient": tensor("n"),
            "momentum": tensor("n", dtype=torch.float32, layouts=WRITABLE, values=values.normal(0.0, 1.0)),
        },
        dims={"n": dim(0, 300)},
        mutates=["parameter", "momentum"],
    )


def _sum_spec(name: str, fused: Callable[[Tensor], Tensor], *, deterministic: bool = True) -> FusionSpec:
    return FusionSpec(
        name=name.strip(),
        fused=fused,
        reference=row_sum_reference,
        inputs={"x": tensor("rows cols")},
        dims={"rows": dim(0, 12), "cols": dim(0, 300)},
        deterministic=deterministic,
    )


def make_sum_spec(bug: str = "") -> FusionSpec:
    return _sum_spec(f"row_sum {bug}", partial(row_sum, bug=bug))


def make_adder_spec(bug: str = "") -> FusionSpec:
    return _sum_spec(f"row_sum_atomic {bug}", partial(row_sum_atomic, bug=bug), deterministic=False)
