"""Verdicts and messages for a test in which no case could be judged."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_fusion.checks.context import CaseResult, Context
from pytest_fusion.checks.verdict import IMPOSSIBLE, NO_ROOM_TO_JUDGE, NOT_MODELLED, Rejections, Verdict, failed
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.fusion_spec import FusionSpec

# The identity of a failure without a case: nothing was judged.
NOTHING_JUDGED = "error:nothing-judged"

_SIZES = "fix the shapes of inputs=, the bounds in dims=, or those of values="


def not_modelled(cases: int, rejected: Mapping[str, int], refusals: Mapping[str, str]) -> str:
    """Why some of the cases were not judged: they need more than the interpreter models."""
    return (
        f"{rejected[NOT_MODELLED]} of {cases} case(s) could not be judged in the CPU lane: "
        f"{refusals.get(NOT_MODELLED, '')}"
    )


def lacking(rejected: Mapping[str, int]) -> str | None:
    """What was missing in every case (a model in the interpreter, memory); ``None`` if the kernel is to blame."""
    if NOT_MODELLED in rejected:
        return "in the CPU lane"
    if NO_ROOM_TO_JUDGE in rejected:
        return (
            "in the memory there is: the float64 lanes that price a reference take 250 bytes and more for each element "
            "of its largest tensor, 700 where a suspicion is looked into; use smaller sizes"
        )
    return None


def no_far_case(cases: int, rejected: Mapping[str, int], refusals: Mapping[str, str]) -> str:
    """Why the profile `large` judged nothing; a kernel that needs dense inputs is not to blame."""
    if not cases:
        return "no case has offsets beyond 2^31: no input takes a layout with gaps, or dims= leaves no axis of 3 slices"
    kinds = ", ".join(f"{count} x {kind} ({refusals.get(kind, '')})" for kind, count in sorted(rejected.items()))
    return f"no case with offsets beyond 2^31 could be judged: {kinds}"


def unless_far(context: Context, result: CaseResult) -> None:
    """Reject a case of the profile `large` that was launched on compact copies, as by ``x.contiguous()``."""
    judged = result.failure is not None or result.rejected is not None or not result.launches
    if not (judged or any(launch.far for launch in result.launches)):
        context.progress.refusals.setdefault("dense", "the kernel was launched on copies, whose offsets fit 32 bits")
        result.rejected = "dense"


def _kinds(rejected: Mapping[str, int], refusals: Mapping[str, str]) -> str:
    return ", ".join(
        f"{count} x {kind}" + (f", as in {refusals[kind]!r}" if refusals.get(kind) else "")
        for kind, count in sorted(rejected.items())
    )


def must_be_made(spec: FusionSpec, rejected: Mapping[str, int], refusals: Mapping[str, str]) -> None:
    """Raise ``SpecError`` where sizes or functions of the spec allow no case, so the kernel was never called."""
    raised = any(kind.startswith("inputs ") for kind in rejected)
    if rejected and all(kind == IMPOSSIBLE or kind.startswith("inputs ") for kind in rejected):
        advice = "fix the function, or bound what it is given by dims= and values=" if raised else _SIZES
        raise SpecError(
            f"{spec.name}: no case could be made, so the kernel was never called ({_kinds(rejected, refusals)}); "
            f"{advice}"
        )


def nothing_judged(rejected: Mapping[str, int], refusals: Mapping[str, str], *, beside: str = "") -> Verdict:
    kinds = (_kinds(rejected, refusals) or "none could be drawn") + beside
    advice = "a kernel that refuses everything is not right: check rejects=, dims= and that the reference accepts"
    if rejected and all(kind.startswith("reference ") for kind in rejected):
        advice = (
            "the reference itself raises, so that nothing says what is right: fix it, or bound by dims= and values="
        )
    advice += " these inputs"
    if rejected and all(kind == IMPOSSIBLE for kind in rejected):
        advice = _SIZES
    return failed(
        "error",
        f"no case could be judged ({kinds}); {advice}",
        identity=NOTHING_JUDGED,
        evidence=Rejections(dict(rejected), kinds),
    )
