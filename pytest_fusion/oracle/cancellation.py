"""A difference shows the last rounding of its operands, which no honest kernel need share.

Where both sides of a cancellation come from one rounded value, every lane has exactly 0. A GPU has not: compilers
contract a product and the sum that it feeds into one operation that leaves the product unrounded (PTX's default,
``--fmad=true``; Triton's ``enable_fp_fusion``), and a kernel that factors its formula otherwise rounds elsewhere. Of a
layer norm's backward over a single element 4e-6 was left where the reference has 0. A value that is computed twice is
rounded twice: the score that attention's backward computes again, or the sum that each thread of a Triton reduction
ends up with, which two threads contract differently (one unit of a score of 141: 1.5e-5 of a softmax over one key).

What the reference stores in 16 bits a kernel has in float32 as well: a residual sum is stored, its statistics are
those of the sum before, and backward reads the stored one beside them (flash-attention's layer norm and all that
descend from it). Each reader of such a tensor may have its own rounding of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_store import Lanes
from pytest_fusion.oracle.operand import Operand
from pytest_fusion.oracle.rounding import NARROW, Noise

# A sum below this share of its largest operand: what is multiplied out then rounds more than the sum itself does.
_LEFT = 1 / 8


def reread(noise: Noise, operands: Sequence[Operand], reader: int) -> None:
    """Operands as their ``reader``-th reader may have them: every second lane of narrow ones is rounded anew."""
    for operand in operands:
        lanes = operand.lanes
        before, narrow = (lanes.wider, lanes.narrow) if lanes.narrow else (lanes.raw, operand.native.dtype)
        if (lanes.single and lanes.narrow is None) or narrow not in NARROW or before is None:
            continue
        operand.value, way = noise.spread(lanes.rounded), 1 + reader % 2
        operand.value[way::2] = noise.rounded(before, narrow)[way::2]


def exposed(operands: Sequence[Operand]) -> None:
    """What the lanes of a sum read: of several operands one at most is unrounded, as in ``fma(a, b, -(c * d))``."""
    which = [operand for operand in operands if operand.loose]
    read = [operand.mixed(way, 1 + len(which)) for way, operand in enumerate(which, 1)]
    for operand, value in zip(which, read, strict=True):
        operand.value = value


def widened(found: Lanes, dtype: torch.dtype, source: Operand) -> Lanes:
    """The lanes of a conversion to ``dtype`` with, for its readers, what is known of the ``source``."""
    found, narrow = replace(found, spread=source.lanes.spread), source.native.dtype
    if narrow not in NARROW or dtype in NARROW or source.lanes.single:
        return found
    return replace(found, wider=source.lanes.raw, narrow=narrow)


def of_stored_output(noise: Noise, weights: Tensor, spread: Tensor, dim: int) -> Tensor:
    """What lanes 1..K have too much, by row, in the ``delta`` of a softmax's gradient ``p * (dp - delta)``.

    Attention kernels take ``delta = sum(p * dp)`` from the result that they stored, as ``sum(do * out)``
    (FlashAttention-2, arXiv 2307.08691, algorithm 2). ``spread``, of the shape of the exact ``weights``, is what the
    roundings of ``out`` come to where one weight is all: of ``out = p @ v`` the squares weigh in by ``p``, at most
    (Jensen).
    """
    row = (weights * spread.square()).sum(dim, keepdim=True).sqrt()
    return row.unsqueeze(0) * noise.normal(tuple(row.shape), row.device)


def multiplied_out(noise: Noise, found: Lanes, operands: Sequence[Operand], unit: float) -> Lanes:
    """A sum that cancels, as what reads it may have it: ``(x - mean) * scale`` is ``x * scale - mean * scale`` too.

    Each product rounds by itself, at the size of the ``operands`` and not of what is left of them; ATen's layer norm
    on the CPU has it so, forward and backward. The sum as a result stays what it is.
    """
    size = torch.zeros_like(found.raw[0])
    for operand in operands:
        size = torch.maximum(size, operand.value[0].abs())
    return replace(found, rounded=at_operands_size(noise, found.rounded, size, unit))


def at_operands_size(noise: Noise, difference: Tensor, size: Tensor, unit: float) -> Tensor:
    """A ``difference`` (L, *shape) with a rounding more, at the ``size`` (*shape) of what cancelled in it."""
    exact = difference[0]
    return noise.off(difference, unit * size, size.isfinite() & exact.isfinite() & (exact.abs() < _LEFT * size))


def scaled_before(noise: Noise, found: Lanes, given: Tensor, unit: float) -> Lanes:
    """``x - max(x)`` of ``given`` numbers (*shape), as what reads it may have it: scaled by log2 e before, for exp2.

    Each product rounds then, at the size of ``x``, but the largest as itself; and none so much that an exponential
    overflows. A softmax that is written out was refused 6 times what was allowed, interpreted, for values of hundreds.
    """
    size = given.abs()
    where = (found.raw[0] != 0) & (size * unit <= 1)
    return replace(found, rounded=noise.off(found.rounded, unit * size, where))
