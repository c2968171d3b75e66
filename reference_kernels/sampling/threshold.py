"""Cuts by rank without a sort: the key down to which there is a number of candidates, and which of its ties stay."""

from __future__ import annotations

import triton.language as tl

from reference_kernels._common import jit
from reference_kernels._order import LOWEST, of_order_key, order_key

# Every other pivot divides the interval of values evenly, which suits logits; the others divide that of the keys: a
# step leaves at most 2 / 9 of those, so that 15 suffice for any row.
PIVOTS = tl.constexpr(8)


@jit
def search(
    keys: tl.tensor, found: tl.tensor, low: tl.tensor, high: tl.tensor, wanted: tl.tensor, SEARCH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Close in on the largest key down to which there are ``wanted`` candidates.

    In and out: so many lie from ``low`` up and fewer above ``high``. Out: all candidates in ``[low, high]`` have one
    key.
    """
    part = tl.arange(0, PIVOTS)[:, None].to(tl.int64) + 1
    lane = tl.arange(0, SEARCH)[None, :]
    many = found
    few = found * 0
    while (low < high) & (many - few > 1):
        by_key = low + (part * (high.to(tl.int64) - low) + PIVOTS) // (PIVOTS + 1)
        least = of_order_key(low)
        value = least + (of_order_key(high) - least) * (part.to(tl.float32) / (PIVOTS + 1))
        by_value = tl.minimum(tl.maximum(order_key(value), low + 1), high)
        pivot = tl.where(part % 2 == 0, by_key.to(tl.int32), by_value)
        count = tl.zeros([PIVOTS, 1], tl.int32)
        for start in range(0, found, SEARCH):
            inside = start + lane < found
            key = tl.load(keys + start + lane, mask=inside, other=LOWEST)
            count += tl.sum((inside & (key >= pivot)).to(tl.int32), axis=1, keep_dims=True)
        enough = count >= wanted
        low = tl.max(tl.where(enough, pivot, low))
        high = tl.min(tl.where(enough, high, pivot - 1))
        many = tl.min(tl.where(enough, count, many))
        few = tl.max(tl.where(enough, few, count))
    return low, high


@jit
def edge_of(
    keys: tl.tensor, found: tl.tensor, low: tl.tensor, high: tl.tensor, SEARCH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The one key in ``[low, high]``, how many candidates have it, and how many are above it."""
    lane = tl.arange(0, SEARCH)
    edge = tl.full([SEARCH], LOWEST, tl.int32)
    tied = tl.zeros([SEARCH], tl.int32)
    above = tl.zeros([SEARCH], tl.int32)
    for start in range(0, found, SEARCH):
        inside = start + lane < found
        key = tl.load(keys + start + lane, mask=inside, other=LOWEST)
        edge = tl.maximum(edge, tl.where(key > high, LOWEST, key))
        tied += (inside & (key >= low) & (key <= high)).to(tl.int32)
        above += (inside & (key > high)).to(tl.int32)
    return tl.max(edge, axis=0), tl.sum(tied, axis=0), tl.sum(above, axis=0)


@jit
def end_of_ties(
    keys: tl.tensor,
    tokens: tl.tensor,
    found: tl.tensor,
    edge: tl.tensor,
    wanted: tl.tensor,
    width: tl.tensor,
    SEARCH: tl.constexpr,
) -> tl.tensor:
    """The token below which ``wanted`` candidates of key ``edge`` come; there are more of them."""
    lane = tl.arange(0, SEARCH)
    low = found * 0
    high = found * 0 + width
    while high - low > 1:
        middle = low + (high - low) // 2
        count = tl.zeros([SEARCH], tl.int32)
        for start in range(0, found, SEARCH):
            inside = start + lane < found
            key = tl.load(keys + start + lane, mask=inside, other=LOWEST)
            token = tl.load(tokens + start + lane, mask=inside, other=0)
            count += (inside & (key == edge) & (token < middle)).to(tl.int32)
        enough = tl.sum(count, axis=0) >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high
