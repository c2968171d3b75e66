# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""``argmax`` and the running maximum over rows with torch's rules: NaN is the largest, of equals the first.

``x`` is ``(rows, cols)`` with at least one column; argmax gives int64 ``(rows,)``, the running maximum ``x``'s shape
and dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

NEVER = tl.constexpr(2147483647)


def argmax_reference(x: Tensor) -> Tensor:
    return torch.argmax(x.float(), -1)


def cummax_reference(x: Tensor) -> Tensor:
    return torch.cummax(x.float(), -1).values.to(x.dtype)


@triton.jit
def argmax_kernel(x, out, cols, row_pitch, col_pitch, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([], -float("inf"), tl.float32)
    best = tl.zeros([], tl.int32)
    first_nan = tl.full([], NEVER, tl.int32)
    for start in range(0, cols, BLOCK):
        lane = tl.arange(0, BLOCK)
        c = start + lane
        inside = c < cols
        value = tl.load(x + row * row_pitch + c * col_pitch, mask=inside, other=-float("inf")).to(tl.float32)
        number = c
        if BUG == "tile-local-index":
            number = lane
        bad = value != value
        if BUG == "nan-of-one-sign":
            bad = value.to(tl.int32, bitcast=True) > 0x7F800000
        if BUG != "ignores-nan":
            first_nan = tl.minimum(first_nan, tl.min(tl.where(bad, number, NEVER), axis=0))
        value = tl.where(value != value, -float("inf"), value)
        highest = tl.max(value, axis=0)
        if BUG == "last-of-equals":
            candidate = tl.max(tl.where((value == highest) & inside, number, 0), axis=0)
            better = highest >= top
        else:
            candidate = tl.min(tl.where((value == highest) & inside, number, NEVER), axis=0)
            better = highest > top
        best = tl.where(better, candidate, best)
        top = tl.maximum(top, highest)
    tl.store(out + row, tl.where(first_nan != NEVER, first_nan, best).to(tl.int64))


@triton.jit
def cummax_kernel(x, out, cols, row_pitch, col_pitch, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    value = tl.load(x + row * row_pitch + c * col_pitch, mask=c < cols, other=0.0).to(tl.float32)
    earlier = c[None, :] <= c[:, None]
    clean = tl.where(value != value, -float("inf"), value)
    highest = tl.max(tl.where(earlier, clean[None, :], -float("inf")), axis=1)
    if BUG != "ignores-nan":
        seen = tl.max(tl.where(earlier, (value != value).to(tl.int32)[None, :], 0), axis=1)
        highest = tl.where(seen > 0, float("nan"), highest)
    tl.store(out + row * cols + c, highest.to(out.dtype.element_ty), mask=c < cols)


def argmax(x: Tensor, *, bug: str = "") -> Tensor:
    rows, cols = x.shape
    out = torch.empty(rows, dtype=torch.int64, device=x.device)
    if rows:
        argmax_kernel[(rows,)](x, out, cols, *x.stride(), BLOCK=64, BUG=bug)
    return out


def cummax(x: Tensor, *, bug: str = "") -> Tensor:
    rows, cols = x.shape
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if rows:
        cummax_kernel[(rows,)](x, out, cols, *x.stride(), BLOCK=triton.next_power_of_2(cols), BUG=bug)
    return out


def make_argmax_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return argmax(x, bug=bug)

    return FusionSpec(
        name=f"argmax {bug}".strip(),
        fused=fused,
        reference=argmax_reference,
        inputs={"x": tensor("rows cols")},
        dims={"rows": dim(0, 12), "cols": dim(1, 300)},
    )


def make_cummax_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return cummax(x, bug=bug)

    return FusionSpec(
        name=f"cummax {bug}".strip(),
        fused=fused,
        reference=cummax_reference,
        inputs={"x": tensor("rows cols")},
        dims={"rows": dim(0, 12), "cols": dim(1, 128)},
    )
