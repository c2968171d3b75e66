"""Operations that move, select, order or compare values, without rounding.

Which of equal values those return that order them is documented as open, except for stable sorts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.ops.rule_registry import Op, aligned, each, exact, from_end, named, rank, semantic

aten = torch.ops.aten


@semantic(
    """
    eq ne lt le gt ge isnan isinf isposinf isneginf isfinite signbit logical_and logical_or logical_xor
    logical_not bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift
    __and__ __or__ __xor__ __lshift__ __rshift__ sign sgn heaviside round floor ceil trunc fix remainder fmod
    floor_divide
    """
)
@exact(
    """
    neg abs relu maximum minimum fmax fmin clamp clamp_min clamp_max masked_fill relu6 hardtanh nan_to_num threshold
    threshold_backward tril triu constant_pad_nd where
    """
)
def _elementwise(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Runs all lanes at once, which is faster than one by one."""
    return getattr(aten, op.name)(*aligned(op, args), **kwargs)


@semantic(
    "any all count_nonzero searchsorted bucketize histc equal isin nonzero unique_consecutive _unique2 argmax argmin"
)
@exact(
    """
    zero cat stack flip roll repeat expand_copy slice_backward select_backward diagonal_backward unfold_backward
    index_select embedding gather take_along_dim take masked_select index_copy index_fill scatter slice_scatter
    select_scatter diagonal_scatter masked_scatter put unfold_copy replication_pad1d replication_pad2d
    reflection_pad1d reflection_pad2d max_pool2d_with_indices tril_indices diag_embed repeat_interleave pixel_shuffle
    pixel_unshuffle view_copy as_strided_scatter _unsafe_masked_index channel_shuffle as_strided_copy split_copy
    upsample_nearest2d upsample_nearest1d rot90 block_diag split_with_sizes_copy permute_copy amax amin aminmax max min
    cummax cummin
    """
)
def _one_by_one(op: Op, *args: Any, **kwargs: Any) -> Any:
    return each(op.function, *args, **kwargs)


exact("clone")(lambda op, x, **_: x)


@exact("fill")
def _fill(op: Op, x: Tensor, value: Any) -> Tensor:
    filled = value if isinstance(value, Tensor) else x.new_full((1,), value)
    # A number that became a tensor is on the CPU, wherever it is written.
    filled = filled.reshape(filled.shape[0], *(1,) * rank(x)).to(x)
    return filled.expand(max(filled.shape[0], 1), *x.shape[1:])


def placed(op: Op, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices of lanes; a bool mask selects by its native values, so that the result has the native shape."""
    return [
        native.unsqueeze(0) if native is not None and native.dtype in (torch.bool, torch.uint8) else index
        for native, index in zip(op.args[1], indices, strict=True)
    ]


@exact("index _unsafe_index")
def _index(op: Op, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    return each(aten.index, x, placed(op, indices))  # type: ignore[no-any-return]


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
