"""Operations that order values. Which of equal ones they name torch leaves open, so each lane names another one.

The documentation of each says that any of several equal ones may be returned; that of the sorts unless ``stable``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.ops.rule_registry import Op, each, exact, from_end, named, rank, semantic


@exact("topk")
def _topk(op: Op, x: Tensor, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True) -> Any:
    return _named(op, x, dim, lambda v, along: torch.topk(v, k, along, largest, is_sorted))


@exact("sort")
def _sort(op: Op, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    given = named(op.function, (x, *args), kwargs)
    dim, down, stable = given.get("dim", -1), bool(given.get("descending")), bool(given.get("stable"))
    return _named(op, x, dim, lambda v, at: torch.sort(v, dim=at, descending=down, stable=stable), free=not stable)


@semantic("argsort")
def _argsort(op: Op, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _sort(op, x, *args, **kwargs)[1]  # type: ignore[no-any-return]


@exact("msort")
def _msort(op: Op, x: Tensor) -> Tensor:
    return _named(op, x, 0, lambda v, at: torch.sort(v, dim=at), free=False)[0]


@exact("kthvalue")
def _kthvalue(op: Op, x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    return _one(op, x, dim, keepdim, lambda v, along: torch.kthvalue(v, k, along, True))


@exact("median nanmedian mode")
def _median(op: Op, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    function = getattr(torch, op.name)
    if len(op.outs) == 1:
        return each(function, x)
    return _one(op, x, -1 if dim is None else dim, keepdim, lambda v, along: function(v, along, True))


def _one(op: Op, x: Tensor, dim: int, keepdim: bool, call: Callable[[Tensor, int], Any]) -> Any:
    """`_named` for one value along ``dim``, which ``call`` keeps as a dim."""
    values, places = _named(op, x, dim, call)
    if keepdim or not rank(x):
        return values, places
    along = from_end(dim, rank(x))
    return values.squeeze(along), places.squeeze(along)


def _named(
    op: Op, x: Tensor, dim: int, call: Callable[[Tensor, int], Any], *, free: bool = True
) -> tuple[Tensor, Tensor]:
    """Values and places along ``dim``, as ``call`` finds them; where the choice between equal ones is ``free``, every
    lane but the oracle has other places."""
    if not rank(x):
        values, places = each(call, x, 0)
        return values, places
    along = from_end(dim, rank(x))
    values, places = _of_either_sign(op, x, along, call)
    if not free or x.shape[along] < 2 or not places.numel():
        return values, places
    count = op.noise.lanes
    wide = x[1:] if x.shape[0] > 1 else x.expand(count, *x.shape[1:])
    others = _instead(wide, along)
    if others is None:
        return values, places
    given = (places[1:] if places.shape[0] > 1 else places).expand(count, *places.shape[1:])
    found = torch.cat([places[:1], others.gather(along, given)])
    return values.expand(1 + count, *values.shape[1:]), found


def _of_either_sign(op: Op, x: Tensor, along: int, call: Callable[[Tensor, int], Any]) -> tuple[Tensor, Tensor]:
    """What ``call`` finds where no NaN has a sign bit; where some have and that changes it, every second lane has what
    it finds then.

    NaN is larger than all numbers for torch, but below them with a sign bit for its radix and merge sorts on CUDA
    (pytorch#190781): which of the two a kernel follows is not ours to say.
    """
    nan = x.isnan()
    values, places = call(torch.where(nan, math.nan, x) if x.is_floating_point() else x, along)
    if not bool((nan & x.signbit()).any()):
        return values, places
    signed, there = call(x, along)
    if torch.equal(places, there):
        return values, places
    second = torch.arange(1 + op.noise.lanes, device=x.device).reshape(-1, *[1] * rank(x)) % 2 == 1
    return torch.where(second, signed, values), torch.where(second, there, places)


def _instead(x: Tensor, along: int) -> Tensor | None:
    """For every place of ``x`` (K, *shape) that of an equal value, or its own: another one in each of the K lanes, all
    of them where there are no more than K, else spread over them. Each lane is a permutation. None: none are equal."""
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
