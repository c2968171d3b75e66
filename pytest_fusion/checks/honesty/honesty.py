"""Check `honesty`: an answer is computed when it is asked for, is done when it is returned, and then is the caller's.

A few calls of a case that passed everything else (``later``, ``observed``) ask what only a kernel does not survive that
returns right answers while it is being judged, or once. What a call replaced in torch, in the timers and in this
package (``run.genuine``) is noted by every call and reported here.

Not seen: a kernel that turns wrong after more calls than a test makes, or that knows the plugin by the poison in its
gaps, by its sizes or by its modules. Not accused: who calls torch, keeps threads, or caches what it does not return.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import Context
from pytest_fusion.checks.honesty import caller, kept_results
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, passed, unknown
from pytest_fusion.run import pristine

NAME = kept_results.NAME

# Five or six calls a case: what a kernel keeps or leaves running does not depend on its case, nor who it thinks calls.
_MOST_CASES, _ANY_CASES, _DEEP_CASES = 3, 2, 24
_OBSERVED_CASES = 2
# How long a result that is not right when it is returned is waited for, to tell unfinished work from a wrong answer.
_PATIENCE_S, _WHILE_SHRINKING_S = 1.0, 0.05


@dataclass(slots=True)
class _State:
    """How many cases were asked; once something is ``found`` all cases are those of its shrinking."""

    cases: int = 0
    found: bool = False


def due(trial: Trial) -> bool:
    """Few cases of a test; every one in which something was replaced, and those of the shrinking of a finding."""
    context, state = trial.context, trial.context.state(_State)
    if pristine.found():
        return True
    most = _DEEP_CASES if context.deep else _MOST_CASES if trial.thorough else _ANY_CASES
    wanted = context.complete or state.found or state.cases < most
    return wanted and any(t.numel() for t in trial.got.tensors.values())


def run(trial: Trial) -> Verdict:
    """What the calls of this case replaced, then what further calls show."""
    state = trial.context.state(_State)
    verdict = _tampering()
    if verdict is None:
        state.cases += 1
        verdict = _judge(trial)
        verdict = _tampering() or verdict
    state.found |= verdict.failed
    return verdict


def summary(context: Context) -> Verdict | None:
    """That no case could be checked, or that no case called anything fused."""
    calls = context.state(kept_results.ReferenceCalls)
    if not context.state(_State).cases:
        return unknown(NAME, "no case that passed everything else had a result with elements")
    if 0 < calls.watched == calls.ran:
        return unknown(
            NAME,
            "every call that was looked at ran the reference function itself, so the test compares it with itself; "
            "see which branch of the wrapper falls back to it here",
        )
    return None


def _judge(trial: Trial) -> Verdict:
    patience_s = _WHILE_SHRINKING_S if trial.context.state(_State).found else _PATIENCE_S
    calls = kept_results.LaterCalls(trial, patience_s=patience_s)
    if not calls.names:
        return unknown(NAME, "every output may vary from run to run, as deterministic= allows, and none is compared")
    verdict = calls.judge()
    if verdict is not None:
        return verdict
    context, state, left = trial.context, trial.context.state(_State), calls.left
    if state.cases <= _OBSERVED_CASES or state.found or context.complete:
        outcome = caller.judge(trial, calls.first_wrong)
        if isinstance(outcome, Verdict):
            return outcome
        if outcome is None:
            calls.ran.append("caller")
        else:
            left["caller"] = outcome
    if context.device.type != "cuda":
        left["streams"] = "there are none on a CPU"
    if not calls.ran:
        return unknown(NAME, "; ".join(left.values()))
    return passed(NAME, ran=calls.ran, not_run=left)


def _tampering() -> Verdict | None:
    replaced, foreign = pristine.take(), pristine.foreign()
    if not (replaced or foreign):
        return None
    names = replaced or foreign
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    told = "a call of the kernel replaced" if replaced else "somebody replaced functions of this package:"
    after = "; it was put back and nothing was judged with it" if replaced else ""
    return failed(
        NAME,
        f"{told} {listed}{after}. Whoever uses it next in this process gets another one: change it where a caller can "
        "undo that, or not at all",
        identity=f"{NAME}:tampers",
        cause="tampers",
        replaced=names,
    )


CHECK = Check(NAME, run, due=due, summary=summary)
