"""Causes in how inputs are loaded: rounded to 16 bits first, or with the top bit of integers taken for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.spec.inputs import TensorSpec, unwrap
from pytest_fusion.spec.values import ValueProfile

# float16 has the 10 bits that tf32 keeps too; what is right of these is not asked whether bfloat16's 7 do.
_COARSE = (torch.float16, torch.bfloat16)
_TELLING = 2
_BITS = 17


def rounded(lab: Lab) -> Found | None:
    """Right once float32 inputs hold numbers of 16 bits, of other values and sizes too."""
    larger = lab.grown(lab.base, (4, 5, 3, 6))
    cases = [case for case in (lab.base, larger) for case in lab.telling(case)]
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
                if not any(lab.ask(case, edit=_of_some(chosen)).wrong for case in cases):
                    continue
                said = f"{' and '.join(chosen)} hold numbers of {str(dtype).removeprefix('torch.')}"
                return Found("cast-order", [f"right once {said}, which rounding them so changes nothing of"])
    if names:
        lab.ruled_out.append("rounded inputs: wrong with numbers of 16 bits too")
    return None


def _of(names: Sequence[str], dtype: torch.dtype) -> Edit:
    """Numbers of a smaller dtype, as far as it reaches."""
    limit = float(torch.finfo(dtype).max)
    return edits.on(names, f"{dtype}", lambda t: torch.where(t.abs() < limit, t.to(dtype).to(t.dtype), t))


def _of_some(names: Sequence[str]) -> Edit:
    """Numbers of more bits than 16-bit dtypes have, and of fewer than float32: those are rounded as others are.

    What is wrong next to a power of two alone, such as a logarithm, is right of them too.
    """
    step = 2.0**_BITS

    def function(t: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(t)
        return torch.where(torch.isfinite(t), torch.ldexp((mantissa * step).round() / step, exponent), t)

    return edits.on(names, f"{_BITS} bits", function)


def _changes(lab: Lab, case: Case, edit: Edit, names: Sequence[str]) -> bool:
    """Whether the numbers are others then, and none is lost."""
    found = lab.ask(case).probe
    if found is None:
        return False
    after = edit.apply(dict(found.logical))
    pairs = [(found.logical[name].double(), after[name].double()) for name in names]
    lost = any(bool(((a == 0) != (b == 0)).any()) for a, b in pairs)
    return not lost and any(bool((a != b).any()) for a, b in pairs)


def signed(lab: Lab) -> Found | None:
    """Right once the top bit of an integer input is 0: a sign is taken from bits that have none, or lost of those."""
    names = [name for name in lab.base.tensors if name not in lab.base.absent and _uses_top_bit(lab, name)]
    cases = [case for case in (lab.base, lab.grown()) for case in lab.telling(case)] if names else []
    if len(cases) < _TELLING:
        return None
    for name in names:
        top, next_to_it = (_without_bit(name, place) for place in (1, 2))
        cured = all(lab.ask(case, edit=top).right for case in cases) and lab.always_right(cases[-1], edit=top)
        if cured and any(lab.ask(case, edit=next_to_it).wrong for case in cases):
            told = f"right once the top bit of each number of {name} is 0, wrong with the next bit 0 instead"
            return Found("overflow", [f"{told}: it is taken for a sign, or a sign is lost"])
    lab.ruled_out.append(f"a sign: wrong without the top bit of {', '.join(names)} too")
    return None


def _uses_top_bit(lab: Lab, name: str) -> bool:
    """Whether a spec asks for integers of all bits, as of packed words."""
    inner = unwrap(lab.spec.inputs[name])
    if not isinstance(inner, TensorSpec) or not isinstance(inner.values, ValueProfile):
        return False
    dtype = getattr(torch, lab.base.tensors[name].dtype)
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return False
    ends, params = torch.iinfo(dtype), dict(inner.values.params)
    if inner.values.kind == "integers":
        return params["low"] == ends.min and params["high"] == ends.max
    return inner.values.kind == "default" and dtype is torch.uint8


def _without_bit(name: str, place: int) -> Edit:
    """Integers with one of their bits 0, the top one or that next to it."""

    def apply(logical: dict[str, Any]) -> dict[str, Any]:
        t = logical[name]
        bits = torch.iinfo(t.dtype).bits
        kept = ~(1 << (bits - place)) if place > 1 or t.dtype is torch.uint8 else (1 << (bits - 1)) - 1
        return {**logical, name: t & (kept & 0xFF if t.dtype is torch.uint8 else kept)}

    return Edit(f"bit {place} from the top 0 in {name}", apply)
