"""The cause at the end of an axis: an access to one element too many."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.checks.evidence import DamagedMemory, WrongAccess
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.experiments import Answer, Lab


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


def _elsewhere_longer(lab: Lab, case: Case | None, name: str) -> Iterator[Case]:
    """The case with each other dim twice as long and one more."""
    for other, size in lab.plain_sizes().items():
        longer = lab.resized({other: 2 * size + 1}, case) if case is not None and other != name else None
        if longer is not None:
            yield longer
