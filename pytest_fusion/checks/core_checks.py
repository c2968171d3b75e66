"""What the verdicts of checks that every case's own calls conclude (`trial`) mean."""

from __future__ import annotations

from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import Context
from pytest_fusion.checks.evidence import DamagedMemory, ProcessEnd, Rejections, WrongAccess
from pytest_fusion.checks.kernels import compiles
from pytest_fusion.checks.repeat import repetition
from pytest_fusion.checks.verdict import IMPOSSIBLE, Verdict
from pytest_fusion.spec.promises import Tolerance

# Wrong accesses reported by the interpreter that are causes of their own; others are `out-of-bounds`.
_ACCESSES = frozenset({"use-after-free", "misaligned-access", "false-hint", "racing-stores", "racing-load"})


def _of_error(verdict: Verdict) -> str | None:
    seen = verdict.evidence
    ours = isinstance(seen, Rejections) and bool(seen.rejected) and all(map(_before_kernel, seen.rejected))
    return None if ours else verdict.cause or "raises"


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
    aliasing = verdict.identity == "structure:aliasing"
    return verdict.cause or ("aliasing" if aliasing else "wrong-structure")


def _of_bounds(verdict: Verdict) -> str:
    seen = isinstance(verdict.evidence, WrongAccess | DamagedMemory)
    if verdict.identity == "bounds:surroundings" or not seen:
        return verdict.cause or "reads-padding"
    return verdict.cause or _of_access(verdict) or "out-of-bounds"


def _of_unwritten(verdict: Verdict) -> str:
    return "stale-memory" if verdict.identity == "unwritten:scratch" else "unwritten-output"


def _of_repeat(verdict: Verdict) -> str:
    if verdict.identity == "repeat:stale":
        return "cached-answer"
    return verdict.cause or _of_access(verdict) or "nondeterministic"


def _of_access(verdict: Verdict) -> str | None:
    kind = verdict.evidence.seen.kind if isinstance(verdict.evidence, WrongAccess) else None
    return kind if kind in _ACCESSES else None


def _not_vacuous(context: Context, judged: int) -> Verdict:
    return context.progress.vacuity.conclude(judged, fixed=isinstance(context.spec.tolerance, Tolerance))


ERROR = Check("error", conclude=compiles.conclude, beside=True, cause=_of_error)
CRASH = Check("crash", cause=_of_crash)
STRUCTURE = Check("structure", cause=_of_structure)
INPUTS = Check("inputs", cause=lambda _: "mutates-input")
BOUNDS = Check("bounds", cause=_of_bounds)
UNWRITTEN = Check("unwritten", cause=_of_unwritten)
REPEAT = Check("repeat", repetition.run, due=repetition.due, cause=_of_repeat)
VALUES = Check("values")
VACUITY = Check("vacuity", conclude=_not_vacuous, cause=lambda _: "vacuous-test")
