"""Finite numbers that stand for an infinity: what lies beyond them is wrong, and right moved to their other side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.checks import probe as probing
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Lab, Wrong

# Nearer to 0 the largest score is not far below anything: exp(-8) is still 2^-11 of what it is beside.
_FAR = -8.0
_TELLING = 2
# Of so many elements one has a say in the result: where others are masked out, half of them.
_ELEMENTS = 16
# By so much a result may change that does not depend on where its scores lie: they are rounded again there.
_SAME = 0.02

_OF_SMALLEST = ("above", "smallest", "negative", "plus")

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


def zero(lab: Lab) -> Found | None:
    """Wrong elements are 0 where the right ones lie below it, or all above, and right once one input is moved past 0.

    A largest value that is sought from 0 on, or beside zeros that pad a window. The right result moves as the input
    does, and one element of that has a say in several results, or in one of fewer: an activation has neither.
    """
    case = lab.grown()
    cases = lab.telling(case)
    answers = [lab.ask(each) for each in cases]
    wrongs = [lab.wrong_of(answer) for answer in answers]
    if len(cases) < _TELLING or any(wrong is None or not wrong.got.is_floating_point() for wrong in wrongs):
        return None
    ends = {_side(wrong) for wrong in wrongs if wrong is not None}
    if ends not in ({-1}, {1}):
        return None
    below = ends == {-1}
    for name, value in answers[0].probe.logical.items() if answers[0].probe is not None else ():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() < _TELLING:
            continue
        moved = edits.on([name], f"{'above' if below else 'below'} 0", _above if below else lambda t: -_above(-t))
        if not all(lab.ask(each, edit=moved).right for each in cases):
            continue
        if all(a.probe is not None and _moves_along(lab, a.probe.logical, name, moved) for a in answers):
            lie, what, sign, other = ("below", "largest", "positive", "minus") if below else _OF_SMALLEST
            told = f"every wrong element is 0 where the right one lies {lie} it, and right once {name} is {sign}"
            said = f"the {what} is sought from 0 on, or beside zeros, where {other} infinity belongs"
            return Found("wrong-neutral-element", [told, said])
    return None


def _side(wrong: Wrong) -> int:
    """Where the right values of elements that are wrongly 0 lie: -1 below, 1 above it, 0 where it is not so."""
    got, right = wrong.got[wrong.mask], wrong.right[wrong.mask]
    if not len(got) or bool((got != 0).any()):
        return 0
    return -1 if bool((right < 0).all()) else int(bool((right > 0).all()))


def _above(t: torch.Tensor) -> torch.Tensor:
    return t - t.min() + 1


def _moves_along(lab: Lab, logical: Logical, name: str, moved: Edit) -> bool:
    """Whether the right results move by as much as the input, and single elements have a say in many."""
    t, other = logical[name], moved.apply(dict(logical))
    by = float(other[name].flatten()[0].double() - t.flatten()[0].double())
    before, after = (probing.right_of(lab.context, each) for each in (logical, other))
    if before is None or after is None:
        return False
    floating = {n: output for n, output in before.items() if output.is_floating_point() and output.numel()}
    if not floating or not all(_moved(old, after[n], by) for n, old in floating.items()):
        return False
    far = float(t.double().abs().max()) + 1
    ends = [
        t.flatten().index_fill(0, torch.tensor([i], device=t.device), end)
        for i in range(min(t.numel(), _ELEMENTS))
        for end in (far, -far)
    ]
    return any(_has_say(lab, floating, {**logical, name: each.reshape(t.shape)}, t) for each in ends)


def _top(value: Any) -> float:
    """The largest of a floating input of more than one element."""
    usable = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    return float(value.max()) if usable else 0.0


def _of_differences(lab: Lab, logical: Logical, name: str, moved: Edit) -> bool:
    """Whether the reference's results stay, or move by as much as the input, and single elements have a say in many.

    An activation stays too, at 0, and each of its elements has a say in one.
    """
    t, by = logical[name], -_top(logical[name])
    before, after = (probing.right_of(lab.context, each) for each in (logical, moved.apply(dict(logical))))
    if before is None or after is None:
        return False
    floating = {n: output for n, output in before.items() if output.is_floating_point() and output.numel()}
    if not floating or not all(any(_moved(old, after[n], step) for step in (0.0, by)) for n, old in floating.items()):
        return False
    return any(_has_say(lab, floating, {**logical, name: _with_0(t, i)}, t) for i in range(min(t.numel(), _ELEMENTS)))


def _has_say(lab: Lab, before: Mapping[str, torch.Tensor], logical: Logical, t: torch.Tensor) -> bool:
    """Whether one element that was raised to 0 changes more than one of an output, or an output of fewer elements."""
    after = probing.right_of(lab.context, logical)
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
