"""The cause in another order of programs: stores that race where results may vary."""

from __future__ import annotations

import torch

from pytest_fusion import interpreter
from pytest_fusion.checks import probe as probing
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.experiments import Answer, Lab
from pytest_fusion.interpreter.control.executor import ordered


def racing(lab: Lab) -> Found | None:
    """A race was seen in the failing call, and in another order of programs and lanes other values are wrong.

    Where a spec lets results vary the race by itself is its business; a sum in any order is right all the same.
    """
    if lab.context.device.type != "cpu" or not interpreter.installed():
        return None
    for seed in lab.seeds():
        case = lab.base.with_(seed=seed)
        launched = lab.attempt(case)
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
