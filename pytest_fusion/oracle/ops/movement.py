"""Operations that move, select or compare values, without rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.ops.rule_registry import Op, aligned, each, exact, rank, semantic

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
