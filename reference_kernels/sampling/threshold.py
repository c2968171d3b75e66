"""Cuts by threshold: the key down to which candidates add up to a number or a weight, found without sorting them."""

from __future__ import annotations

import triton.language as tl

from reference_kernels._common import jit
from reference_kernels._order import LOWEST, of_order_key, order_key

# Every other pivot divides the interval of values evenly, which suits logits; the others divide that of the keys: a
# step leaves at most 2 / 9 of those, so that 15 suffice for any row.
PIVOTS = tl.constexpr(8)


@jit
def weight(x: tl.tensor, peak: tl.tensor, temperature: tl.tensor, cold: tl.tensor) -> tl.tensor:
    """The unnormalised probability of logit ``x``, 1 at ``peak``; of cold rows, 1 at the peak and 0 elsewhere."""
    weights = tl.where(cold, tl.where(x == peak, 1.0, 0.0), tl.exp((x - peak) / temperature))
    return tl.where(x > float("-inf"), weights, 0.0)


@jit
def search(
    keys: tl.tensor,
    found: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    goal: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    cold: tl.tensor,
    WEIGHED: tl.constexpr,
    SEARCH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Close in on the largest key down to which ``goal`` is reached, by the number of candidates or by their weight.

    In and out: ``goal`` is reached from ``low`` up and not above ``high``. Out: all candidates in ``[low, high]`` have
    one key. Sums of more terms are never smaller in floating point either, as long as they are added in one order.
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
        mass = tl.zeros([PIVOTS, 1], tl.float32)
        for start in range(0, found, SEARCH):
            inside = start + lane < found
            key = tl.load(keys + start + lane, mask=inside, other=LOWEST)
            above = inside & (key >= pivot)
            count += tl.sum(above.to(tl.int32), axis=1, keep_dims=True)
            if WEIGHED:
                own = tl.where(above, weight(of_order_key(key), peak, temperature, cold), 0.0)
                mass += tl.sum(own, axis=1, keep_dims=True)
        if WEIGHED:
            enough = mass >= goal
        else:
            enough = count.to(tl.float32) >= goal
        low = tl.max(tl.where(enough, pivot, low))
        high = tl.min(tl.where(enough, high, pivot - 1))
        many = tl.min(tl.where(enough, count, many))
        few = tl.max(tl.where(enough, few, count))
    return low, high


@jit
def edge_of(
    keys: tl.tensor,
    found: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    cold: tl.tensor,
    SEARCH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The one key in ``[low, high]``, and the number and weight of the candidates above it."""
    lane = tl.arange(0, SEARCH)
    edge = tl.full([SEARCH], LOWEST, tl.int32)
    count = tl.zeros([SEARCH], tl.int32)
    mass = tl.zeros([SEARCH], tl.float32)
    for start in range(0, found, SEARCH):
        inside = start + lane < found
        key = tl.load(keys + start + lane, mask=inside, other=LOWEST)
        above = inside & (key > high)
        edge = tl.maximum(edge, tl.where(above, LOWEST, key))
        count += above.to(tl.int32)
        mass += tl.where(above, weight(of_order_key(key), peak, temperature, cold), 0.0)
    return tl.maximum(tl.max(edge, axis=0), low), tl.sum(count, axis=0), tl.sum(mass, axis=0)
