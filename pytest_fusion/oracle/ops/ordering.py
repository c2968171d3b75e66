"""Operations that order values. Which of equal ones they return is documented as open, except for stable sorts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.ops.rule_registry import Op, each, exact, from_end, named, rank, semantic


@exact("topk sort kthvalue median nanmedian mode")
def _ordered(op: Op, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Values and places; every lane but the oracle chooses other places among equal values."""
    values, places = _of_either_sign(op, x, lambda v: each(getattr(torch, op.name), v, *args, **kwargs))
    given = named(op.function, (x, *args), kwargs)
    if places is None or given.get("stable") or not rank(x) or not places.numel():
        return values if places is None else (values, places)
    count, along = op.noise.lanes, from_end(given.get("dim", -1), rank(x))
    others = _instead(x[1:] if x.shape[0] > 1 else x.expand(count, *x.shape[1:]), along)
    if others is None:
        return values, places
    wide = places if places.dim() == x.dim() else places.unsqueeze(along)
    wide = wide.expand(1 + count, *wide.shape[1:])
    found = torch.cat([wide[:1], others.gather(along, wide[1:])]).reshape(1 + count, *places.shape[1:])
    return values.expand(1 + count, *values.shape[1:]), found


@semantic("argsort")
def _argsort(op: Op, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    given = named(op.function, (x, *args), kwargs)
    given = {key: value for key, value in given.items() if key != "self"}
    return _ordered(replace(op, name="sort"), x, **given)[1]  # type: ignore[no-any-return]


def _of_either_sign(op: Op, x: Tensor, call: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor | None]:
    """The result of ``call`` without sign bits of NaN; where they change it, every second lane has them."""
    # torch sorts NaN above all numbers, but its radix and merge sorts on CUDA sort one with a sign bit below them
    # (pytorch#190781). A kernel may do either.
    nan = x.isnan()
    found = call(torch.where(nan, math.nan, x) if x.is_floating_point() else x)
    if isinstance(found, Tensor):
        return found, None
    values, places = found
    if not bool((nan & x.signbit()).any()):
        return values, places
    signed, there = call(x)
    if torch.equal(places, there):
        return values, places
    second = torch.arange(1 + op.noise.lanes, device=x.device) % 2 == 1
    second = second.reshape(-1, *[1] * rank(values))
    return torch.where(second, signed, values), torch.where(second, there, places)


def _instead(x: Tensor, along: int) -> Tensor | None:
    """For every place of ``x`` (K, *shape) that of an equal value, another one in each lane; None: none are equal.

    The K lanes use all equal places if there are no more than K, else spread over them. Each lane is a permutation.
    """
    if x.shape[along] < 2:
        return None
    order = x.argsort(dim=along, stable=True)
    ordered, size = x.gather(along, order), x.shape[along]
    one, following = (ordered.narrow(along, start, size - 1) for start in (0, 1))
    equal = (one == following) | (one.isnan() & following.isnan())
    if not bool(equal.any()):
        return None
    shape = [1] * x.dim()
    shape[along] = size
    at = torch.arange(size, device=x.device).reshape(shape).expand(x.shape)
    edge = torch.ones_like(ordered.narrow(along, 0, 1), dtype=torch.bool)
    first = torch.where(torch.cat([edge, ~equal], along), at, 0).cummax(along).values
    last = torch.where(torch.cat([~equal, edge], along), at, size).flip(along).cummin(along).values.flip(along)
    many, lanes = last - first + 1, x.shape[0]
    lane = torch.arange(1, lanes + 1, device=x.device).reshape(lanes, *[1] * (x.dim() - 1))
    turned = first + (at - first + torch.where(many <= lanes, lane, lane * many // lanes)) % many
    return torch.empty_like(order).scatter(along, order, order.gather(along, turned))
