# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Two codes of 4 bits from each byte, times a scale: ``packed`` is uint8 ``(n,)``, the result float32 ``(n, 2)``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, tensor, values

BLOCK = 64


def reference(packed: Tensor, scale: Tensor) -> Tensor:
    codes = torch.stack([packed & 15, packed >> 4], -1).int() - 8
    return codes * scale


@triton.jit
def unpack_kernel(packed, scale, out, n, pitch, BLOCK: tl.constexpr, BUG: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(packed + at * pitch, mask=at < n, other=0)
    if BUG == "keeps-the-sign":
        byte = byte.to(tl.int8, bitcast=True)
    word = byte.to(tl.int32)
    by = tl.load(scale)
    tl.store(out + 2 * at, ((word & 15) - 8) * by, mask=at < n)
    tl.store(out + 2 * at + 1, ((word >> 4) - 8) * by, mask=at < n)


def unpack(packed: Tensor, scale: Tensor, *, bug: str = "") -> Tensor:
    n = packed.numel()
    out = torch.empty((n, 2), dtype=torch.float32, device=packed.device)
    if n:
        unpack_kernel[(triton.cdiv(n, BLOCK),)](packed, scale, out, n, packed.stride(0), BLOCK=BLOCK, BUG=bug)
    return out


def make_spec(bug: str = "") -> FusionSpec:
    def fused(packed: Tensor, scale: Tensor) -> Tensor:
        return unpack(packed, scale, bug=bug)

    return FusionSpec(
        name=f"nibbles {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "packed": tensor("n", dtype=torch.uint8),
            "scale": tensor("1", dtype=torch.float32, values=values.positive(0.01, 2.0)),
        },
    )
