# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rows over the sum of their magnitudes: one autotuned kernel writes what another adds up.

``x`` is ``(rows, cols)``; the first kernel writes a sum for each block of a row. A config is wrong for one dtype, with
one config of the other kernel, or out of bounds in the tile that follows from its warps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

COLS, PARTS = 300, 8
DTYPE, PAIR, WARPS = "one-config-reads-float16", "third-config-of-other", "tile-of-eight-warps"


def reference(x: Tensor) -> Tensor:
    return (x.float() / (x.float().abs().sum(-1, keepdim=True) + 1)).to(x.dtype)


@triton.jit
def sums_kernel(x, parts, cols, row_pitch, col_pitch, most, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < cols, other=0.0).to(tl.float32)
    tl.store(parts + row * most + block, tl.sum(tl.abs(value), axis=0))


@triton.jit
def divide_kernel(
    x, parts, out, cols, row_pitch, col_pitch, most,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)
    total = tl.sum(tl.load(parts + row * most + part, mask=part < most, other=0.0), axis=0) + 1
    value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < cols, other=0.0)
    if HALF and value.dtype == tl.bfloat16:
        value = value.to(tl.float16, bitcast=True)
    keep = c < cols
    if WHOLE:
        keep = c < (cols + 127) // 128 * 128
    tl.store(out + row * cols + c, (value.to(tl.float32) / total).to(out.dtype.element_ty), mask=keep)


def _summing(*blocks: int) -> Any:
    return triton.autotune(
        [triton.Config({"BLOCK": block}) for block in blocks], key=["cols"], reset_to_zero=["parts"]
    )(sums_kernel)


def _dividing(*, half: int = 0, whole: int = 0) -> Any:
    """By configs of 32 columns a warp; the one of ``half`` or ``whole`` warps is wrong."""
    configs = [
        triton.Config({"BLOCK": 32 * warps, "HALF": warps == half, "WHOLE": warps == whole}, num_warps=warps)
        for warps in (1, 2, 4, 8)
    ]
    return triton.autotune(configs, key=["cols"])(divide_kernel)


# Blocks of 16 leave more parts of a long row than the other kernel adds up.
SUMMING = {PAIR: _summing(64, 128, 16, 256)}
RIGHT = _summing(64, 128, 256), _dividing()
DIVIDING = {DTYPE: _dividing(half=4), WARPS: _dividing(whole=8)}


def shares(x: Tensor, *, bug: str = "") -> Tensor:
    rows, cols = x.shape
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if x.numel():
        parts = torch.zeros((rows, triton.cdiv(COLS, 16)), dtype=torch.float32, device=x.device)
        most = parts.shape[1]
        SUMMING.get(bug, RIGHT[0])[lambda meta: (rows, triton.cdiv(cols, meta["BLOCK"]))](
            x, parts, cols, *x.stride(), most
        )
        DIVIDING.get(bug, RIGHT[1])[lambda meta: (rows, triton.cdiv(cols, meta["BLOCK"]))](
            x, parts, out, cols, *x.stride(), most, PARTS=PARTS
        )
    return out


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return shares(x, bug=bug)

    return FusionSpec(
        name=f"row_shares {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows cols", values=values.finite())},
        dims={"rows": dim(0, 12), "cols": dim(0, COLS)},
    )
