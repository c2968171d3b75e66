"""A draw by weight in one pass: weights are added up lane by lane, a lane is drawn, then one of its tokens."""

from __future__ import annotations

import triton.language as tl

from reference_kernels._common import jit
from reference_kernels._order import LOWEST, of_order_key

# Below every logit that can be drawn, and finite, so that differences to it are numbers.
LEAST = tl.constexpr(-3.4028234663852886e38)
NO_TOKEN = tl.constexpr(2147483647)


@jit
def weight(x: tl.tensor, peak: tl.tensor, rate: tl.tensor) -> tl.tensor:
    """The unnormalised probability of logit ``x``, 1 at the finite ``peak``; ``rate`` is ``log2(e) / temperature``."""
    return tl.exp2((x - peak) * rate)


@jit
def before(x: tl.tensor, token: tl.tensor, bound: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Whether logit ``x`` of ``token`` comes before logit ``bound`` of token ``last``, by falling logits."""
    return (x > bound) | ((x == bound) & (token < last))


@jit
def penalized(row: tl.tuple, at: tl.tensor, inside: tl.tensor, HAS_SEEN: tl.constexpr) -> tl.tensor:
    """The logits at ``at`` in float32, ``-inf`` outside. The division is rounded as torch's, since the order of two
    nearly equal logits decides which of them stays. ``row``: logits, seen, their steps, and the penalty."""
    x_row, seen_row, x_step, seen_step, penalty = row
    at = at.to(tl.int64)
    x = tl.load(x_row + at * x_step, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_SEEN:
        seen = tl.load(seen_row + at * seen_step, mask=inside, other=0) != 0
        x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
    return x


@jit
def _read(
    row: tl.tuple,
    keys: tl.tensor,
    tokens: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    LISTED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Logits and tokens of a row, or of a list of some of its tokens."""
    if LISTED:
        x = of_order_key(tl.load(keys + at, mask=inside, other=LOWEST))
        token = tl.load(tokens + at, mask=inside, other=0)
    else:
        x = penalized(row, at, inside, HAS_SEEN)
        token = at.to(tl.int32)
    return x, token


@jit
def totals(
    row: tl.tuple,
    width: tl.tensor,
    rate: tl.tensor,
    HAS_SEEN: tl.constexpr,
    DEEP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Of each lane, which has every ``BLOCK``-th logit of a row: the largest, and the weights beside that; they are NaN
    where there is NaN or +inf."""
    lane = tl.arange(0, DEEP)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    top = tl.full([BLOCK], LEAST, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, DEEP * BLOCK):
        x = penalized(row, start + lane, start + lane < width, HAS_SEEN)
        lower = top
        top = tl.maximum(top, tl.max(x, axis=0))
        mass = mass * weight(lower, top, rate) + tl.sum(weight(x, top[None, :], rate), axis=0)
    return top, mass


@jit
def masses_before(
    row: tl.tuple,
    keys: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    peak: tl.tensor,
    rate: tl.tensor,
    bound: tl.tensor,
    last: tl.tensor,
    LISTED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    DEEP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The weight, lane by lane, of all that comes before logit ``bound`` of token ``last``."""
    lane = tl.arange(0, DEEP)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, DEEP * BLOCK):
        inside = start + lane < count
        x, token = _read(row, keys, tokens, start + lane, inside, LISTED, HAS_SEEN)
        mass += tl.sum(tl.where(inside & before(x, token, bound, last), weight(x, peak, rate), 0.0), axis=0)
    return mass


@jit
def _one_of(
    row: tl.tuple,
    keys: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    masses: tl.tensor,
    peak: tl.tensor,
    rate: tl.tensor,
    bound: tl.tensor,
    last: tl.tensor,
    seed: tl.tensor,
    number: tl.tensor,
    LISTED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Logit and token of one of those before ``bound`` and ``last``, whose weights ``masses`` are; -1 if there is none.

    A scan is not monotone to the last bit, and a lane's weights are added up anew: 0 is never drawn, and what rounding
    leaves over goes to the last lane or token.
    """
    share, within, _, _ = tl.rand4x(seed, number)
    lane = tl.arange(0, BLOCK)
    total = tl.cumsum(masses, axis=0)
    reached = (total > share * tl.max(total, axis=0)) & (masses > 0.0)
    own = tl.min(tl.where(reached, lane, BLOCK), axis=0)
    own = tl.where(own < BLOCK, own, tl.max(tl.where(masses > 0.0, lane, 0), axis=0))
    goal = within * tl.sum(tl.where(lane == own, masses, 0.0), axis=0)

    strip = own + BLOCK * tl.arange(0, STRIP).to(tl.int64)
    run = tl.full([], 0.0, tl.float32)
    place = tl.full([], -1, tl.int64)
    spare = tl.full([], -1, tl.int64)
    for start in range(0, count, STRIP * BLOCK):
        at = start + strip
        x, token = _read(row, keys, tokens, at, at < count, LISTED, HAS_SEEN)
        weights = tl.where((at < count) & before(x, token, bound, last), weight(x, peak, rate), 0.0)
        hit = (weights > 0.0) & (run + tl.cumsum(weights, axis=0) > goal)
        near = tl.min(tl.where(hit, at, NO_TOKEN), axis=0)
        place = tl.where((place < 0) & (near < NO_TOKEN), near, place)
        spare = tl.maximum(spare, tl.max(tl.where(weights > 0.0, at, -1), axis=0))
        run += tl.sum(weights, axis=0)
    place = tl.where(place < 0, spare, place)
    x, token = _read(row, keys, tokens, place, place >= 0, LISTED, HAS_SEEN)
    return x, tl.where(place >= 0, token, -1)


@jit
def drawn(
    row: tl.tuple,
    keys: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    masses: tl.tensor,
    peak: tl.tensor,
    rate: tl.tensor,
    bound: tl.tensor,
    last: tl.tensor,
    goal: tl.tensor,
    searched: tl.tensor,
    seed: tl.tensor,
    number: tl.tensor,
    WEIGHED: tl.constexpr,
    LISTED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    DEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
) -> tl.tensor:
    """A token of those before ``bound`` and ``last``, whose weights ``masses`` are: if ``searched`` one before which
    less than ``goal`` lies.

    Rejection: a token with more before it cannot stay, and nothing after it can. So the next one is drawn from what
    comes before it, whose weight has just been added up lane by lane; what is drawn in the end has the shares of those
    that stay. The share ``p`` of all stays, so ``1 - p`` need a second round and about ``-log(p)`` more are needed.
    """
    x, token = _one_of(
        row, keys, tokens, count, masses, peak, rate, bound, last, seed, number, LISTED, HAS_SEEN, BLOCK, STRIP
    )
    if WEIGHED:
        while searched:
            masses = masses_before(row, keys, tokens, count, peak, rate, x, token, LISTED, HAS_SEEN, DEEP, BLOCK)
            searched = tl.sum(masses, axis=0) >= goal
            if searched:
                number += 1
                x, token = _one_of(
                    row, keys, tokens, count, masses, peak, rate, x, token, seed, number, LISTED, HAS_SEEN, BLOCK, STRIP
                )
    return token
