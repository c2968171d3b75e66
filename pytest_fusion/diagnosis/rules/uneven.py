"""Causes in how uneven integers are: one of them occurs too often, or they are of a kind that the kernel mishandles."""

from __future__ import annotations

import math
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Found, Lab
from pytest_fusion.spec.dims import parse_expression
from pytest_fusion.spec.values import KINDS, ValueProfile

# So that each of several sequences has several elements, and one of them may have far more than the average.
_SIZES = (40, 13, 5, 4)


def capacity(lab: Lab) -> Found | None:
    """Wrong where one integer occurs more often than some number, and right up to it, however many there are."""
    for name, profile in structured(lab):
        if profile.kind not in ("indices", "routing"):  # those of the other profiles are all different
            continue
        first = roomy(lab, lab.base, name, profile)
        most = _most(lab, first, name, profile)
        # Two of a kind are no capacity, and a limit that grows with their number is a share.
        if most > 1 and _most(lab, roomy(lab, first, name, profile), name, profile) == most:
            fact = f"wrong where one element of {name} occurs {most + 1} times or more, right up to {most}"
            return Found("capacity-overflow", [fact, "so it is among twice as many"])
        lab.ruled_out.append(f"capacity: no number of equal elements of {name} is the limit")
    return None


def kind(lab: Lab) -> Found | None:
    """Wrong for some kinds of integers and right for even ones, in a larger case too."""
    for name, profile in structured(lab):
        larger = lab.grown(None, _SIZES)
        # In the larger case no even sequence may be as long as the one that fails in the smallest.
        even = [
            case.with_tensor(name, regime=profile.names[0]) for case in (larger, roomy(lab, lab.base, name, profile))
        ]
        for case in (lab.base, larger) if all(map(lab.always_right, even)) else ():
            if text := by_kind(lab, case, name, profile, even=True):
                return Found("uneven-data", [text])
        lab.ruled_out.append(f"uneven data: no kind of {name} is wrong where even ones are right")
    return None


def by_kind(lab: Lab, case: Case, name: str, profile: ValueProfile, *, even: bool) -> str:
    """Which kinds of integers are wrong and which right; empty without both, and where ``even`` ones must be right."""
    every = {kind: case.with_tensor(name, regime=kind) for kind in profile.names}
    right = [repr(kind) for kind, case in every.items() if lab.always_right(case)]
    wrong = [repr(kind) for kind, case in every.items() if lab.mostly_wrong(case)]
    if not wrong or not right or (even and repr(profile.names[0]) not in right):
        return ""
    return f"wrong where {name} is {' or '.join(wrong)}, right where it is {' or '.join(right)}"


def structured(lab: Lab) -> list[tuple[str, ValueProfile]]:
    """The tensors of the case whose integers are of one of several kinds."""
    own = {name: inner.values for name, inner in lab.spec.tensors.items() if name not in lab.base.absent}
    return [(name, one) for name, one in own.items() if isinstance(one, ValueProfile) and one.kind in KINDS]


def roomy(lab: Lab, case: Case, name: str, profile: ValueProfile) -> Case:
    """The case with twice as many rows of this tensor, and a number for each element, as far as bounds allow."""
    shape = lab.spec.tensors[name].shape
    rows = shape.terms[0].text if shape.terms else ""
    for dim in (rows, str(dict(profile.params)["size"])):
        now = case.sizes.get(dim)
        if isinstance(now, int):
            least = 2 * now + 2 if dim == rows else math.prod(shape.evaluate(case.sizes)) + 1
            case = lab.resized({dim: max(now, min(least, lab.spec.bound(dim).max or least))}, case) or case
    return case


def _most(lab: Lab, case: Case, name: str, profile: ValueProfile) -> int:
    """How often one integer may occur: with one more the case is wrong; 0 if there is no limit."""
    shape = lab.spec.tensors[name].shape.evaluate(case.sizes)
    size = parse_expression(str(dict(profile.params)["size"])).evaluate(case.sizes)[0]
    width = shape[-1] if profile.kind == "routing" else 1  # the experts of one row are different
    low, high = -(-math.prod(shape) // max(size, 1)), math.prod(shape) // max(width, 1)
    if size <= width or low >= high:
        return 0
    edit = {times: _crowded(name, times, size, width) for times in range(low, high + 1)}
    if not lab.attempt(case, edit=edit[low]).right or not lab.attempt(case, edit=edit[high]).wrong:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if lab.attempt(case, edit=edit[middle]).wrong else (middle, high)
    return low if lab.always_right(case, edit=edit[low]) and lab.mostly_wrong(case, edit=edit[high]) else 0


def _crowded(name: str, times: int, size: int, width: int) -> Edit:
    """The most frequent element so many times, in the first places of rows of this width, and all others in turn."""

    def apply(logical: dict[str, Any]) -> dict[str, Any]:
        flat = logical[name].flatten()
        place, one = torch.arange(flat.numel(), device=flat.device), flat.mode().values
        others = place % (size - 1)
        others = others + (others >= one)
        rows = torch.arange(times, device=flat.device) * (flat.numel() // width) // times
        others[rows * width] = one.to(others.dtype)
        return {**logical, name: others.to(flat.dtype).reshape(logical[name].shape)}

    return Edit(f"one element {times} times of {name}", apply)
