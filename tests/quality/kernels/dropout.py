"""Dropout with a residual, its mask drawn anew in backward, with a switch for each planted bug; and a plain one."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from torch import Tensor

from pytest_fusion import FusionSpec, dim, rng, tensor

SEEDS = st.integers(0, 2**31 - 1)
BLOCK = 64


def reference(x: Tensor, residual: Tensor, seed: int, p: float, mask: Tensor) -> Tensor:
    scale = 1 / (1 - p) if p < 1 else 0.0
    return (torch.where(mask, x.float() * scale, 0.0) + residual.float()).to(x.dtype)


@triton.jit
def _kept(row, c, cols, row_pitch, seed, p, BUG: tl.constexpr):
    offset = row * cols + c
    if BUG == "mask-by-address":
        offset = row * row_pitch + c
    if BUG == "row-repeats":
        offset = c + row * 0
    if BUG == "block-repeats":
        offset = row * cols + c % 16
    if BUG == "counter-by-four":
        offset = (row * cols + c) // 4
    if BUG == "seed-ignored":
        drawn = tl.rand(42, offset)
    elif BUG == "seed-plus-offset":
        drawn = tl.rand(0, seed + offset)
    else:
        drawn = tl.rand(seed, offset)
    if BUG == "keeps-p":
        kept = drawn < p
    else:
        kept = drawn >= p
    return kept


@triton.jit
def forward_kernel(
    x, residual, out, cols, x_row, x_col, r_row, r_col, seed, p, scale, HAS_RESIDUAL: tl.constexpr,
    BUG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < cols
        value = tl.load(x + row * x_row + c * x_col, mask=inside, other=0.0).to(tl.float32)
        kept = _kept(row, c, cols, x_row, seed, p, BUG)
        if BUG == "divides-by-zero":
            result = tl.where(kept, value, 0.0) * scale
        else:
            result = tl.where(kept, value * scale, 0.0)
        if HAS_RESIDUAL:
            result += tl.load(residual + row * r_row + c * r_col, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * cols + c, result.to(out.dtype.element_ty), mask=inside)


class Dropout(torch.autograd.Function):
    """``dropout(x) + residual``; backward draws the same numbers again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, seed: Any, p: float, bug: str) -> Tensor:
        ctx.seed, ctx.p, ctx.bug, ctx.has_residual = seed, p, bug, residual is not None
        return _launch(x, residual, seed, p, bug)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        seed = ctx.seed + 1 if ctx.bug == "other-seed-in-backward" else ctx.seed
        dx = _launch(gradient, None, seed, ctx.p, ctx.bug, skip=int(ctx.bug == "other-offset-in-backward"))
        return dx, gradient if ctx.has_residual else None, None, None, None


def _launch(x: Tensor, residual: Tensor | None, seed: Any, p: float, bug: str, skip: int = 0) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, cols = x.shape
    if not out.numel():
        return out
    scale = 1 / (1 - p) if p < 1 else float("inf") if bug == "divides-by-zero" else 0.0
    if bug == "no-scale":
        scale = 1.0
    pitches = residual.stride() if residual is not None else (0, 0)
    number = int(seed) if not skip else int(seed) ^ 0x5555
    forward_kernel[(rows,)](
        x, residual, out, cols, *x.stride(), *pitches, number, p, scale, HAS_RESIDUAL=residual is not None,
        BUG=bug, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def make_spec(bug: str = "", *, grad: bool = True) -> FusionSpec:
    def fused(x: Tensor, residual: Tensor, seed: int, p: float) -> Tensor:
        return Dropout.apply(x, residual, seed, p, bug)

    return FusionSpec(
        name=f"dropout_residual {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "x": tensor("rows cols"),
            "residual": tensor("rows cols"),
            "seed": SEEDS,
            "p": st.sampled_from([0.1, 0.5, 0.0, 1.0]),
        },
        dims={"rows": dim(0, 12)},
        rng="seed",
        grad=grad,
    )


def _generator_reference(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x.float() / 0.75, 0.0).to(x.dtype)


def make_generator_spec(bug: str = "") -> FusionSpec:
    """A kernel that takes its seed from torch's generator."""

    def fused(x: Tensor) -> Tensor:
        if bug == "constant-seed":
            seed = 1234
        elif bug == "peeks":
            # The state is read and not advanced: the next call draws the same.
            with torch.random.fork_rng(devices=[]):
                seed = int(torch.randint(2**31 - 1, ()))
        else:
            seed = int(torch.randint(2**31 - 1, ()))
        return _launch(x, None, seed, 0.25, "")

    return FusionSpec(
        name=f"dropout_generator {bug}".strip(),
        fused=fused,
        reference=_generator_reference,
        inputs={"x": tensor("rows cols")},
        dims={"rows": dim(0, 12)},
        rng=rng(p=0.25),
    )


@triton.jit
def path_kernel(x, out, cols, x_row, x_col, seed, p, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    kept = tl.rand(seed, row.to(tl.int32)) >= p
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_row + c * x_col, mask=c < cols, other=0.0).to(tl.float32)
        tl.store(out + row * cols + c, tl.where(kept, value * scale, 0.0).to(out.dtype.element_ty), mask=c < cols)


def _path_reference(x: Tensor, seed: int, p: float, keep: Tensor) -> Tensor:
    return torch.where(keep, x.float() / (1 - p), 0.0).to(x.dtype)


def make_path_spec() -> FusionSpec:
    """Whole rows are dropped, by one draw each (stochastic depth)."""

    def fused(x: Tensor, seed: int, p: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out.numel():
            path_kernel[(x.shape[0],)](x, out, x.shape[1], *x.stride(), seed, p, 1 / (1 - p), BLOCK=BLOCK)
        return out

    return FusionSpec(
        name="drop_path",
        fused=fused,
        reference=_path_reference,
        inputs={"x": tensor("rows cols"), "seed": SEEDS, "p": st.sampled_from([0.2, 0.5])},
        rng=rng("seed", p="p", mask="keep", dims="rows 1"),
    )
