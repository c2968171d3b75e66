"""All checks, in the order of judging and reporting: an earlier finding explains a later one."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pytest_fusion.checks import compile_check, core_checks, device_check
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.configs import configs
from pytest_fusion.checks.context import Context
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.honesty import honesty
from pytest_fusion.checks.invariance import invariance
from pytest_fusion.checks.kernels import refused
from pytest_fusion.checks.launches import launches
from pytest_fusion.checks.malformed import malformed
from pytest_fusion.checks.randomness import distribution, randomness
from pytest_fusion.checks.verdict import Verdict
from pytest_fusion.errors import FusionError
from pytest_fusion.spec.fusion_spec import FusionSpec

OURS: tuple[Check, ...] = (
    *(refused.CHECK, core_checks.ERROR, core_checks.CRASH, core_checks.STRUCTURE),
    *(core_checks.INPUTS, core_checks.BOUNDS, core_checks.UNWRITTEN),
    *(randomness.CHECK, distribution.CHECK, core_checks.REPEAT, core_checks.VALUES),
    *(invariance.CHECK, gradients.CHECK, configs.CHECK, honesty.CHECK),
    *(device_check.CHECK, launches.CHECK, compile_check.CHECK, malformed.CHECK, core_checks.VACUITY),
)
_added: list[Check] = []


def checks() -> tuple[Check, ...]:
    """The package's checks, then those of plugins."""
    return (*OURS, *_added)


def extend(added: Iterable[Check]) -> None:
    """Set the checks of plugins. Raises ``FusionError`` for a taken name, or something else than a check."""
    found: list[Check] = []
    for check in added:
        if not isinstance(check, Check) or check.run is None:
            raise FusionError(f"pytest_fusion_checks gave {check!r}: it must give Check objects with a run function")
        if check.name in {other.name for other in (*OURS, *found)}:
            raise FusionError(f"pytest_fusion_checks: another check has the name {check.name!r}; choose another")
        found.append(check)
    _added[:] = found


def names() -> list[str]:
    """The checks that a report lists."""
    return [check.name for check in checks() if check.reported]


def switches() -> list[str]:
    """What ``without=`` can name: checks, and parts of checks."""
    return [*names(), *(f"{check.name}:{part}" for check in checks() for part in check.parts)]


def of(verdict: Verdict) -> Check | None:
    """The check with the verdict's name."""
    return next((check for check in checks() if check.reported and check.name == verdict.check), None)


def missing(spec: FusionSpec, device: torch.device) -> dict[str, str]:
    """Why checks cannot run for a spec, by name."""
    reasons = {check.name: check.missing(spec, device) for check in checks()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def summaries(context: Context) -> list[Verdict]:
    """The verdicts of checks over all cases of a test that passed."""
    able = [check for check in checks() if check.missing(context.spec, context.device) is None]
    return [verdict for check in able if (verdict := check.summary(context)) is not None]


def conclusions(context: Context, judged: int, *, failing: bool = False) -> list[Verdict]:
    """The last verdicts on a test that passed so far, or is ``failing``; one may fail it."""
    able = [check for check in checks() if context.on(check.name) and (check.beside or not failing)]
    return [verdict for check in able if (verdict := check.conclude(context, judged)) is not None]


def closes(context: Context) -> bool:
    """Whether any check needs one more case when all have passed."""
    return any(check.closes(context) for check in checks())


def notes(context: Context) -> list[str]:
    """Sentences for the report about things that are no failure."""
    return [note for check in checks() for note in check.notes(context)]
