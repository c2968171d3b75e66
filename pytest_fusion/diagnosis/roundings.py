"""Causes in digits: a rounding too many, or sums kept in too few bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fusion.case import numbers
from pytest_fusion.case.make import shape_of
from pytest_fusion.case.model import Case
from pytest_fusion.case.plan import cost
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Answer, Lab, Wrong, ordinary
from pytest_fusion.diagnosis.model import Found
from pytest_fusion.diagnosis.numerics import is_coarse, largest
from pytest_fusion.run.lanes import OutputLanes
from pytest_fusion.spec.inputs import TensorSpec, unwrap
from pytest_fusion.verdict import gradients

# What 16 bits round to is 2^-9 of the largest; a sum of many such roundings is still far from this.
_SMALL_ERROR = 2.0**-5
# Of rounding errors that add up, the sum grows with the length, by the fewest steps in a balanced tree: from 4 to 512
# elements by the root of 9/2, less where a dim admits less. Of one rounding it does not grow at all.
_GROWS, _GROWS_SHORT = 1.4, 1.2
_SHORT, _LONG = 4, (512, 256, 128, 64, 48, 32, 24, 16)
_SLICES = 48
_MOST_WORK = 1 << 16
_SEEDS, _GROWTH_SEEDS = 4, 3
# Another order changes a sum in few bits by about its own error, and one in float32 by less than a thousandth of that.
_OTHER_ORDER = 0.2


def rounding(lab: Lab) -> Found | None:
    """Wrong in 16 bits, right for the same numbers as float32: a rounding too many, or sums kept too short."""
    if not is_coarse(lab.base):
        return None
    seeds = lab.seeds(count=_SEEDS)
    if not all(lab.ask(lab.base.with_(seed=seed), edit=edits.upcast()).right for seed in seeds):
        lab.ruled_out.append("16-bit roundings: not right with the same numbers as float32")
        return None
    larger = lab.grown(lab.base, (9, 17, 12, 10))
    if not all(lab.ask(larger.with_(seed=seed), edit=edits.upcast()).right for seed in seeds[:2]):
        lab.ruled_out.append("16-bit roundings: larger cases are wrong as float32 too")
        return None
    evidence = [f"right with the same numbers as float32, for {len(seeds)} seeds"]
    grown = _growth(lab)
    if grown is None:
        return Found("cast-order", [*evidence, "no dim along which an error could add up"])
    told = f"the error of a row is {grown.ratio:.2g} times as large at {grown.dim}={grown.long} as at {_SHORT}"
    # Errors of single elements average out along a row, by the root of its length; one that a row shares does not.
    shared = grown.along and grown.ratio > 4 * (_SHORT / grown.long) ** 0.5
    if grown.ratio >= (_GROWS if grown.long >= 256 else _GROWS_SHORT) or shared:
        return Found("low-precision-accumulation", [*evidence, told])
    return Found("cast-order", [*evidence, f"it does not add up: {told}"])


@dataclass(frozen=True, slots=True)
class _Growth:
    """How the error grows with a dim, from a short one to ``long``; ``along``: the output has an axis of it."""

    dim: str
    long: int
    ratio: float
    along: bool


def _growth(lab: Lab) -> _Growth | None:
    """The dim along which the error grows most."""
    best: _Growth | None = None
    case = ordinary(lab.base, edits.free(lab.spec, lab.base))
    for name in lab.plain_sizes():
        short = _error(lab, _wide(lab, case, name, _SHORT), name)
        if short is None or short[0] <= 0:
            continue
        for length in _LONG:
            long = _error(lab, _wide(lab, case, name, length), name)
            if long is not None:
                found = _Growth(name, length, long[0] / short[0], along=long[1])
                if best is None or found.ratio > best.ratio:
                    best = found
                break
    return best


def _wide(lab: Lab, case: Case, name: str, length: int) -> Case | None:
    """The case at this length, with many slices beside it to average over."""
    sized = lab.resized({name: length}, case)
    if sized is None:
        return None
    for other in lab.plain_sizes():
        if other == name:
            continue
        for size in (_SLICES, 16, 4):
            widened = lab.resized({other: size, name: length}, sized)
            if widened is not None and cost(lab.spec, widened)[1] <= _MOST_WORK:
                sized = widened
                break
    return sized


def _error(lab: Lab, case: Case | None, dim: str) -> tuple[float, bool] | None:
    """The root mean square of the relative errors that rows share, and whether the output has rows along the dim."""
    answer = lab.ask(case)
    found = answer.probe
    if case is None or found is None or not found.got:
        return None
    name = str(lab.verdict.evidence.get("output", ""))
    name = name if name in found.got else next(iter(found.got))
    got, against = found.got[name].detach(), found.lanes.get(name)
    if against is None or not got.is_floating_point():
        return None
    right = (against.oracle if isinstance(against, OutputLanes) else against).double()
    if got.shape != right.shape or not got.numel():
        return None
    large = right.abs() > 0.25 * right.abs().mean()
    relative = torch.where(large & torch.isfinite(got), (got.double() - right) / right, 0.0).nan_to_num(0.0)
    axis = next((i for i, size in enumerate(got.shape) if size == case.sizes[dim]), None)
    if axis is not None:
        relative = relative.sum(axis) / large.sum(axis).clamp(min=1)
    return float(relative.square().mean().sqrt()), axis is not None


def digits(lab: Lab) -> Found | None:
    """Small whole numbers, whose sums are exact in few bits, are right; others are off by little."""
    names = edits.free(lab.spec, lab.base)
    wrong = lab.wrong_of(lab.ask(lab.base))
    if not names or wrong is None or not wrong.got.is_floating_point() or not bool(torch.isfinite(wrong.got).all()):
        return None
    scale = float(wrong.right.abs().max())
    inputs = largest(lab, lab.base, names)
    error = float((wrong.got.double() - wrong.right.double()).abs().max())
    if not error <= _SMALL_ERROR * max(scale, inputs):
        return None
    centred = edits.centred(names)
    if _mean_dominates(lab, names) and all(
        lab.ask(lab.base.with_(seed=seed), edit=centred).right for seed in lab.seeds(count=_SEEDS)
    ):
        evidence = ["right once each row's mean is taken away first: the digits are lost in a difference of large sums"]
        return Found("low-precision-accumulation", evidence)
    larger = lab.grown(lab.base, (4, 4, 4, 4))
    cases = [case.with_(seed=seed) for case in (lab.base, larger) for seed in lab.seeds(case, _SEEDS)]
    if not all(lab.ask(case, edit=edits.whole(names)).right for case in cases):
        lab.ruled_out.append("lost digits: small whole numbers are wrong too")
        return None
    evidence = [
        "right for small whole numbers, whose products and sums need few bits",
        f"for others off by at most {error / max(scale, inputs):.2g} of the largest",
    ]
    return Found("low-precision-accumulation", evidence)


def _mean_dominates(lab: Lab, names: list[str]) -> bool:
    found = lab.ask(lab.base).probe
    if found is None:
        return False
    for name in names:
        inner = unwrap(lab.spec.inputs[name])
        assert isinstance(inner, TensorSpec)
        if not shape_of(inner, lab.base.sizes):
            continue
        t = found.logical[name].double()
        if t.numel() and t.shape[-1] > 1 and bool((t.mean(-1).abs() > 4 * t.std(-1)).any()):
            return True
    return False
