"""The cause of wrong slices: right once all slices are equal, which separates places from shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.checks import probe as probing
from pytest_fusion.checks.gradients import blame, gradients
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Answer, Found, Lab, Wrong
from pytest_fusion.diagnosis.rules.indices import failing

_MOST_REPEATED, _MOST_NUMBERS = 8, 5
# A smaller share of the largest element is no change.
_CHANGED = 1e-3
# The most slices for the reference, and for single runs of the kernel.
_MOST_SLICES, _MOST_ALONE = 40, 6


def indifferent(lab: Lab) -> Found | None:
    """Far off, and right once all slices along an axis are equal: the choice of slices is wrong."""
    for case in failing(lab):
        answer = lab.attempt(case)
        wrong = lab.wrong_of(answer)
        if wrong is None or answer.probe is None or not wrong.far_off:
            continue
        for what, places in _axes(lab, case, answer.probe.logical):
            # If few slices are right, the choice is right, and the error accumulates over them.
            if what in case.sizes and not any(lab.mostly_wrong(lab.resized({what: n}, case)) for n in (2, 3)):
                continue
            edit = edits.repeated(places)
            if (
                lab.always_right(case, edit=edit)
                and _distinguishes(lab.attempt(case, edit=edit))
                and _any_is_as_good(lab, case, answer.probe.logical, places)
            ):
                others = _takes_others(lab, case, wrong, what, places)
                if others is False:
                    lab.ruled_out.append(f"which slice: slices of {what} have shares that no slice should have")
                    return None
                if others is None:
                    continue
                return Found(
                    "wrong-index-map",
                    [f"right once all slices of {what} are equal: others are taken, or in other shares"],
                )
    lab.ruled_out.append("which slice: wrong too with equal slices along any axis")
    return None


def _any_is_as_good(lab: Lab, case: Case, logical: Mapping[str, Any], places: list[tuple[str, int]]) -> bool:
    """Whether repeating another slice is right too; only a few are tried if all repeated tensors are floating.

    Repeating another index hides one with a wrongly treated value, or a maximum that begins with 0.
    """
    of_numbers = all(logical[name].is_floating_point() for name, _ in places)
    least = min(logical[name].shape[axis] for name, axis in places)
    most = min(least, _MOST_NUMBERS if of_numbers else _MOST_REPEATED)
    return all(lab.attempt(case, edit=edits.repeated(places, index)).right for index in range(1, most))


def _right_with(lab: Lab, case: Case, output: str, edit: Edit) -> torch.Tensor | None:
    if lab.check == gradients.NAME and output.startswith("d"):
        found = lab.attempt(case, edit=edit).probe
        pair = probing.gradient(found, output[1:]) if found is not None else None
        return pair[1] if pair is not None else None
    found = lab.attempt(case).probe
    outputs = probing.right_of(lab.context, edit.apply(dict(found.logical))) if found is not None else None
    return outputs.get(output) if outputs is not None else None


def _takes_others(lab: Lab, case: Case, wrong: Wrong, what: str, places: list[tuple[str, int]]) -> bool | None:
    """Whether slices of a sum have a part where they should have none, or another slice's part.

    Otherwise their shares are wrong, which equal slices hide if these add up to one, as a mean for a weighted one.
    ``None`` if nothing is summed, or no single slice is wrong.
    """
    if lab.check == gradients.NAME or wrong.got.dtype not in (torch.float32, torch.float64):
        return None
    # Of two shares each is the rest of the other.
    if case.sizes.get(what) == 2:
        case = next((more for n in (5, 4, 3) if (more := lab.resized({what: n}, case))), case)
    found = lab.attempt(case).probe
    fact = [
        _parts_of_others(lab, case, wrong.name, place, [other for other in places if other != place])
        for place in places
        if found is not None and found.logical[place[0]].is_floating_point()
        if 2 <= found.logical[place[0]].shape[place[1]] <= _MOST_SLICES
    ]
    return False if False in fact else True if True in fact else None


def _parts_of_others(
    lab: Lab, case: Case, output: str, place: tuple[str, int], others: list[tuple[str, int]]
) -> bool | None:
    found = lab.attempt(case).probe
    assert found is not None
    size = found.logical[place[0]].shape[place[1]]
    # An error with all others equal is in this tensor's places, whatever shares the others give them.
    equal = edits.repeated(others) if others and lab.mostly_wrong(case, edit=edits.repeated(others)) else None
    single = [edits.alone(*place, i) for i in range(size)]
    alone = [each if equal is None else edits.both(each, equal) for each in single]
    outputs = [_right_with(lab, case, output, edit) for edit in alone]
    whole = _right_with(lab, case, output, edits.repeated([place, *others] if equal is not None else [place]))
    rights = [t.double().flatten() for t in outputs if t is not None]
    if whole is None or len(rights) < size:
        return None
    right, added = torch.stack(rights), whole.double().flatten()
    if not bool(added.any()) or not torch.allclose(right.sum(0), added, 1e-4, 1e-5 * float(added.abs().max())):
        return None
    chosen = sorted({i * (size - 1) // (_MOST_ALONE - 1) for i in range(_MOST_ALONE)})
    answers = [lab.attempt(case, edit=alone[i]).probe for i in chosen]
    gots = [answer.got[output].double().flatten() for answer in answers if answer and output in answer.got]
    if len(gots) < len(chosen):
        return None
    got, some = torch.stack(gots), right[chosen]
    least = _CHANGED * float(right.abs().max())
    strays = ((got.abs() > least) & (some == 0)) | ((got == 0) & (some.abs() > least))
    return True if bool(strays.any()) else blame.rearranged(got, right, (size,), chosen)


def _axes(lab: Lab, case: Case, logical: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Axes to make equal: one dim at a time in all tensors, then single axes of tensors."""
    for dim, size in case.sizes.items():
        if not isinstance(size, int) or size < 2:
            continue
        if places := list(lab.axes_of(dim, case).items()):
            yield dim, places
    for name, value in logical.items():
        if name not in case.tensors and isinstance(value, torch.Tensor):
            yield from ((f"{name}, axis {axis}", [(name, axis)]) for axis, n in enumerate(value.shape) if n > 1)


def _distinguishes(answer: Answer) -> bool:
    """Whether the right result still has different elements."""
    if answer.probe is None:
        return False
    return any(t.numel() and bool((t != t.flatten()[0]).any()) for t in answer.probe.expected.values())
