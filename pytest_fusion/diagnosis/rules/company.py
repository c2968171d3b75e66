"""Causes in who else is there: stores that race where results may vary, slices that go another way among more."""

from __future__ import annotations

import torch

from pytest_fusion import interpreter
from pytest_fusion.checks import probe as probing
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.experiments import Answer, Lab
from pytest_fusion.diagnosis.rules import indices
from pytest_fusion.interpreter.control.executor import ordered

_SEEDS, _AGREEING = 6, 3
# A row that is wrong beside one other is mixed up with it; a way that is taken from some number on needs more.
_FEWEST = 3
_MOST_SLICES = 64


def racing(lab: Lab) -> Found | None:
    """A race was seen in the failing call, and in another order of programs and lanes other values are wrong.

    Where a spec lets results vary the race by itself is its business; a sum in any order is right all the same.
    """
    if lab.context.device.type != "cpu" or not interpreter.installed():
        return None
    for seed in lab.seeds():
        case = lab.base.with_(seed=seed)
        launched = lab.ask(case)
        if not launched.wrong:
            continue
        got, races = _output(lab, launched)
        with ordered("reversed"):
            turned, _ = _output(lab, lab.once(case))
        if not races or got is None or turned is None or got.shape != turned.shape:
            return None
        if not bool(repeat.differing(got, turned).any()):
            continue
        last = "the values that are wrong are others when the programs, or the lanes of one, run in another order"
        return Found(str(races[0].kind), [str(races[0]).partition(". Likely")[0], last])
    return None


def _output(lab: Lab, answer: Answer) -> tuple[torch.Tensor | None, list[probing.Race]]:
    """The failing output of a call or of a backward, and the races seen in it."""
    found = answer.probe
    if found is None:
        return None, []
    name = lab.verdict.output
    if lab.check == gradients.NAME:
        return probing.raced(found, name.removeprefix("d"))
    return found.got.get(name), found.races


def way(lab: Lab) -> Found | None:
    """The first slices along a dim are right by themselves and wrong with one more, for the same values."""
    if lab.check == gradients.NAME:
        return None
    for dim, size in lab.plain_sizes().items():
        if not _FEWEST <= size <= _MOST_SLICES or (cut := indices.slices_of(lab, lab.base, dim)) is None:
            continue
        agreeing = 0
        for seed in lab.seeds(count=_SEEDS):
            case = lab.base.with_(seed=seed)
            whole = lab.ask(case)
            wrong = lab.wrong_of(whole) if whole.wrong else None
            if wrong is None:
                continue
            axis = indices.axis_of(wrong.mask, size)
            if axis is None or not bool(wrong.mask.narrow(axis, 0, size - 1).any()):
                break
            first = lab.ask(case, edit=cut(range(size - 1)))
            if not first.right or not indices.independent(lab, whole, first, range(size - 1), size):
                break
            # Of 15 the same error may be allowed, or no average be taken, where of 16 it is not, or there is one.
            if not indices.changed_by_others(wrong, first, range(size - 1), size):
                break
            agreeing += 1
        if agreeing >= _AGREEING:
            told = f"the first {size - 1} slices of {dim} are right by themselves, and wrong among {size}"
            return Found("batch-variant", [f"{told}, with the same values, for {agreeing} seeds"])
    return None
