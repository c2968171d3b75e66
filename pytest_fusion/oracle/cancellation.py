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

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_store import Lanes
from pytest_fusion.oracle.rounding import Noise

NARROW = frozenset({torch.float16, torch.bfloat16})
SUMS = frozenset({"add", "sub", "subtract", "rsub"})
LARGEST = frozenset({"amax", "max"})
# A sum below this share of its largest operand: what is multiplied out then rounds more than the sum itself does.
_LEFT = 1 / 8


def loose(operands: Iterable[Tensor], seen: dict[int, Lanes], kind: str) -> list[int]:
    """The ``id`` of each operand whose last rounding was to float32: a kernel need not do that one."""
    return [id(t) for t in operands if not seen[id(t)].single and (kind == "F" or t.dtype == torch.float32)]


def unrounded(lanes: Lanes, way: int = 1, ways: int = 2) -> Tensor:
    """Rounded lanes, but every ``ways``-th from ``way`` on (never lane 0, the oracle) as before their last rounding."""
    mixed = lanes.rounded.expand(max(lanes.raw.shape[0], lanes.rounded.shape[0]), *lanes.rounded.shape[1:]).clone()
    mixed[way::ways] = lanes.raw.expand_as(mixed)[way::ways]
    return mixed


def again(raw: Tensor, rounded: Tensor) -> Tensor:
    """Rounded lanes, but every second (never lane 0, the oracle) as another lane has the value before its rounding."""
    mixed = unrounded(Lanes(raw, rounded))
    mixed[1::2] = mixed[1::2].roll(1, 0)
    return mixed


def widened(found: Lanes, dtype: torch.dtype, source: Tensor, seen: dict[int, Lanes]) -> Lanes:
    """The lanes of a conversion to ``dtype`` with, for its readers, what is known of the ``source``."""
    of = seen[id(source)]
    found = replace(found, spread=of.spread)
    if source.dtype not in NARROW or dtype in NARROW or of.single:
        return found
    return replace(found, wider=of.raw, narrow=source.dtype)


def of_stored_output(noise: Noise, weights: Tensor, spread: Tensor, dim: int) -> Tensor:
    """What lanes 1..K have too much, by row, in the ``delta`` of a softmax's gradient ``p * (dp - delta)``.

    Attention kernels take ``delta = sum(p * dp)`` from the result that they stored, as ``sum(do * out)``
    (FlashAttention-2, arXiv 2307.08691, algorithm 2). ``spread``, of the shape of the exact ``weights``, is what the
    roundings of ``out`` come to where one weight is all: of ``out = p @ v`` the squares weigh in by ``p``, at most
    (Jensen).
    """
    row = (weights * spread.square()).sum(dim, keepdim=True).sqrt()
    return row.unsqueeze(0) * noise.normal(tuple(row.shape), row.device)


def reread(noise: Noise, lanes: Lanes, dtype: torch.dtype, reader: int) -> Lanes:
    """Lanes of an operand as its ``reader``-th reader may have them: every second one has a rounding of its own."""
    before, narrow = (lanes.wider, lanes.narrow) if lanes.narrow is not None else (lanes.raw, dtype)
    if (lanes.single and lanes.narrow is None) or narrow not in NARROW or before is None:
        return lanes
    mixed = noise.spread(lanes.rounded)
    mixed[1 + reader % 2 :: 2] = noise.rounded(before, narrow)[1 + reader % 2 :: 2]
    return replace(lanes, rounded=mixed)


def exposed(operands: Iterable[Tensor], seen: dict[int, Lanes], kind: str) -> dict[int, Lanes]:
    """What the lanes of a sum read: of several operands one at most is unrounded, as in ``fma(a, b, -(c * d))``."""
    which = loose(operands, seen, kind)
    read = dict(seen)
    for way, key in enumerate(which, 1):
        read[key] = replace(seen[key], rounded=unrounded(seen[key], way, 1 + len(which)))
    return read


def multiplied_out(noise: Noise, found: Lanes, operands: Iterable[Tensor], unit: float) -> Lanes:
    """A sum that cancels, as what reads it may have it: ``(x - mean) * scale`` is ``x * scale - mean * scale`` too.

    Each product rounds by itself, at the size of the ``operands`` (1, *shape) and not of what is left of them; ATen's
    layer norm on the CPU has it so, forward and backward. The sum as a result stays what it is.
    """
    size = torch.zeros_like(found.raw[0])
    for t in operands:
        size = torch.maximum(size, t[0].abs())
    return replace(found, rounded=at_operands_size(noise, found.rounded, size, unit))


def at_operands_size(noise: Noise, difference: Tensor, size: Tensor, unit: float) -> Tensor:
    """A ``difference`` (L, *shape) with a rounding more, at the ``size`` (*shape) of what cancelled in it."""
    exact = difference[0]
    where = torch.isfinite(size) & torch.isfinite(exact) & (exact.abs() < _LEFT * size)
    if not bool(where.any()):
        return difference
    noisy = noise.spread(difference)
    noisy[1:].add_(torch.where(where, unit * size, 0.0) * noise.uniform(tuple(exact.shape), exact.device))
    return noisy


def scaled_before(noise: Noise, found: Lanes, given: Tensor, unit: float) -> Lanes:
    """``x - max(x)`` of ``given`` numbers (*shape), as what reads it may have it: scaled by log2 e before, for exp2.

    Each product rounds then, at the size of ``x``, but the largest as itself; and none so much that an exponential
    overflows. A softmax that is written out was refused 6 times what was allowed, interpreted, for values of hundreds.
    """
    size = given.abs()
    where = (found.raw[0] != 0) & (size * unit <= 1)
    if not bool(where.any()):
        return found
    noisy = noise.spread(found.rounded)
    noisy[1:].add_(torch.where(where, unit * size, 0.0) * noise.uniform(tuple(where.shape), where.device))
    return replace(found, rounded=noisy)
