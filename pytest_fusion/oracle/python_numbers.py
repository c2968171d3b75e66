"""Python numbers that a 16-bit tensor does not hold.

ATen rounds a number to the dtype of the tensor that it is compared with or written to: ``x > 0.1`` of bfloat16 is false
for 0.10009765625. A kernel with the tensor in float32 may have the number in float32 too, so lanes have either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pytest_fusion.oracle.lane_store import Lanes
from pytest_fusion.oracle.rounding import NARROW, D, Noise


@functools.lru_cache(maxsize=4096)
def held(value: float, dtype: torch.dtype) -> float:
    """``value`` as ATen converts it, via float32."""
    return float(torch.tensor(value, dtype=torch.float32).to(dtype))


def rounds_to(args: Any, kwargs: Any, operands: Sequence[Tensor]) -> torch.dtype | None:
    """The 16-bit dtype that an operation on ``operands`` computes in, if it does not hold one of its numbers."""
    floating = [t for t in operands if t.dtype.is_floating_point]
    kinds = {t.dtype for t in floating if t.dim()} or {t.dtype for t in floating}
    dtype = functools.reduce(torch.promote_types, kinds) if kinds else None
    if dtype not in NARROW:
        return None
    numbers = (v for v in tree_leaves((args, kwargs)) if isinstance(v, float))
    if any(_lost(v, dtype) for v in numbers) or any(_alone(t, dtype) for t in floating):
        return dtype
    return None


def _lost(value: float, dtype: torch.dtype) -> bool:
    return not math.isnan(value) and held(value, dtype) != held(value, torch.float32)


def _alone(t: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``t`` is a number as a tensor, which takes the dtype of others and does not fit it."""
    return t.dim() == 0 and t.dtype in (torch.float32, D) and _lost(float(t), dtype)


def narrowed(tree: Any, dtype: torch.dtype) -> Any:
    """Arguments with their numbers as ``dtype`` holds them."""
    return tree_map_only(float, lambda v: held(v, dtype), tree)


def narrowed_lanes(native: Tensor, lanes: Tensor, dtype: torch.dtype) -> Tensor:
    """Lanes of an operand; those of a number as ``dtype`` holds it."""
    return lanes.float().to(dtype).to(D) if native.dim() == 0 and lanes.dtype == D else lanes


def mixed(noise: Noise, wide: Iterable[Any], narrow: Iterable[Any]) -> list[Any]:
    """Results of ``wide``, or of ``narrow`` in some lanes of kind ``E``, never in the oracle."""
    return [_mixed(noise, a, b) if isinstance(a, Tensor) else a for a, b in zip(wide, narrow, strict=True)]


def _mixed(noise: Noise, wide: Tensor, narrow: Tensor) -> Tensor:
    if noise.kind == "F":
        return wide
    rounded = noise.other_half(wide)
    if noise.lanes == 1:
        rounded[1] = True
    return torch.where(rounded, narrow, wide)


def lifted(noise: Noise, native: Tensor) -> Lanes | None:
    """Lanes of a number that became a tensor, as in ``y[0] = 0.3``; ``None`` where the tensor holds it exactly."""
    # The number is taken to be the one with the fewest digits that gives this value.
    if native.numel() != 1 or native.dtype not in NARROW:
        return None
    value = float(native)
    written = next((w for n in range(1, 5) if held(w := float(f"{value:.{n}g}"), native.dtype) == value), value)
    return None if written == value else _either(noise, native, written)


def filled(noise: Noise, native: Tensor, args: Any, kwargs: Any) -> Lanes | None:
    """Lanes of a constant whose number its dtype does not hold; ``None`` where it holds it, or none is given."""
    lost = [v for v in tree_leaves((args, kwargs)) if isinstance(v, float) and _lost(v, native.dtype)]
    if native.dtype not in NARROW or not lost or not native.numel():
        return None
    return _either(noise, native, lost[0])


def _either(noise: Noise, native: Tensor, written: float) -> Lanes:
    one = native.new_full((1, *(1,) * native.dim()), written, dtype=D)
    lanes = _mixed(noise, one, native.reshape(-1)[:1].to(D).reshape(one.shape))
    lanes = lanes.expand(lanes.shape[0], *native.shape)
    return Lanes(lanes, lanes)
