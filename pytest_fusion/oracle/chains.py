"""Chains of additions: a kernel may add in another order than a reference that adds one term after the other.

``x + y + z`` may be ``x + (y + z)``, and a loop over taps one ``tl.sum``. Where partial sums cancel, the reference's
roundings do not cover other orders. For three numbers near one, the first two cancelling, the written order rounds
nothing and another order half a unit of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_store import Lanes
from pytest_fusion.oracle.operator_plan import Call
from pytest_fusion.oracle.ops import Op
from pytest_fusion.oracle.rounding import U32, D, Noise

_SPARE = 2.0**8


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a sum, each (*shape): its exact ``value``, its ``count``, the sum of ``squares``.

    ``given`` is the variance of roundings that the lanes already have, in units of ``u^2 / 3``.
    """

    value: Tensor
    squares: Tensor
    given: Tensor
    count: Tensor


def terms_of(operand: Any, factor: float, like: Tensor) -> Terms:
    """The terms of one operand (lanes or a number) of a sum whose exact value is ``like`` (*shape)."""
    if not isinstance(operand, Lanes):
        value = torch.full_like(like, float(operand) * factor)
    else:
        # To the device too: a 0-d CPU tensor broadcasts with any.
        value = (operand.rounded[0].to(like) * factor).expand_as(like)
        if operand.chain is not None:
            squares, given, count = (part.to(like.device).expand_as(like) for part in operand.chain)
            return Terms(value, squares * factor**2, given * factor**2, count)
    return Terms(value, value.square(), torch.zeros_like(like), torch.ones_like(like))


def in_any_order(noise: Noise, total: Tensor, parts: tuple[Terms, Terms], unit: float) -> tuple[Tensor, Terms]:
    """``total`` (L, *shape), the sum of ``parts``, with the noise that its lanes lack for any order."""
    # A sequential sum in random order has variance ``n S^2 / 3 + n Q / 6`` in units of ``u^2 / 3`` (Noise.accumulated).
    value, (one, other) = total[0], parts
    squares, given, count = one.squares + other.squares, one.given + other.given, one.count + other.count
    # What the next step rounds; nothing if the sum is a number of the dtype.
    rounds = (given > 0) | (unit == U32) & (value.float().double() != value)
    given = given + torch.where(rounds, value.square(), 0.0)
    whole = Terms(value, squares, given, count)
    if not bool((count > 2).any()):
        return total, whole
    lacking = (count / 3 * value.square() + count / 6 * squares - given).clamp_min(0)
    there = (count > 2) & torch.isfinite(lacking) & ~_exact_in_any_order(squares * count, parts, unit)
    lacking = torch.where(there, lacking, 0.0)
    if not bool(lacking.any()):
        return total, whole
    deviation = lacking.sqrt().mul_(unit / math.sqrt(3))
    return noise.scattered(total, deviation), replace(whole, given=given + lacking)


def carried(name: str, operands: Sequence[Any], like: Tensor) -> Terms | None:
    """The chain of additions that ``where``, or ``mul`` by zeros and ones, passes on: ``where(begins, 0, sum) + x``.

    ``like`` (*shape) is the exact result; None where there is no chain.
    """
    chains = [isinstance(v, Lanes) and v.chain is not None for v in operands]
    if not any(chains):
        return None
    one, other = (terms_of(v, 1, like) for v in operands[-2:])
    if name == "mul":
        one, other = (one, other) if chains[0] else (other, one)
        chosen = other.value == 1
        if not bool((chosen | (other.value == 0)).all()):
            return None
        other = terms_of(0.0, 1, like)
    else:
        chosen = operands[0].rounded[0].to(like.device).expand_as(like)
    pairs = (one.squares, other.squares), (one.given, other.given), (one.count, other.count)
    return Terms(like, *(torch.where(chosen, *pair) for pair in pairs))


def noted(lanes: Lanes, chain: Terms | None) -> Lanes:
    """``lanes`` with this chain of additions."""
    return lanes if chain is None else replace(lanes, chain=torch.stack((chain.squares, chain.given, chain.count)))


def _exact_in_any_order(most: Tensor, parts: Sequence[Terms], unit: float) -> Tensor:
    """Where no order rounds: all terms are multiples of a unit of the largest partial sum, like small whole numbers."""
    # The unit is taken ``_SPARE`` times as large, against multiples by chance.
    _, exponent = torch.frexp(most.sqrt())
    step = torch.ldexp(torch.full_like(most, _SPARE * unit), exponent)
    exact = torch.ones_like(most, dtype=torch.bool)
    for part in parts:
        exact &= torch.remainder(part.value, step) == 0
    return exact


def chain_of(op: Op, call: Call, results: list[Any]) -> Terms | None:
    """The chain of additions that a result is, if any; adds to ``results`` the noise that a sum's lanes lack."""
    known, total = call.plan.operator, results[0]
    if not (known.sums or known.carries) or total.dtype != D or not total.numel():
        return None
    args, kwargs = call.on(lambda operand: operand.lanes)
    if known.carries:
        return carried(op.name, args, total[0])
    factor = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    scaled = 0 if op.name == "rsub" else 1
    one, other = (terms_of(v, factor if at == scaled else 1, total[0]) for at, v in enumerate(args[:2]))
    results[0], chain = in_any_order(op.noise, total, (one, other), op.unit)
    return chain
