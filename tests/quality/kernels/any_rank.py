# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rows scaled so that their magnitudes add up to 1, of any number of leading dims: by tiles of rows, or in turns.

``x`` is ``(*batch, width)`` of any floating dtype, and so is the result; rows of zeros stay zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, tensor

ROWS = 8
PROGRAMS = 6
TURNS = 3


def reference(x: Tensor) -> Tensor:
    wide = x.float()
    total = wide.abs().sum(-1, keepdim=True)
    return (wide / torch.where(total == 0, 1.0, total)).to(x.dtype)


@triton.jit
def tile_kernel(x, out, rows, width, row_pitch, BLOCK: tl.constexpr, ROWS: tl.constexpr, BUG: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    source = row
    if BUG == "first-tile-again":
        source = row % ROWS
    value = tl.load(x + source * row_pitch + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(tl.abs(value), axis=1, keep_dims=True)
    result = value / tl.where(total == 0, 1.0, total)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def turns_kernel(x, out, rows, width, row_pitch, programs, turns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    for turn in range(turns):
        row = (tl.program_id(0) + turn * programs).to(tl.int64)
        inside = (column < width) & (row < rows)
        value = tl.load(x + row * row_pitch + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(tl.abs(value), axis=0)
        result = value / tl.where(total == 0, 1.0, total)
        tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


def scaled(x: Tensor, *, turns: bool = False, bug: str = "") -> Tensor:
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    flat = x.reshape(-1, width)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    rows = flat.shape[0]
    block = triton.next_power_of_2(width)
    if turns:
        each = TURNS if bug == "so-many-turns" else triton.cdiv(rows, PROGRAMS)
        turns_kernel[(PROGRAMS,)](flat, out, rows, width, flat.stride(0), PROGRAMS, each, BLOCK=block)
        return out
    tiles = triton.cdiv(rows, ROWS)
    if bug == "whole-tiles":
        tiles = max(1, rows // ROWS)
    if bug == "first-dim":
        tiles = triton.cdiv(x.shape[0] if x.ndim > 1 else 1, ROWS)
    tile_kernel[(tiles,)](flat, out, rows, width, flat.stride(0), BLOCK=block, ROWS=ROWS, BUG=bug)
    return out


def make_spec(bug: str = "", turns: bool = False) -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return scaled(x, turns=turns, bug=bug)

    return FusionSpec(
        name=f"any_rank {bug}".strip(), fused=fused, reference=reference, inputs={"x": tensor("*batch width")}
    )
