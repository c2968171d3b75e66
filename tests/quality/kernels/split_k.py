# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Two ways to join the parts of a sum: a workspace kept between calls, and locks that let the parts in one by one.

``a @ b`` with ``a`` ``(m, k)`` and ``b`` ``(k, n)``: parts of ``k`` are added to a float32 workspace by atomics, and
who comes last reads the sum, stores it and leaves zeros behind. The sum of rows of ``x`` ``(rows, cols)`` is added up
part after part, in their order, so that its bits are the same in each call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

PARTS, TILE = 3, 16
_kept: dict[torch.device, tuple[Tensor, Tensor]] = {}


def product_reference(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype)


def sum_reference(x: Tensor) -> Tensor:
    return x.float().sum(-1).to(x.dtype)


@triton.jit
def product_kernel(
    a, b, out, space, counts, m, n, k, a_row, a_col, b_row, b_col, PARTS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    j = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    total = tl.zeros([TILE, TILE], tl.float32)
    for start in range(tl.program_id(2) * TILE, k, PARTS * TILE):
        c = start + tl.arange(0, TILE)
        left = tl.load(a + i * a_row + c[None, :] * a_col, mask=(i < m) & (c[None, :] < k), other=0.0)
        right = tl.load(b + c[:, None] * b_row + j * b_col, mask=(c[:, None] < k) & (j < n), other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    inside = (i < m) & (j < n)
    at = i * n + j
    tl.atomic_add(space + at, total, mask=inside)
    count = counts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if tl.atomic_add(count, 1) == PARTS - 1:
        tl.store(out + at, tl.load(space + at, mask=inside, other=0.0).to(out.dtype.element_ty), mask=inside)
        tl.store(space + at, tl.zeros([TILE, TILE], tl.float32), mask=inside)
        tl.store(count, 0)


@triton.jit
def locked_kernel(x, total, turns, cols, row_pitch, col_pitch, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = tl.zeros([BLOCK], tl.float32)
    for start in range(part * BLOCK, cols, PARTS * BLOCK):
        c = start + tl.arange(0, BLOCK)
        own += tl.load(x + row * row_pitch + c * col_pitch, mask=c < cols, other=0.0).to(tl.float32)
    while tl.atomic_add(turns + row, 0) != part:
        pass
    tl.store(total + row, tl.load(total + row) + tl.sum(own, axis=0))
    tl.debug_barrier()
    tl.atomic_add(turns + row, 1)


def product(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    if not out.numel():
        return out
    grid = triton.cdiv(m, TILE), triton.cdiv(n, TILE)
    space, counts = _kept.get(a.device, (None, None))
    if space is None or counts is None or len(space) < m * n or len(counts) < grid[0] * grid[1]:
        space = torch.zeros(m * n, dtype=torch.float32, device=a.device)
        counts = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=a.device)
        _kept[a.device] = space, counts
    product_kernel[(*grid, PARTS)](
        a, b, out, space, counts, m, n, k, *a.stride(), *b.stride(), PARTS=PARTS, TILE=TILE
    )  # fmt: skip
    return out


def row_sum(x: Tensor) -> Tensor:
    rows, cols = x.shape
    total = torch.zeros(rows, dtype=torch.float32, device=x.device)
    turns = torch.zeros(rows, dtype=torch.int32, device=x.device)
    if x.numel():
        locked_kernel[(rows, PARTS)](x, total, turns, cols, *x.stride(), PARTS=PARTS, BLOCK=32)
    return total.to(x.dtype)


def make_product_spec() -> FusionSpec:
    return FusionSpec(
        name="split product",
        fused=product,
        reference=product_reference,
        inputs={"a": tensor("m k"), "b": tensor("k n")},
        dims={"m": dim(0, 40), "n": dim(0, 40), "k": dim(0, 130)},
        deterministic=False,
    )


def make_locked_spec() -> FusionSpec:
    return FusionSpec(
        name="locked row_sum",
        fused=row_sum,
        reference=sum_reference,
        inputs={"x": tensor("rows cols")},
        dims={"rows": dim(0, 16), "cols": dim(0, 200)},
    )
