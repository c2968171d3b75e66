# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rows times two, by blocks, without a mask where a row is whole blocks: ``x`` is ``(rows, cols)``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

BLOCK = 256


def reference(x: Tensor) -> Tensor:
    return x * 2


@triton.jit
def doubled_kernel(x, out, cols, row_pitch, col_pitch, EVEN: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        if EVEN:
            read = tl.arange(0, BLOCK) if BUG == "first-block-again" else c
            tl.store(out + row * cols + c, tl.load(x + row * row_pitch + read * col_pitch) * 2)
        else:
            value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < cols, other=0.0)
            tl.store(out + row * cols + c, value * 2, mask=c < cols)


def doubled(x: Tensor, *, bug: str = "") -> Tensor:
    rows, cols = x.shape
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if out.numel():
        doubled_kernel[(rows,)](x, out, cols, *x.stride(), EVEN=cols % BLOCK == 0, BLOCK=BLOCK, BUG=bug)
    return out


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return doubled(x, bug=bug)

    # Below 768 no row is long: nothing but a size made of the kernel's own block is two of them.
    return FusionSpec(
        name=f"whole_blocks {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows cols")},
        dims={"rows": dim(0, 12), "cols": dim(max=700)},
    )
