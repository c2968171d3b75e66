"""Evidence where no rule knows the cause: the input, or the one element of it, that the failure needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Found, Lab
from pytest_fusion.diagnosis.rules import uneven
from pytest_fusion.diagnosis.rules.epsilons import telling
from pytest_fusion.spec.inputs import ConstantSpec

# More elements than that are not changed one by one.
_MOST_ELEMENTS = 16


def curing(lab: Lab) -> Found | None:
    """Right for all seeds and sizes once an input is neutral; else right once one element is. The cause stays open."""
    for name, profile in uneven.structured(lab):
        if text := uneven.by_kind(lab, uneven.roomy(lab, lab.base, name, profile), name, profile, even=False):
            return Found("unexplained", [text])
    larger = lab.grown()
    for edit, text in _neutral(lab):
        if all(lab.always_right(case, edit=edit) for case in (lab.base, larger)) and telling(lab, larger, edit):
            return Found("unexplained", [f"wrong only where {text}"])
    found = lab.attempt(lab.base).probe
    elements = _elements(lab, found.logical) if found is not None else ()
    cured = [text for edit, text in elements if lab.attempt(lab.base, edit=edit).right]
    return Found("unexplained", cured) if len(cured) == 1 else None


def _neutral(lab: Lab) -> Iterator[tuple[Edit, str]]:
    """Drawn numbers and flags, and constants that are no sizes, at 0 or 1; tensors of one number, or of magnitudes."""
    constants = {name: inner.value for name, inner in lab.spec.inputs.items() if isinstance(inner, ConstantSpec)}
    for name, value in (constants | dict(lab.base.drawn)).items():
        if isinstance(value, float) or (isinstance(value, int) and name in lab.base.drawn):
            for neutral in {0, 1} - {value}:
                yield edits.number(name, type(value)(neutral)), f"{name} is not {neutral}"
    for name in edits.scalable(lab.spec, lab.base):
        yield edits.on([name], "0 instead", torch.zeros_like), f"{name} is not 0"
    for name in edits.free(lab.spec, lab.base):
        yield edits.on([name], "1 instead", torch.ones_like), f"{name} is not 1"
        yield edits.on([name], "magnitudes", torch.abs), f"{name} has elements below 0"
        yield edits.on([name], "0.5 instead", lambda t: torch.full_like(t, 0.5)), f"the elements of {name} differ"


def _elements(lab: Lab, logical: Mapping[str, Any]) -> Iterator[tuple[Edit, str]]:
    """Single elements at 0, of tensors that have few."""
    for name in edits.free(lab.spec, lab.base):
        values = logical[name].flatten()
        for place in range(len(values) if 1 < len(values) <= _MOST_ELEMENTS else 0):
            spared = torch.arange(len(values), device=values.device).reshape(logical[name].shape) != place
            text = f"right once element {place} of {name} is 0 in place of {float(values[place]):g}"
            yield edits.on([name], f"0 at {place}", spared.__mul__), text
