"""Finite numbers that stand for minus infinity: scores far below them are wrong, and right moved up to 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_fusion.case.model import Case
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.diagnosis.model import Found
from pytest_fusion.verdict import probe as probing

# Nearer to 0 the largest score is not far below anything: exp(-8) is still 2^-11 of what it is beside.
_FAR = -8.0
_TELLING = 2
# Of so many elements one has a say in the result: where others are masked out, half of them.
_ELEMENTS = 16
# By so much a result may change that does not depend on where its scores lie: they are rounded again there.
_SAME = 0.02

Logical = Mapping[str, Any]


def lowest(lab: Lab) -> Found | None:
    """Right once one input is moved up until its largest is 0, where the right result is the same or moves as much."""
    for case in {each.key(): each for each in (lab.base, lab.grown())}.values():
        if (found := _lowest(lab, lab.telling(case))) is not None:
            return found
    return None


def _lowest(lab: Lab, cases: list[Case]) -> Found | None:
    """The same, of the cases of several seeds."""
    inputs = [answer.probe.logical for case in cases if (answer := lab.ask(case)).probe is not None]
    if len(cases) < _TELLING or len(inputs) < len(cases):
        return None
    for name in inputs[0]:
        tops = [_top(logical.get(name)) for logical in inputs]
        moved = edits.on([name], "largest 0", lambda t: t - t.max())
        if any(top >= _FAR for top in tops) or not all(_of_differences(lab, each, name, moved) for each in inputs):
            continue
        if all(lab.ask(case, edit=moved).right for case in cases):
            told = f"right once {name}, whose largest is {tops[0]:.4g}, is moved up until that is 0"
            said = "the right result asks for differences alone: a finite number stands for minus infinity"
            return Found("wrong-neutral-element", [told, said])
        lab.ruled_out.append(f"a finite number for minus infinity: wrong with {name} moved up to 0 too")
    return None


def _top(value: Any) -> float:
    """The largest of a floating input of more than one element."""
    usable = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    return float(value.max()) if usable else 0.0


def _of_differences(lab: Lab, logical: Logical, name: str, moved: Edit) -> bool:
    """Whether the reference's results stay, or move by as much as the input, and single elements have a say in many.

    An activation stays too, at 0, and each of its elements has a say in one.
    """
    t, by = logical[name], -_top(logical[name])
    before, after = (probing.right_of(lab.bench, each) for each in (logical, moved.apply(dict(logical))))
    if before is None or after is None:
        return False
    floating = {n: output for n, output in before.items() if output.is_floating_point() and output.numel()}
    if not floating or not all(any(_moved(old, after[n], step) for step in (0.0, by)) for n, old in floating.items()):
        return False
    return any(_has_say(lab, floating, {**logical, name: _with_0(t, i)}, t) for i in range(min(t.numel(), _ELEMENTS)))


def _has_say(lab: Lab, before: Mapping[str, torch.Tensor], logical: Logical, t: torch.Tensor) -> bool:
    """Whether one element that was raised to 0 changes more than one of an output, or an output of fewer elements."""
    after = probing.right_of(lab.bench, logical)
    return after is not None and all(
        (changed := _changed(output, after[n])) > 1 or (changed == 1 and output.numel() < t.numel())
        for n, output in before.items()
    )


def _with_0(t: torch.Tensor, index: int) -> torch.Tensor:
    return t.flatten().index_fill(0, torch.tensor([index], device=t.device), 0.0).reshape(t.shape)


def _moved(before: torch.Tensor, after: torch.Tensor, by: float) -> bool:
    return torch.allclose(after.double() - by, before.double(), _SAME, _SAME)


def _changed(before: torch.Tensor, after: torch.Tensor) -> int:
    return int((~torch.isclose(after.double(), before.double(), _SAME, _SAME)).sum())
