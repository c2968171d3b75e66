"""Causes in zeros: what is wrong where an input holds 0, and right where it holds a small number instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.oracle.rounding import GRIDS

# Of the largest element: no subnormal, nothing that an epsilon takes over, and in range of most values.
_SMALL = 2.0**-6
_TELLING = 2


def zeros(lab: Lab) -> Found | None:
    """Wrong wherever an input holds 0, for several seeds, and right with small numbers in place of zeros."""
    for case in {each.key(): each for each in (lab.base, lab.grown())}.values():
        # What fails without a 0, once, is no matter of zeros: of larger cases some may hold one beside what is wrong.
        if not _holding(lab, case) and lab.attempt(case).wrong:
            return None
        cases = lab.telling(case)
        holding = [_holding(lab, each) for each in cases]
        names = [name for name in (holding[0] if holding else ()) if all(name in each for each in holding)]
        if len(cases) < _TELLING or not names:
            continue
        if not all(lab.attempt(each, edit=edits.larger(names)).wrong for each in cases):
            continue
        made = _made(lab, cases[0])
        for chosen in (*([name] for name in names), names):
            text = " and ".join(chosen)
            if _cured(lab, cases, edits.on(chosen, "0 for -0", lambda t: t + 0.0)):
                return Found("zero-value", [f"right once each -0 of {text} is 0", *made])
            if _cured(lab, cases, small_for_zeros(chosen)):
                fact = f"right with small numbers in place of the zeros of {text}, wrong with all others larger"
                return Found("zero-value", [fact, *made])
        lab.ruled_out.append(f"zeros of {', '.join(names)}: wrong with small numbers in their places too")
        return None
    return None


def small_for_zeros(names: Sequence[str]) -> Edit:
    """A small positive number in place of each 0, of either sign."""

    def function(t: torch.Tensor) -> torch.Tensor:
        largest = float(t.abs().nan_to_num(0, 0, 0).max()) if t.numel() else 0.0
        return torch.where(t == 0, _SMALL * (largest or 1.0), t)

    return edits.on(names, "small numbers for zeros", function)


def _holding(lab: Lab, case: Case) -> list[str]:
    """The floating inputs, derived ones too, that hold a 0."""
    found = lab.attempt(case).probe
    return [
        name
        for name, t in (found.logical.items() if found is not None else ())
        if isinstance(t, torch.Tensor) and t.dtype in GRIDS
        if bool((t == 0).any())
    ]


def _cured(lab: Lab, cases: Sequence[Case], edit: Edit) -> bool:
    return all(lab.attempt(case, edit=edit).right for case in cases)


def _made(lab: Lab, case: Case) -> list[str]:
    """What the kernel makes of zeros, where that is no number."""
    wrong = lab.wrong_of(lab.attempt(case))
    if wrong is None or not wrong.got.is_floating_point():
        return []
    lost = int((~torch.isfinite(wrong.got) & torch.isfinite(wrong.right) & wrong.mask).sum())
    return [f"{wrong.name}: {lost} element(s) NaN or infinite where the right ones are finite"] if lost else []
