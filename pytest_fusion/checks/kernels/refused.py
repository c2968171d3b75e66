"""Hazard `refuses`: cases that a launcher refuses by an ``assert`` or ``raise`` of its own, before its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.describe import describe
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import Context
from pytest_fusion.checks.verdict import Verdict, failed, hazard
from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.run.fused import Outcome
from pytest_fusion.spec.wording import first_line, raised_by_filter


@dataclass(slots=True)
class _State:
    """How many cases were refused, by exception, and the first of each."""

    cases: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    # Cases of these whose backward alone is refused, and whether that of any is not.
    backward: int = 0
    trained: bool = False


def trained(context: Context) -> None:
    """Note that a case has gradients."""
    context.state(_State).trained = True


def note(context: Context, case: Case, outcome: Outcome, launched: Sequence[Launch], *, backward: bool = False) -> bool:
    """Count a case that its launcher refused; false where the exception is another's, or a kernel was ``launched``
    before it. In ``backward`` those of forward do not count.

    Of one case alone a refusal is all that the kernel does.
    """
    if outcome.error is None or outcome.raiser != "launcher" or launched or not context.on("error"):
        return False
    if context.complete or raised_by_filter(outcome.error) is not None:
        return False
    state, kind = context.state(_State), type(outcome.error).__name__
    state.cases[kind] = state.cases.get(kind, 0) + 1
    state.backward += backward
    if kind not in state.first:
        text = first_line(outcome.error) or "without a message"
        state.first[kind] = f"{text} (in {outcome.origin}) at {describe(context.spec, case)['text']}"
    return True


def _conclude(context: Context, judged: int) -> Verdict | None:
    state = context.state(_State)
    count = sum(state.cases.values())
    if not count:
        return None
    listed = "; ".join(f"{kind}: {first}" for kind, first in state.first.items())
    if state.backward and not state.trained:
        return failed("error", f"backward refuses every case: {listed}", identity="error:refuses:backward")
    names, judged = list(state.cases), judged - state.backward
    keyword = f"rejects={names[0]}" if len(names) == 1 else f"rejects=({', '.join(names)})"
    return hazard(
        "error",
        "refuses",
        f"the launcher refuses {count} of {count + judged} cases, {count / (count + judged):.0%}: {listed}; "
        f"{keyword} says that it may",
        identity="error:refuses",
        cases=dict(state.cases),
        judged=judged,
    )


# It concludes under the name of `error`, which also concludes on compilers.
CHECK = Check("refusals", conclude=_conclude, beside=True, reported=False)
