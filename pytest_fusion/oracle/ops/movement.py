"""Operations that move, select or compare values: no rounding of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.ops.rule_registry import (
    Op,
    Rule,
    aligned,
    as_float,
    dims_from_end,
    each,
    exact,
    from_end,
    rank,
    semantic,
)

aten = torch.ops.aten


def _elementwise(function: Callable[..., Any]) -> Rule:
    def rule(op: Op, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("memory_format", None)
        return function(*aligned(op, args), **kwargs)

    return rule


for _name in """
    neg abs relu maximum minimum fmax fmin clamp clamp_min clamp_max masked_fill relu6 hardtanh nan_to_num threshold
    threshold_backward tril triu constant_pad_nd
""".split():
    exact(_name)(_elementwise(getattr(aten, _name)))

for _name in """
    eq ne lt le gt ge isnan isinf isposinf isneginf isfinite signbit logical_and logical_or logical_xor
    logical_not bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift
    __and__ __or__ __xor__ __lshift__ __rshift__ sign sgn heaviside round floor ceil trunc fix remainder fmod
    floor_divide
""".split():
    semantic(_name)(_elementwise(getattr(aten, _name)))


@exact("where")
def _where(op: Op, condition: Tensor, *choices: Any) -> Tensor:
    if not choices:
        raise NotImplementedError("where without choices lists places; they follow the native values")
    condition, *values = aligned(op, (condition, *choices))
    if op.outs[0].dtype.is_floating_point:
        values = [as_float(v) for v in values]
    return torch.where(condition, values[0], values[1])


@exact("clone")
def _clone(op: Op, x: Tensor, **_: Any) -> Tensor:
    return x


@exact("fill")
def _fill(op: Op, x: Tensor, value: Any) -> Tensor:
    filled = value if isinstance(value, Tensor) else x.new_full((1,), value)
    # A number that became a tensor is on the CPU, wherever it is written.
    filled = filled.reshape(filled.shape[0], *(1,) * rank(x)).to(x)
    return filled.expand(max(filled.shape[0], 1), *x.shape[1:])


@exact("zero")
def _zero(op: Op, x: Tensor) -> Tensor:
    return x.new_zeros((1, *x.shape[1:]))


def _same_width(values: Sequence[Tensor]) -> list[Tensor]:
    width = max(v.shape[0] for v in values)
    floating = any(v.dtype == torch.float64 for v in values)
    wide = [v.expand(width, *v.shape[1:]) if v.shape[0] != width else v for v in values]
    return [as_float(v) for v in wide] if floating else wide


@exact("cat concat")
def _cat(op: Op, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    # An empty 1-d tensor is skipped by cat whatever the rank of the others (legacy behaviour).
    of = op.outs[0].dim()
    joined = [t for t in tensors if rank(t) == of]
    return torch.cat(_same_width(joined), from_end(dim, of))


@exact("stack")
def _stack(op: Op, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.stack(_same_width(tensors), from_end(dim, op.outs[0].dim()))


@exact("flip")
def _flip(op: Op, x: Tensor, dims: Sequence[int]) -> Tensor:
    return torch.flip(x, [from_end(d, rank(x)) for d in dims]) if rank(x) else x


@exact("roll")
def _roll(op: Op, x: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    if not isinstance(dims, int) and not dims:
        return each(torch.roll, x, shifts)  # type: ignore[no-any-return]
    return torch.roll(x, shifts, tuple(dims_from_end(dims, rank(x))))


@exact("repeat")
def _repeat(op: Op, x: Tensor, repeats: Sequence[int]) -> Tensor:
    x = x.reshape(x.shape[0], *(1,) * (len(repeats) - rank(x)), *x.shape[1:])
    return x.repeat(1, *repeats)


@exact("expand_copy")
def _expand(op: Op, x: Tensor, size: Sequence[int], **_: Any) -> Tensor:
    return x.reshape(x.shape[0], *(1,) * (len(size) - rank(x)), *x.shape[1:]).expand(-1, *op.outs[0].shape)


@exact("slice_backward select_backward diagonal_backward unfold_backward")
def _view_backward(op: Op, grad: Tensor, *args: Any) -> Tensor:
    return each(getattr(aten, op.name), grad, *args)  # type: ignore[no-any-return]


def _one_index(index: Tensor) -> bool:
    return index.shape[0] == 1


@exact("index_select")
def _index_select(op: Op, x: Tensor, dim: int, index: Tensor) -> Tensor:
    if _one_index(index) and rank(x):
        return x.index_select(from_end(dim, rank(x)), index[0].reshape(-1))
    return each(aten.index_select, x, dim, index)  # type: ignore[no-any-return]


@exact("embedding")
def _embedding(op: Op, weight: Tensor, index: Tensor, *_: Any, **__: Any) -> Tensor:
    if _one_index(index):
        return weight.index_select(1, index[0].reshape(-1)).reshape(weight.shape[0], *index.shape[1:], weight.shape[-1])
    return each(aten.embedding, weight, index)  # type: ignore[no-any-return]


@exact("gather")
def _gather(op: Op, x: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    if rank(x) == 0:
        return each(aten.gather, x, dim, index)  # type: ignore[no-any-return]
    width = max(x.shape[0], index.shape[0])
    wide = x.expand(width, *x.shape[1:])
    return torch.gather(wide, from_end(dim, rank(x)), index.expand(width, *index.shape[1:]))


@exact(
    """
    take_along_dim take masked_select index_copy index_fill scatter slice_scatter select_scatter
    diagonal_scatter masked_scatter put unfold_copy replication_pad1d
    replication_pad2d reflection_pad1d reflection_pad2d max_pool2d_with_indices tril_indices diag_embed
    repeat_interleave pixel_shuffle pixel_unshuffle view_copy as_strided_scatter _unsafe_masked_index
    channel_shuffle as_strided_copy split_copy upsample_nearest2d upsample_nearest1d rot90
    block_diag split_with_sizes_copy permute_copy
    """
)
def _lane_by_lane(op: Op, *args: Any, **kwargs: Any) -> Any:
    return each(op.function, *args, **kwargs)


@exact("index _unsafe_index")
def _index(op: Op, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Advanced indexing; a bool mask selects by its native values, since its result has the native shape."""
    native = list(op.args[1])
    chosen = [
        native[i].unsqueeze(0) if index is not None and index.dtype in (torch.bool, torch.uint8) else index
        for i, index in enumerate(indices)
    ]
    places = [i for i, index in enumerate(chosen) if index is not None]
    adjacent = places and places[-1] - places[0] == len(places) - 1
    if adjacent and all(_one_index(chosen[i]) for i in places):  # type: ignore[arg-type]
        moved: Tensor = aten.index(x, [None, *(None if index is None else index[0] for index in chosen)])
        return moved
    return each(aten.index, x, chosen)  # type: ignore[no-any-return]


