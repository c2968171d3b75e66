"""Checks that ask more of a case than its outputs, in the order in which they run.

Each is a module: ``NAME`` is the check's, ``missing(spec, device)`` says why it cannot run at all, ``due(trial)``
whether it runs on this case (what costs several calls runs on few), ``run(trial)`` concludes. A check sees only cases
that everything before it passed.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pytest_fusion.checks import compile_check
from pytest_fusion.checks import device_check as device
from pytest_fusion.checks.configs import configs
from pytest_fusion.checks.context import Context
from pytest_fusion.checks.gradients import autograd, gradients
from pytest_fusion.checks.honesty import honesty
from pytest_fusion.checks.invariance import invariance
from pytest_fusion.checks.launches import launches
from pytest_fusion.checks.randomness import distribution, randomness
from pytest_fusion.checks.repeat import repetition
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict
from pytest_fusion.spec.fusion_spec import FusionSpec


class Further(Protocol):
    """A module of the kind above."""

    NAME: str

    def missing(self, spec: FusionSpec, device: torch.device) -> str | None:
        """Why the check cannot run for this spec on this device; ``None`` if it can."""

    def due(self, trial: Trial) -> bool:
        """Whether it runs on this case."""

    def run(self, trial: Trial) -> Verdict:
        """What it found."""


CHECKS: tuple[Further, ...] = (
    *(randomness, distribution, repetition, invariance),
    *(gradients, configs, honesty, device, launches, compile_check),
)


def missing(spec: FusionSpec, device: torch.device) -> dict[str, str]:
    """Why each check of this kind that cannot run for a spec cannot, by name."""
    reasons = {check.NAME: check.missing(spec, device) for check in CHECKS}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def summaries(context: Context) -> list[Verdict]:
    """What the cases of a test add up to, for the checks to which that matters."""
    found = [
        configs.summary(context),
        launches.summary(context),
        compile_check.summary(context),
        device.summary(context),
    ]
    drawn = [*randomness.summary(context), *distribution.summary(context)]
    return [*(verdict for verdict in found if verdict is not None), *honesty.summary(context), *drawn]


def closes(spec: FusionSpec, device_: torch.device) -> bool:
    """Whether any check asks for one more case when all have passed."""
    return device.closes(spec, device_)


def notes(context: Context) -> list[str]:
    """What the checks saw that is no failure and that the report tells."""
    return autograd.notes(context)
