"""All checks, in the order of judging and reporting: an earlier finding explains a later one.

Those without a module of their own are concluded from every case's own calls (`trial`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pytest_fusion.checks import compile_check, device_check
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.configs import configs
from pytest_fusion.checks.context import Context
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.honesty import honesty
from pytest_fusion.checks.invariance import invariance
from pytest_fusion.checks.kernels import compiles, refused
from pytest_fusion.checks.launches import launches
from pytest_fusion.checks.malformed import malformed
from pytest_fusion.checks.randomness import distribution, randomness
from pytest_fusion.checks.repeat import repetition
from pytest_fusion.checks.verdict import IMPOSSIBLE, DamagedMemory, ProcessEnd, Rejections, Verdict, WrongAccess
from pytest_fusion.errors import FusionError
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.promises import Tolerance

# Wrong accesses reported by the interpreter that are causes of their own; others are `out-of-bounds`.
_ACCESSES = frozenset({"use-after-free", "misaligned-access", "false-hint", "racing-stores", "racing-load"})


def _of_error(verdict: Verdict) -> str | None:
    seen = verdict.evidence
    ours = isinstance(seen, Rejections) and bool(seen.rejected) and all(map(_before_kernel, seen.rejected))
    return None if ours else "raises"


def _before_kernel(rejection: str) -> bool:
    """Whether something other than the kernel refused a case."""
    return rejection == IMPOSSIBLE or rejection.startswith(("reference ", "inputs "))


def _of_crash(verdict: Verdict) -> str:
    end = verdict.evidence
    if not isinstance(end, ProcessEnd):
        return "crash"
    return "device-fault" if "CUDA" in end.detail else "hang" if end.kind == "timeout" else "crash"


def _of_structure(verdict: Verdict) -> str:
    if verdict.identity.endswith(":dtype"):
        return "wrong-dtype"
    return "aliasing" if verdict.identity == "structure:aliasing" else "wrong-structure"


def _of_bounds(verdict: Verdict) -> str:
    seen = isinstance(verdict.evidence, WrongAccess | DamagedMemory)
    if verdict.identity == "bounds:surroundings" or not seen:
        return "reads-padding"
    return _of_access(verdict) or "out-of-bounds"


def _of_unwritten(verdict: Verdict) -> str:
    return "stale-memory" if verdict.identity == "unwritten:scratch" else "unwritten-output"


def _of_repeat(verdict: Verdict) -> str:
    if verdict.identity == "repeat:stale":
        return "cached-answer"
    return _of_access(verdict) or "nondeterministic"


def _of_access(verdict: Verdict) -> str | None:
    kind = verdict.evidence.seen.kind if isinstance(verdict.evidence, WrongAccess) else None
    return kind if kind in _ACCESSES else None


def _not_vacuous(context: Context, judged: int) -> Verdict:
    return context.progress.vacuity.conclude(judged, fixed=isinstance(context.spec.tolerance, Tolerance))


OURS: tuple[Check, ...] = (
    refused.CHECK,
    Check("error", conclude=compiles.conclude, beside=True, cause=_of_error),
    Check("crash", cause=_of_crash),
    Check("structure", cause=_of_structure),
    Check("inputs", cause=lambda _: "mutates-input"),
    Check("bounds", cause=_of_bounds),
    Check("unwritten", cause=_of_unwritten),
    *(randomness.CHECK, distribution.CHECK),
    Check("repeat", repetition.run, due=repetition.due, cause=_of_repeat),
    Check("values"),
    *(invariance.CHECK, gradients.CHECK, configs.CHECK, honesty.CHECK),
    *(device_check.CHECK, launches.CHECK, compile_check.CHECK, malformed.CHECK),
    Check("vacuity", conclude=_not_vacuous, cause=lambda _: "vacuous-test"),
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
