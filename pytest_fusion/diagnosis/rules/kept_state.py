"""The cause of results that differ from call to call by a rule: something that the kernel keeps between calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pytest_fusion.checks import probe
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.experiments import Lab

# Calls in a row: chance repeats itself with a period of 2 for so long in 1 of 512 tries.
_CALLS = 12
_PERIODS = (2, 3, 4)
# What each call adds is rounded where it is added up, in 16 bits too.
_ALIKE = 0.02


def state(lab: Lab) -> Found | None:
    """Each call on the same inputs adds the same to the result, or the results come round after a few calls."""
    found = lab.ask(lab.base).probe
    if found is None or lab.check == gradients.NAME:
        return None
    name = lab.verdict.output
    calls = [got[name].detach().cpu() for got in probe.calls(lab.context, found, _CALLS) if name in got]
    if len(calls) < _CALLS or any(t.shape != calls[0].shape or t.dtype != calls[0].dtype for t in calls):
        return None
    kept = "something kept between calls, a workspace or a"
    if _adds_the_same(calls):
        said = f"each further call on the same inputs adds the same to {name}: {kept} sum, is not cleared"
        return Found("stale-memory", [said])
    period = next((p for p in _PERIODS if not any(map(repeat.differ, calls, calls[p:]))), None)
    if period is not None and any(map(repeat.differ, calls, calls[1:])):
        said = f"calls on the same inputs give {period} results of {name} in turn: {kept} buffer, is not made ready"
        return Found("stale-memory", [said])
    lab.ruled_out.append("kept state: what calls on the same inputs give follows no rule")
    return None


def _adds_the_same(calls: Sequence[torch.Tensor]) -> bool:
    wide = torch.stack([t.to(torch.complex128 if t.is_complex() else torch.float64) for t in calls])
    steps = wide.diff(dim=0)
    if not bool(torch.isfinite(torch.view_as_real(steps) if steps.is_complex() else steps).all()):
        return False
    size = float(steps.abs().max())
    return size > 0 and float((steps - steps.mean(0)).abs().max()) <= _ALIKE * size
