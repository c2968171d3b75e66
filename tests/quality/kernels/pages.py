# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Pages by a table: means of their rows, 0 where the table has a hole (-1); pages halved in place, each once.

``cache`` is ``(pages, page, width)``, or ``(pages, width)`` where it is halved, ``table`` an int32 ``(batch, most)``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values


def reference(cache: Tensor, table: Tensor) -> Tensor:
    means = (cache.float().sum(1) / cache.shape[1])[table.clamp(min=0).long()]
    return torch.where((table < 0)[..., None], 0.0, means).to(cache.dtype)


@triton.jit
def mean_kernel(
    cache, table, out, pages, page, width, cache_page, cache_row, cache_col, table_row, table_col, most,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    b, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.load(table + b * table_row + j * table_col)
    hole = number < 0
    if BUG == "wraps-negative":
        number = tl.where(hole, number + pages, number)
    if BUG == "pages-in-order":
        number = tl.load(table + b * table_row) + j
    if BUG == "holes-of-first-row":
        hole = tl.load(table + j * table_col) < 0
    if BUG == "wraps-negative" or BUG == "reads-holes":
        hole = number < -1
    if BUG == "holes-unwritten":
        if hole:
            return
    r, c = tl.arange(0, PAGE), tl.arange(0, WIDTH)
    both = (r < page)[:, None] & (c < width)[None, :] & (hole == 0)
    at = number.to(tl.int64) * cache_page + r[:, None] * cache_row + c[None, :] * cache_col
    block = tl.load(cache + at, mask=both, other=0.0)
    mean = tl.sum(block.to(tl.float32), axis=0) / page
    tl.store(out + (b * most + j) * width + c, mean.to(out.dtype.element_ty), mask=c < width)


def page_means(cache: Tensor, table: Tensor, *, bug: str = "") -> Tensor:
    (pages, page, width), (batch, most) = cache.shape, table.shape
    out = torch.empty((batch, most, width), dtype=cache.dtype, device=cache.device)
    if out.numel():
        mean_kernel[(batch, most)](
            cache, table, out, pages, page, width, *cache.stride(), *table.stride(), most,
            PAGE=triton.next_power_of_2(page), WIDTH=triton.next_power_of_2(width), BUG=bug,
        )  # fmt: skip
    return out


def make_spec(bug: str = "") -> FusionSpec:
    def fused(cache: Tensor, table: Tensor) -> Tensor:
        return page_means(cache, table, bug=bug)

    return FusionSpec(
        name=f"page_means {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "cache": tensor("pages page width", values=values.finite()),
            "table": tensor("batch most", dtype=torch.int32, values=values.page_table("pages", holes=True)),
        },
        dims={"pages": dim(20, 60), "page": dim(1, 9), "width": dim(1, 20), "batch": dim(0, 4), "most": dim(0, 5)},
    )


def halved_reference(cache: Tensor, table: Tensor) -> None:
    used = table.flatten().unique().long()
    cache[used] = cache[used] * 0.5


@triton.jit
def halve_kernel(
    cache, table, entries, most, width, cache_page, cache_col, table_row, table_col,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0).to(tl.int64)
    if BUG == "once-for-each-entry":
        page = tl.load(table + (page // most) * table_row + (page % most) * table_col).to(tl.int64)
    else:
        i = tl.arange(0, ENTRIES)
        entry = tl.load(table + (i // most) * table_row + (i % most) * table_col, mask=i < entries, other=-1)
        if tl.max((entry == page).to(tl.int32), axis=0) == 0:
            return
    c = tl.arange(0, WIDTH)
    at = cache + page * cache_page + c * cache_col
    tl.store(at, tl.load(at, mask=c < width, other=0.0) * 0.5, mask=c < width)


def halve(cache: Tensor, table: Tensor, *, bug: str = "") -> None:
    (pages, width), entries = cache.shape, table.numel()
    if entries and cache.numel():
        programs = entries if bug == "once-for-each-entry" else pages
        halve_kernel[(programs,)](
            cache, table, entries, table.shape[1], width, *cache.stride(), *table.stride(),
            ENTRIES=triton.next_power_of_2(entries), WIDTH=triton.next_power_of_2(width), BUG=bug,
        )  # fmt: skip


def make_halved_spec(bug: str = "") -> FusionSpec:
    def fused(cache: Tensor, table: Tensor) -> None:
        halve(cache, table, bug=bug)

    return FusionSpec(
        name=f"pages_halved {bug}".strip(),
        fused=fused,
        reference=halved_reference,
        inputs={
            "cache": tensor("pages width"),
            "table": tensor("batch most", dtype=torch.int32, values=values.indices("pages")),
        },
        dims={"pages": dim(1, 60), "batch": dim(0, 6), "most": dim(0, 6)},
        mutates=["cache"],
    )
