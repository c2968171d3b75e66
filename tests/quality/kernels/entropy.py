# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Entropy of rows of probabilities, by blocks: ``p`` is ``(rows, classes)``, the result float32 ``(rows,)``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

BLOCK = 64


def reference(p: Tensor) -> Tensor:
    return torch.special.entr(p.float()).sum(-1)


@triton.jit
def entropy_kernel(p, out, classes, row_pitch, col_pitch, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, classes, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(p + row * row_pitch + c * col_pitch, mask=c < classes, other=1.0).to(tl.float32)
        if BUG == "zero-times-infinity":
            total -= value * tl.log(value)
        else:
            total -= value * tl.log(tl.where(value == 0, 1.0, value))
    tl.store(out + row, tl.sum(total, axis=0))


def entropy(p: Tensor, *, bug: str = "") -> Tensor:
    rows, classes = p.shape
    out = torch.empty(rows, dtype=torch.float32, device=p.device)
    if rows:
        entropy_kernel[(rows,)](p, out, classes, *p.stride(), BLOCK=BLOCK, BUG=bug)
    return out


def make_spec(bug: str = "") -> FusionSpec:
    def fused(p: Tensor) -> Tensor:
        return entropy(p, bug=bug)

    return FusionSpec(
        name=f"entropy {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"p": tensor("rows classes", dtype=torch.float32, values=values.probabilities())},
        dims={"rows": dim(0, 12), "classes": dim(1, 300)},
    )
