"""Causes at the ends of an axis: one index too few or too many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.sizes import count
from pytest_fusion.checks.evidence import DamagedMemory, WrongAccess
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.experiments import Answer, Lab
from pytest_fusion.spec.inputs import may_index

_SEEDS = 4


def last_index(lab: Lab) -> Found | None:
    """Only the first or the last index along an axis is wrong, at every size."""
    for name in lab.lengths():
        places: set[str] = set()
        cases = [lab.resized({name: n}, lab.grown()) for n in (5, 8, 13)]
        if any(case is None for case in cases):
            continue
        for case in cases:
            assert case is not None
            places.add(_end(lab, lab.attempt(case), count(case.sizes[name])))
            if len(places) > 1 or "" in places:
                break
        else:
            place = places.pop()
            if all(lab.mostly_wrong(case) and _always_at(lab, case, name, place) for case in cases[1:] if case):
                if not all(_always_at(lab, case, name, place) for case in _elsewhere_longer(lab, cases[1], name)):
                    lab.ruled_out.append(
                        f"off by one: not only the {place} index of {name} where another dim is longer"
                    )
                    continue
                if _set_apart(lab, cases):
                    lab.ruled_out.append(
                        f"off by one: the reference gives 0 for the {place} index of {name}, a value too"
                    )
                    return None
                return Found("off-by-one-mask", [f"at {name}=5, 8 and 13 only the {place} index is wrong"])
    return None


def _elsewhere_longer(lab: Lab, case: Case | None, name: str) -> Iterator[Case]:
    """The case with each other dim twice as long and one more.

    Where only the last row reaches what another dim's last tile holds, as below a causal mask, more rows do then.
    """
    for other, size in lab.plain_sizes().items():
        longer = lab.resized({other: 2 * size + 1}, case) if case is not None and other != name else None
        if longer is not None:
            yield longer


def _always_at(lab: Lab, case: Case, name: str, place: str) -> bool:
    """Whether other seeds are wrong there alone as well: what few rows show, the first may show by its values."""
    answers = [lab.attempt(case.with_(seed=seed)) for seed in lab.seeds(case, _SEEDS)]
    return all(_end(lab, answer, count(case.sizes[name])) == place for answer in answers if answer.wrong)


def _set_apart(lab: Lab, cases: Iterable[Case | None]) -> bool:
    """Whether indices are values too, and the one at this end is set apart by the reference, which gives 0 there.

    So it is with the index that pads: what forgets it errs in no mask's bound.
    """
    if not any(map(may_index, lab.spec.inputs.values())):
        return False
    wrongs = [wrong for case in cases if case is not None and (wrong := lab.wrong_of(lab.attempt(case)))]
    return bool(wrongs) and all(
        not bool((wrong.right[wrong.mask] != 0).any()) and bool((wrong.right != 0).any()) for wrong in wrongs
    )


def _end(lab: Lab, answer: Answer, size: int) -> str:
    """Whether all wrong elements have the last, or the first, index along an axis of this size."""
    found = answer.probe
    if found is None or not answer.wrong:
        return ""
    wrong = lab.wrong_of(answer)
    masks = [found.unwritten[name] for name in found.unwritten] or ([wrong.mask] if wrong is not None else [])
    for mask in masks:
        for axis in (axis for axis, length in enumerate(mask.shape) if length == size):
            if not bool(mask.narrow(axis, 0, size - 1).any()):
                return "last"
            if not bool(mask.narrow(axis, 1, size - 1).any()):
                return "first"
    return ""


def one_past(lab: Lab) -> Found | None:
    """An access reaches exactly one element past a tensor, at every size."""
    for name in lab.lengths():
        cases = [lab.resized({name: n}) for n in (5, 8, 12)]
        if any(case is None for case in cases) or not all(_is_one_past(lab.attempt(case)) for case in cases):
            continue
        # A tensor that does not follow the dim would say the same thing three times.
        if len({_extent(lab.attempt(case)) for case in cases}) < len(cases):
            continue
        # Rows one element too far apart end one past the tensor where there are two of them, and three of four.
        if any(_is_further_past(lab.attempt(longer), 8) for longer in _elsewhere_longer(lab, cases[1], name)):
            lab.ruled_out.append(
                f"off by one: one element past the end of {name}, and more where another dim is longer"
            )
            continue
        return Found("off-by-one-mask", [f"exactly one element past the end at {name}=5, 8 and 12"])
    return None


def _extent(answer: Answer) -> str:
    failure = answer.probe.failure if answer.probe is not None else None
    if failure is None or answer.probe is None:
        return ""
    if isinstance(failure.evidence, WrongAccess):
        return str(failure.evidence.seen.shape)
    return str({name: t.shape for name, t in answer.probe.got.items()})


def _is_one_past(answer: Answer) -> bool:
    failure = answer.probe.failure if answer.probe is not None else None
    if failure is None or failure.check != "bounds":
        return False
    evidence = failure.evidence
    if isinstance(evidence, WrongAccess):
        return evidence.seen.count == 1 and evidence.seen.offset == math.prod(evidence.seen.shape)
    return isinstance(evidence, DamagedMemory) and evidence.zone == "after" and evidence.farthest == 1


def _is_further_past(answer: Answer, size: int) -> bool:
    """Whether another access than one of one element past the end fails, or of one slice of a dim of this size."""
    failure = answer.probe.failure if answer.probe is not None else None
    if answer.probe is None or failure is None or failure.check != "bounds" or _is_one_past(answer):
        return False
    evidence = failure.evidence
    if isinstance(evidence, WrongAccess):
        whole = math.prod(evidence.seen.shape)
        return evidence.seen.offset != whole or evidence.seen.count * size != whole
    tensors = (*answer.probe.logical.values(), *answer.probe.got.values())
    wholes = {t.numel() for t in tensors if isinstance(t, torch.Tensor)}
    if not isinstance(evidence, DamagedMemory) or evidence.zone != "after":
        return True
    return evidence.farthest * size not in wholes
