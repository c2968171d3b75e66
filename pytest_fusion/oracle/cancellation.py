"""A difference shows the last rounding of its operands, which an honest kernel need not share.

Where both sides of a cancellation come from one rounded value, every lane is exactly 0. A GPU differs: compilers
contract a product and its sum into one operation that leaves the product unrounded (PTX's default, ``--fmad=true``;
Triton's ``enable_fp_fusion``), and a kernel that factors its formula otherwise rounds elsewhere. A layer norm's
backward over a single element gave 4e-6 where the reference has 0. A value that is computed twice is rounded twice: the
score in attention's backward, or the sum in each thread of a Triton reduction, which two threads contract differently
(one unit of a score of 141: 1.5e-5 of a softmax over one key).

A kernel may also have in float32 what the reference stores in 16 bits. flash-attention's layer norm stores a residual
sum but takes statistics of the unrounded one, and backward reads both. So each reader of a 16-bit tensor may have its
own rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_store import Lanes
from pytest_fusion.oracle.operand import Operand
from pytest_fusion.oracle.rounding import NARROW, Noise

# A sum below this share of its largest operand: its multiplied-out terms round more than the sum itself.
_LEFT = 1 / 8


def reread(noise: Noise, operands: Sequence[Operand], reader: int) -> None:
    """Let the ``reader``-th reader have its own rounding of narrow operands: every second lane is rounded anew."""
    for operand in operands:
        lanes = operand.lanes
        before, narrow = (lanes.wider, lanes.narrow) if lanes.narrow else (lanes.raw, operand.native.dtype)
        if (lanes.single and lanes.narrow is None) or narrow not in NARROW or before is None or not before.numel():
            continue
        operand.value, way = noise.spread(lanes.rounded), 1 + reader % 2
        operand.value[way::2] = noise.rounded(before, narrow)[way::2]


def exposed(operands: Sequence[Operand]) -> None:
    """Let lanes of a sum read operands unrounded, at most one of several, as in ``fma(a, b, -(c * d))``."""
    which = [operand for operand in operands if operand.loose]
    read = [operand.mixed(way, 1 + len(which)) for way, operand in enumerate(which, 1)]
    for operand, value in zip(which, read, strict=True):
        operand.value = value


def widened(found: Lanes, dtype: torch.dtype, source: Operand) -> Lanes:
    """The lanes of a conversion to ``dtype``, with what readers may know of the ``source``."""
    found, narrow = replace(found, spread=source.lanes.spread), source.native.dtype
    if narrow not in NARROW or dtype in NARROW or source.lanes.single:
        return found
    return replace(found, wider=source.lanes.raw, narrow=narrow)


def of_stored_output(noise: Noise, weights: Tensor, spread: Tensor, dim: int) -> Tensor:
    """The error of lanes 1..K, by row, in the ``delta`` of a softmax's gradient ``p * (dp - delta)``.

    Attention kernels compute ``delta = sum(p * dp)`` from the stored result, as ``sum(do * out)`` (FlashAttention-2,
    arXiv 2307.08691, algorithm 2). ``spread``, of the shape of the exact ``weights``, is the rounding error of ``out``
    if one weight is all. For ``out = p @ v`` its squares add up weighted by ``p``, at most (Jensen).
    """
    row = (weights * spread.square()).sum(dim, keepdim=True).sqrt()
    return row.unsqueeze(0) * noise.normal(tuple(row.shape), row.device)


def multiplied_out(noise: Noise, found: Lanes, operands: Sequence[Operand], unit: float) -> Lanes:
    """A sum that cancels, as its readers may have it: ``(x - mean) * scale`` is also ``x * scale - mean * scale``."""
    # Each product then rounds at its own size, not the difference's, as in ATen's layer norm on the CPU.
    size = torch.zeros_like(found.raw[0])
    for operand in operands:
        size = torch.maximum(size, operand.value[0].abs())
    return replace(found, rounded=at_operands_size(noise, found.rounded, size, unit))


def at_operands_size(noise: Noise, difference: Tensor, size: Tensor, unit: float) -> Tensor:
    """``difference`` (L, *shape) with one more rounding at ``size`` (*shape), that of its operands."""
    exact = difference[0]
    return noise.off(difference, unit * size, size.isfinite() & exact.isfinite() & (exact.abs() < _LEFT * size))


def scaled_before(noise: Noise, found: Lanes, given: Tensor, unit: float) -> Lanes:
    """``x - max(x)`` of ``given`` numbers (*shape), as readers may have it: scaled by log2 e before, for exp2."""
    # Each product, except the largest itself, rounds at the size of ``x``, but not so much that an exponential
    # overflows. An interpreted softmax, written out, was 6 times over the limit for values of hundreds.
    size = given.abs()
    where = (found.raw[0] != 0) & (size * unit <= 1)
    return replace(found, rounded=noise.off(found.rounded, unit * size, where))
