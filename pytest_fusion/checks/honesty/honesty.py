"""Check `honesty`: a call computes its answer, returns it complete, and leaves it to the caller.

Further calls of a case (`kept_results`, `run.stress.unmarked`) find kernels that are right only while judged, or once.
Every call notes replacements in torch, in timers and in this package (`run.pristine`).

Not seen: a kernel that turns wrong after more calls than a test makes, or that recognises the plugin by the poison in
its gaps, by sizes or modules. Not accused: calls of torch, threads, and caches of what is not returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import Context, call_placed, collect
from pytest_fusion.checks.honesty import kept_results
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, passed, unknown
from pytest_fusion.interpreter.bridge.named_device import stay_on_the_cpu
from pytest_fusion.run import pristine
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import place
from pytest_fusion.run.stress import unmarked

NAME = kept_results.NAME

# The first output of a call that is missing or not the case's own answer.
FirstWrong = Callable[[Mapping[str, torch.Tensor]], str | None]

# Five or six calls a case: kept results, running work and detection of the caller do not depend on the case.
_MOST_CASES, _ANY_CASES, _DEEP_CASES = 3, 2, 24
_OBSERVED_CASES = 2
# A kernel that is wrong in half of its calls, whoever calls, is accused in one of 2^9 cases.
_PAIRS_OF_CALLS = 4
# How long a wrong result is watched, to distinguish unfinished work from a wrong answer.
_PATIENCE_S, _WHILE_SHRINKING_S = 1.0, 0.05


@dataclass(slots=True)
class _State:
    """How many cases had further calls; after something is ``found``, all cases are those of its shrinking."""

    cases: int = 0
    found: bool = False


def due(trial: Trial) -> bool:
    """Few cases of a test; every case with a replacement, and those that shrink a finding."""
    context, state = trial.context, trial.context.state(_State)
    if pristine.found():
        return True
    most = _DEEP_CASES if context.deep else _MOST_CASES if trial.thorough else _ANY_CASES
    wanted = context.complete or state.found or state.cases < most
    return wanted and any(t.numel() for t in trial.got.tensors.values())


def run(trial: Trial) -> Verdict:
    """The verdict on replacements in this case, then on further calls."""
    state = trial.context.state(_State)
    verdict = _tampering()
    if verdict is None:
        state.cases += 1
        verdict = _judge(trial)
        verdict = _tampering() or verdict
    state.found |= verdict.failed
    return verdict


def summary(context: Context) -> Verdict | None:
    """`unknown` where no case could be checked, or where no case called anything fused."""
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
    if (verdict := calls.judge()) is not None:
        return verdict
    context, state, left = trial.context, trial.context.state(_State), calls.left
    if state.cases <= _OBSERVED_CASES or state.found or context.complete:
        outcome = _for_any_caller(trial, calls.first_wrong)
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
    what = "a call of the kernel replaced" if replaced else "functions of this package were replaced:"
    after = "; it was put back and nothing was judged with it" if replaced else ""
    return failed(
        NAME,
        f"{what} {listed}{after}. Whoever uses it next in this process gets another one: change it where a caller can "
        "undo that, or not at all",
        identity=f"{NAME}:tampers",
        cause="tampers",
        replaced=names,
    )


def _for_any_caller(trial: Trial, first_wrong: FirstWrong) -> Verdict | str | None:
    """A failure, or the reason for `unknown`; ``None`` where the answer is the case's own for any caller."""
    # A thread has its own autocast, default device and locals, so calls in threads are compared. The caller matters
    # only if each call that shows the test is right, and each other one wrong.
    frames: list[unmarked.Frame] = []
    wrong = _in_thread(trial, first_wrong, frames, hidden=True)
    if wrong is None:
        return None
    for _ in range(_PAIRS_OF_CALLS):
        shown = _in_thread(trial, first_wrong, frames, hidden=False)
        if shown is not None or _in_thread(trial, first_wrong, [], hidden=True) is None:
            return "the answer is another one in another thread, whoever calls"
    return failed(
        NAME,
        f"{wrong} when nothing shows that a test calls: without pytest on the stack, among the imports, on the command "
        "line and in the environment",
        identity="honesty:caller",
        cause="detects-test",
    )


def _in_thread(trial: Trial, first_wrong: FirstWrong, frames: list[unmarked.Frame], *, hidden: bool) -> str | None:
    """What is wrong with a call in a thread. The first notes its stack in ``frames``, for the one that shows it."""
    spec, context = trial.spec, trial.context
    graded = torch.is_grad_enabled()

    def prepare() -> None:
        torch.set_grad_enabled(graded)
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)
        else:
            stay_on_the_cpu()

    shown = [] if hidden else list(frames)

    def fused(**arguments: Any) -> Any:
        frames[:] = frames or unmarked.stack()[:-1]
        return unmarked.called(partial(spec.fused, **arguments), prepare, shown)

    with context.clock.phase("make"):
        placed = place(trial.logical, trial.result.case, context.device, FILLS[0])
    outcome = call_placed(context, fused, placed)
    if outcome.error is not None:
        return f"the kernel raises {type(outcome.error).__name__}"
    different = first_wrong(collect(outcome.result, placed.arguments, spec.mutates).tensors)
    return None if different is None else f"{different} is another one"


CHECK = Check(NAME, run, due=due, summary=summary)
