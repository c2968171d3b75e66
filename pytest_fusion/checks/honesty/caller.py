"""Of check `honesty`: whether a kernel is right only where a test calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from pytest_fusion.checks.context import call_placed
from pytest_fusion.checks.outputs import collect
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed
from pytest_fusion.interpreter.bridge.named_device import stay_on_the_cpu
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import place
from pytest_fusion.run.stress import unmarked

# The first output of a call that is missing or not the case's own answer.
FirstWrong = Callable[[Mapping[str, torch.Tensor]], str | None]


def judge(trial: Trial, first_wrong: FirstWrong) -> Verdict | str | None:
    """A failure, or the reason why nothing can be known; ``None`` where the answer is the case's own for any caller.

    A thread has its own autocast, default device and locals, so the call that shows no test is compared with one in a
    thread that does: only where that is right, and the other wrong twice, the caller makes the difference.
    """
    frames: list[unmarked.Frame] = []
    wrong = _wrong(trial, first_wrong, frames, hidden=True)
    if wrong is None:
        return None
    shown = _wrong(trial, first_wrong, frames, hidden=False)
    if shown is not None or _wrong(trial, first_wrong, [], hidden=True) is None:
        return "the answer is another one in another thread, whoever calls"
    return failed(
        "honesty",
        f"{wrong} when nothing shows that a test calls: without pytest on the stack, among the imports, on the command "
        "line and in the environment",
        identity="honesty:caller",
        cause="detects-test",
    )


def _wrong(trial: Trial, first_wrong: FirstWrong, frames: list[unmarked.Frame], *, hidden: bool) -> str | None:
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
    outputs = collect(outcome.result, placed.arguments, spec.mutates).tensors
    different = first_wrong(outputs)
    return None if different is None else f"{different} is another one"
