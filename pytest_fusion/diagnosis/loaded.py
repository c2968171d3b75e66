"""Causes in how inputs are loaded: rounded to 16 bits first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pytest_fusion.case.model import Case
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.diagnosis.model import Found

# float16 has the 10 bits that tf32 keeps too; what is right of these is not asked whether bfloat16's 7 do.
_COARSE = (torch.float16, torch.bfloat16)
_SEEDS, _MANY_SEEDS, _TELLING = 4, 16, 2


def rounded(lab: Lab) -> Found | None:
    """Right once float32 inputs hold numbers of 16 bits, of other values and sizes too."""
    larger = lab.grown(lab.base, (4, 5, 3, 6))
    cases = [case for case in (lab.base, larger) for case in _telling(lab, case)]
    if len(cases) < _TELLING:
        return None
    found = lab.ask(cases[0]).probe
    tensors = found.logical if found is not None else {}
    names = [n for n, t in tensors.items() if isinstance(t, torch.Tensor) and t.dtype is torch.float32 and t.numel()]
    for dtype in _COARSE if names else ():
        for chosen in dict.fromkeys((*((name,) for name in names), tuple(names))):
            edit = _of(chosen, dtype)
            if _changes(lab, cases[0], edit, chosen) and all(lab.ask(case, edit=edit).right for case in cases):
                if not lab.always_right(larger, edit=edit):
                    continue
                said = f"{' and '.join(chosen)} hold numbers of {str(dtype).removeprefix('torch.')}"
                return Found("cast-order", [f"right once {said}, which rounding them so changes nothing of"])
    if names:
        lab.ruled_out.append("rounded inputs: wrong with numbers of 16 bits too")
    return None


def _telling(lab: Lab, case: Case) -> list[Case]:
    """The case at a few seeds for which it is wrong."""
    seeded = [case.with_(seed=seed) for seed in lab.seeds(case, _MANY_SEEDS)]
    return [each for each in seeded if lab.ask(each).wrong][:_SEEDS]


def _of(names: Sequence[str], dtype: torch.dtype) -> Edit:
    """Numbers of a smaller dtype, as far as it reaches."""
    limit = float(torch.finfo(dtype).max)
    return edits.on(names, f"{dtype}", lambda t: torch.where(t.abs() < limit, t.to(dtype).to(t.dtype), t))


def _changes(lab: Lab, case: Case, edit: Edit, names: Sequence[str]) -> bool:
    """Whether the numbers are others then, and none is lost."""
    found = lab.ask(case).probe
    if found is None:
        return False
    after = edit.apply(dict(found.logical))
    pairs = [(found.logical[name].double(), after[name].double()) for name in names]
    lost = any(bool(((a == 0) != (b == 0)).any()) for a, b in pairs)
    return not lost and any(bool((a != b).any()) for a, b in pairs)