@exact("amax amin")
def _extreme(op: Op, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    dims = dims_from_end(dim, rank(x))
    if not dims:
        return x
    return torch.amax(x, dims, keepdim) if op.name == "amax" else torch.amin(x, dims, keepdim)


@exact("aminmax")
def _aminmax(op: Op, x: Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = dims_from_end(dim, rank(x))
    return (x.amin(dims, keepdim), x.amax(dims, keepdim)) if dims else (x, x)


@exact("max min")
def _max(op: Op, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], Tensor):
        return getattr(torch, op.name)(*aligned(op, (x, *args)))
    if not args and "dim" not in kwargs:
        return getattr(x, "a" + op.name)(list(range(-rank(x), 0))) if rank(x) else x
    return _along(op, getattr(torch, op.name), x, *args, **kwargs)


def _along(op: Op, function: Callable[..., Any], x: Tensor, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
    if rank(x) == 0:
        return each(function, x, dim, *args, **kwargs)
    return function(x, from_end(dim, rank(x)), *args, **kwargs)


@exact("cummax cummin")
def _cummax(op: Op, x: Tensor, dim: int) -> Any:
    return _along(op, getattr(torch, op.name), x, dim)


@semantic("argmax argmin")
def _argmax(op: Op, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    function = getattr(torch, op.name)
    if rank(x) == 0:
        return torch.zeros((x.shape[0],), dtype=torch.int64, device=x.device)
    if dim is None:
        found: Tensor = function(x.reshape(x.shape[0], -1), -1)
        return found.reshape(x.shape[0], *op.outs[0].shape)
    return function(x, from_end(dim, rank(x)), keepdim)  # type: ignore[no-any-return]


@semantic(
    """
    any all count_nonzero searchsorted bucketize histc equal isin nonzero unique
    unique_consecutive _unique2
    """
)
def _reduce_by_lane(op: Op, *args: Any, **kwargs: Any) -> Any:
    return each(op.function, *args, **kwargs)
