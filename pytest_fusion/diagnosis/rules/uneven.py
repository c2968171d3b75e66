"""Causes in how uneven integers are: one of them occurs too often, or they are of a kind that the kernel mishandles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.spec.dims import parse_expression
from pytest_fusion.spec.values import KINDS, ValueProfile


def capacity(lab: Lab) -> Found | None:
    """Wrong where one integer occurs more often than some number, and right up to it, however many there are."""
    for name, profile in _structured(lab):
        if profile.kind not in ("indices", "routing"):  # those of the other profiles are all different
            continue
        first = _roomy(lab, lab.base, name, profile)
        most = _most(lab, first, name, profile)
        # Two of a kind are no capacity, and a limit that grows with their number is a share.
        if most > 1 and _most(lab, _roomy(lab, first, name, profile), name, profile) == most:
            fact = f"wrong where one element of {name} occurs {most + 1} times or more, right up to {most}"
            return Found("capacity-overflow", [fact, "so it is among twice as many"])
        lab.ruled_out.append(f"capacity: no number of equal elements of {name} is the limit")
    return None


def kind(lab: Lab) -> Found | None:
    """Wrong for some kinds of integers and right for even ones, at larger sizes too."""
    for name, profile in _structured(lab):
        every = {kind: lab.base.with_tensor(name, regime=kind) for kind in profile.names}
        even, seen = profile.names[0], lab.base.tensors[name].regime
        if seen == even:
            continue
        if all(map(lab.always_right, (every[even], lab.grown(every[even])))) and lab.mostly_wrong(every[seen]):
            wrong = [kind for kind, case in every.items() if lab.mostly_wrong(case)]
            right = [kind for kind, case in every.items() if lab.always_right(case)]
            return Found("uneven-data", [f"wrong where {name} is {_any_of(wrong)}, right where it is {_any_of(right)}"])
        lab.ruled_out.append(f"uneven data: not right with all {even} {name}")
    return None


def _any_of(kinds: list[str]) -> str:
    return " or ".join(map(repr, kinds))


def _structured(lab: Lab) -> Iterator[tuple[str, ValueProfile]]:
    """The tensors of the case whose integers are of one of several kinds."""
    for name, inner in lab.spec.tensors.items():
        profile = inner.values
        if name not in lab.base.absent and isinstance(profile, ValueProfile) and profile.kind in KINDS:
            yield name, profile


def _roomy(lab: Lab, case: Case, name: str, profile: ValueProfile) -> Case:
    """The case with twice as many rows of this tensor, and a number for each element, as far as bounds allow."""
    shape = lab.spec.tensors[name].shape
    rows = shape.terms[0].text if shape.terms else ""
    for dim in (rows, str(dict(profile.params)["size"])):
        now = case.sizes.get(dim)
        if isinstance(now, int):
            least = 2 * now + 2 if dim == rows else math.prod(shape.evaluate(case.sizes)) + 1
            most = lab.spec.bound(dim).max
            case = lab.resized({dim: max(now, least if most is None else min(least, most))}, case) or case
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
