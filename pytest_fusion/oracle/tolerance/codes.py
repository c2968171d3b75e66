"""The judge of discrete outputs: integers, bools and fp8, whose values are rounded in every lane."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_result import OutputLanes
from pytest_fusion.oracle.rounding import U32, D
from pytest_fusion.oracle.tolerance.output_verdict import ValuesVerdict, index_of

# Lanes round more than a kernel that keeps a quotient in float32, whose codes some of 65536 elements then never have:
# of 24 lanes one strays at 19 elements, and the kernel, right in every code, at 71.
_NEAR = 4
# Fewer equal elements may count separately.
_CLASS = 4


def judge_codes(candidate: Tensor, lanes: OutputLanes) -> ValuesVerdict:
    """The verdict on codes: each must be one that honest arithmetic reaches, and few more may move than in the lanes.

    Ties (an argmax between equals, a value between two codes) are free where the lanes disagree; all else is exact.
    """
    if candidate.dtype.is_floating_point:
        return _judge_fp8(candidate, lanes)
    got = candidate.detach().to(torch.int64).reshape(-1)
    native = lanes.native.to(torch.int64).reshape(-1)
    oracle = lanes.oracle.to(torch.int64).reshape(-1)
    every = lanes.lanes.to(torch.int64).reshape(lanes.lanes.shape[0], -1)
    distance = _distance(got, every, oracle, native)
    outside = distance > 0
    flips = [int(n) for n in (every != oracle).sum(1)]
    most = max(flips, default=0)
    # An honest kernel may leave the range of all lanes as often as a lane leaves the range of the others.
    lanes_own = [_strays(every, oracle, native, k) for k in range(every.shape[0])] if most else [(0, 0)]
    strays, strays_far = (max(counts) for counts in zip(*lanes_own, strict=True))
    far = int((distance > 1).sum())
    near = int(outside.sum()) - far
    moved = int((got != oracle).sum())
    limit = max(1.5 * most + 3 + 3 * math.sqrt(most), 1.1 * int((native != oracle).sum())) if most else math.inf
    ok = far <= 2 * strays_far
    if not (near <= _NEAR * strays + min(3, most) and moved <= limit):
        once, none = _alike(got, oracle, every, lanes.oracle.shape)
        near_once = int((outside & ~none & once).sum()) - far
        ok = ok and near_once <= _NEAR * strays + min(3, most) and int(((got != oracle) & once).sum()) <= limit
    shown = outside if bool(outside.any()) else got != oracle
    return _verdict(ok, got, oracle, shown, distance, moved, limit, candidate)


def _alike(got: Tensor, oracle: Tensor, every: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Elements that count, one of each class that moves as a whole; and elements of classes that some lane has."""
    # A kernel rounds equal elements alike, and the lanes do not: a row of one value moves as a whole or not at all. A
    # class is elements of one exact code in a row, or in a column where rows are equal.
    columns = shape[-1] if shape else 1
    place = torch.arange(got.numel(), device=got.device)
    best: tuple[Tensor, Tensor] | None = None
    for group in (place // columns, place % columns):
        _, of, sizes = torch.unique(torch.stack([group, oracle]), dim=1, return_inverse=True, return_counts=True)
        first = torch.full_like(sizes, got.numel()).scatter_reduce_(0, of, place, "amin")[of]
        reached, differs = torch.zeros_like(sizes), torch.zeros_like(sizes)
        differs.index_add_(0, of, (got != got[first]).long())
        reached.index_add_(0, of, (every == got).any(0).long())
        whole = (differs == 0) & (sizes >= _CLASS)
        found = (place == first) | ~whole[of], (whole & (reached > 0))[of]
        if best is None or int(found[0].sum()) < int(best[0].sum()):
            best = found
    assert best is not None
    return best


def _distance(got: Tensor, every: Tensor, oracle: Tensor, native: Tensor) -> Tensor:
    """The distance of each value from those that rounding reaches; 0 for a lane's value or one between them."""
    # Few distinct values far apart (an argmax between equals) count alone. With many (a fine scale), rounding exceeds
    # the extremes of few lanes by half of their range.
    known = torch.cat([every, oracle[None], native[None]]).sort(0).values
    distinct = 1 + (known[1:] != known[:-1]).sum(0)
    low, high = known[0], known[-1]
    extra = torch.where(distinct >= 4, (high - low + 1) // 2, 0)
    dense = high - low <= 2 * distinct
    to_range = torch.maximum(low - extra - got, got - high - extra).clamp_min(0)
    to_nearest = (known - got).abs().amin(0)
    return torch.where(dense | (distinct >= 4), to_range, to_nearest)


def _strays(every: Tensor, oracle: Tensor, native: Tensor, lane: int) -> tuple[int, int]:
    """How many elements of a lane are outside the range of all others, and how many by more than a step."""
    others = torch.cat([every[:lane], every[lane + 1 :]])
    distance = _distance(every[lane], others, oracle, native)
    return int((distance > 0).sum()), int((distance > 1).sum())


def _judge_fp8(candidate: Tensor, lanes: OutputLanes) -> ValuesVerdict:
    dtype = candidate.dtype

    def stored(value: Tensor) -> Tensor:
        return value.float().to(dtype).to(D)

    raw = lanes.lanes.reshape(lanes.lanes.shape[0], -1)
    exact = lanes.oracle.reshape(-1)
    got = candidate.detach().to(D).reshape(-1)
    native = lanes.native.to(D).reshape(-1)
    oracle = stored(exact)
    # A scale applied as a reciprocal moves values by units of float32, which decides exact ties.
    hair = 4 * U32 * exact.abs()
    margin = _margin(raw - exact, exact, candidate.shape) + hair
    low = stored(torch.minimum(raw.amin(0), exact) - margin)
    high = stored(torch.maximum(raw.amax(0), exact) + margin)
    every = stored(raw)
    inside = ((got >= low) & (got <= high)) | (got == oracle) | (got == native)
    nan = torch.isnan(got)
    may_nan = torch.isnan(oracle) | torch.isnan(native) | torch.isnan(every).any(0) | torch.isnan(low + high)
    must_nan = torch.isnan(oracle) & torch.isnan(native) & torch.isnan(every).all(0)
    wrong = torch.where(nan, ~may_nan, ~inside & ~torch.isnan(low + high)) | (must_nan & ~nan)
    differs = (got != oracle) & ~(nan & torch.isnan(oracle))
    most = max(int(((lane != oracle) & ~(torch.isnan(lane) & torch.isnan(oracle))).sum()) for lane in every)
    ties = int((stored(exact - hair) != stored(exact + hair)).sum())
    limit = max(1.5 * most + 3 + 3 * math.sqrt(most) + ties, 1.1 * int((native != oracle).sum()))
    moved = int(differs.sum())
    ok = not bool(wrong.any()) and moved <= limit
    distance = torch.where(wrong, (got - oracle).abs().nan_to_num(math.inf), 0.0)
    return _verdict(ok, got, oracle, wrong if bool(wrong.any()) else differs, distance, moved, limit, candidate)


def _margin(error: Tensor, exact: Tensor, shape: Sequence[int]) -> Tensor:
    """How far beyond the lanes' ``error`` (K, N) honest rounding may move each element (N): three deviations.

    Where errors exceed the exact value, as much as any in the row. Equal numbers minus their mean leave only rounding,
    which a scale taken from it expands to the whole range of codes. An honest kernel may have another largest element
    there than the few lanes or, where all share one error, more elements near it.
    """
    variance = error.square().mean(0)
    columns = shape[-1] if shape else 1
    drowned = (variance > exact.square()) & torch.isfinite(variance)
    margin = 3 * variance.sqrt()
    if not bool(drowned.any()):
        return margin
    furthest = torch.where(drowned, error.abs().amax(0), 0.0).reshape(-1, columns).amax(-1, keepdim=True)
    return torch.where(drowned, margin.maximum(furthest.expand(-1, columns).reshape(-1)), margin)


def _verdict(
    ok: bool, got: Tensor, oracle: Tensor, shown: Tensor, distance: Tensor, moved: int, limit: float, candidate: Tensor
) -> ValuesVerdict:
    total = got.numel()
    agreed = math.isinf(limit)
    name = "exact" if agreed else "code"
    outside = int((distance > 0).sum())
    if ok:
        ratio = 0.0 if agreed else moved / limit
        return ValuesVerdict(True, None, name, ratio, None, None, None, None, 0, total, False, "codes agree")
    worst = int(distance.to(D).argmax()) if outside else int(shown.to(torch.int8).argmax())
    index = index_of(worst, candidate.shape)
    value, expected = float(got[worst]), float(oracle[worst])
    if outside:
        reason = (
            f"{outside} of {total} values are none that honest rounding reaches; worst at {list(index)}: "
            f"got {value:g}, exact {expected:g}"
        )
    else:
        reason = f"{moved} of {total} values differ from the exact ones where rounding moves at most {limit:.0f}"
    ratio = math.inf if outside else moved / limit
    return ValuesVerdict(
        False, "D", name, ratio, index, value, expected, 0.0, outside or moved, total, not outside, reason
    )


def offending_codes(candidate: Tensor, lanes: OutputLanes) -> Tensor:
    """Bool, of the candidate's shape: whether no lane has the code."""
    got = candidate.detach().to(D)
    dtype = candidate.dtype
    every = lanes.lanes.to(D)
    oracle = lanes.oracle.to(D)
    if dtype.is_floating_point:
        every, oracle = every.float().to(dtype).to(D), oracle.float().to(dtype).to(D)
    native = lanes.native.to(D)
    low = torch.minimum(torch.minimum(every.amin(0), oracle), native)
    high = torch.maximum(torch.maximum(every.amax(0), oracle), native)
    both_nan = torch.isnan(got) & (torch.isnan(oracle) | torch.isnan(native))
    return ~((got >= low) & (got <= high)) & ~both_nan
