"""Whole numbers with the structure of real data: skewed indices, offsets of sequences, routings, page tables.

Uniform indices are all alike: a gather past an expert's capacity, an atomic on a hot row in 16 bits and an empty
sequence need others. A kind is a choice of its profile (`spec.values`), else ``SpecError``. Results are int64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.spec import values

# Of indices: the share that a hot row takes, and equal indices in a run.
_HOT, _RUN = 0.9, 5


class Unfit(Exception):
    """No values of the profile have this shape."""


def indices(kind: str, shape: tuple[int, ...], size: int, seed: int, device: torch.device) -> torch.Tensor:
    """From 0 to ``size - 1``. Raises ``Unfit`` for elements and a size of 0."""
    values.indices(size).choice(kind)
    count = math.prod(shape)
    if size < 1 and count:
        raise Unfit("an index into a dim of size 0")
    last = max(size, 1) - 1
    v = counter_random.integers((count,), 0, last, seed, device)
    place = torch.arange(count, device=device)
    one = counter_random.mix(seed, "one") % (last + 1)
    match kind:
        case "even":
            if count > 1:
                v[0], v[-1] = last, 0
        case "zipf":  # index i about as often as 1 / (i + 1)
            u = counter_random.uniform((count,), seed, device)
            v = ((u * math.log(last + 2)).exp().floor().long() - 1).clamp(0, last)
        case "hot":
            u = counter_random.uniform((count,), counter_random.mix(seed, "hot"), device)
            v = torch.where(u < _HOT, one, v)
        case "equal":
            v = torch.full_like(v, (0, last, one)[counter_random.mix(seed, "which") % 3])
        case "sorted":
            v = v.sort().values
        case "runs":
            v = v[place // _RUN * _RUN] if count else v
        case "gaps":  # odd rows are never used
            v = v // 2 * 2
        case "ends":
            v = torch.where(place % 2 == 0, 0, last)
        case "once":  # none twice where there is room
            order = counter_random.uniform((last + 1,), seed, device).argsort()
            v = order[place % (last + 1)]
    return v.reshape(shape)


def offsets(kind: str, shape: tuple[int, ...], total: int, seed: int, device: torch.device) -> torch.Tensor:
    """Where sequences begin, and at last ``total``: rows of rising numbers from 0. Raises ``Unfit``."""
    if not shape or shape[-1] < 1 or (shape[-1] == 1 and total):
        raise Unfit(f"offsets of no sequence do not end at {total}")
    begin = torch.zeros((*shape[:-1], 1), dtype=torch.int64, device=device)
    return torch.cat([begin, lengths(kind, (*shape[:-1], shape[-1] - 1), total, seed, device).cumsum(-1)], -1)


def lengths(kind: str, shape: tuple[int, ...], total: int, seed: int, device: torch.device) -> torch.Tensor:
    """Lengths of sequences that add up to ``total`` along the last axis. Raises ``Unfit``."""
    values.lengths(total).choice(kind)
    if not shape or (total and not shape[-1]):
        raise Unfit(f"no sequence has a length of {total} in all")
    count = shape[-1]
    if not count:
        return torch.zeros(shape, dtype=torch.int64, device=device)
    weight = torch.ones(shape, dtype=torch.float64, device=device)
    place = torch.arange(count, device=device)
    match kind:
        case "ragged":
            weight = counter_random.uniform(shape, seed, device) ** 3
        case "empty first":
            weight = (place > 0) * weight if count > 1 else weight
        case "empty last":
            weight = (place < count - 1) * weight if count > 1 else weight
        case "some empty":
            drawn = counter_random.uniform(shape, seed, device) < 0.5
            weight = weight * drawn + (place == counter_random.mix(seed, "full") % count)
        case "one long":  # all others have one element, or none where that is too many
            long = counter_random.mix(seed, "long") % count
            rest = min(total, count - 1)
            each = torch.where(place < rest + (place.new_tensor(long) < rest), 1, 0)
            each[long] = total - int(each.sum() - each[long])
            return each.expand(shape).clone()
    ends = (weight.cumsum(-1) / weight.sum(-1, keepdim=True) * total).round().long()
    ends[..., -1] = total
    return ends.diff(dim=-1, prepend=torch.zeros_like(ends[..., :1]))


def routing(kind: str, shape: tuple[int, ...], experts: int, seed: int, device: torch.device) -> torch.Tensor:
    """Different experts in each row, from 0 to ``experts - 1``. Raises ``Unfit`` where there are too few."""
    values.routing(experts).choice(kind)
    width = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    if width > experts and rows:
        raise Unfit(f"{experts} experts are too few for {width} in each row")
    if not rows or not width:
        return torch.zeros(shape, dtype=torch.int64, device=device)
    if kind == "balanced":
        return (torch.arange(rows * width, device=device) % experts).reshape(shape)
    score = counter_random.uniform((rows, experts), seed, device)
    one = counter_random.mix(seed, "one") % experts
    if kind == "all to one":
        score[:, one] = 2.0
    elif kind == "starved":  # the last expert and up to half of all get nothing
        score[:, experts - min(experts - width, (experts + 1) // 2) :] = -1.0
    return score.topk(width, dim=-1).indices.reshape(shape)


def pages(kind: str, shape: tuple[int, ...], size: int, seed: int, device: torch.device) -> torch.Tensor:
    """Different pages from 0 to ``size - 1``; of kind ``holes`` rows end in -1. Raises ``Unfit`` for too few."""
    values.page_table(size, holes=True).choice(kind)
    count = math.prod(shape)
    if count > size:
        raise Unfit(f"{size} pages are too few for {count} entries")
    order = counter_random.uniform((size,), seed, device).argsort()
    if kind in ("in order", "reversed"):
        order = torch.arange(size, device=device)
        order = order.flip(0) if kind == "reversed" else order
    v = order[:count].reshape(shape)
    if kind == "holes" and shape:
        used = counter_random.integers((*shape[:-1], 1), 0, shape[-1], counter_random.mix(seed, "used"), device)
        v = torch.where(torch.arange(shape[-1], device=device) < used, v, -1)
    return v


# By profile; the one parameter of each is a size.
MAKERS: dict[str, Callable[[str, tuple[int, ...], int, int, torch.device], torch.Tensor]] = {
    "indices": indices,
    "offsets": offsets,
    "lengths": lengths,
    "routing": routing,
    "page_table": pages,
}
