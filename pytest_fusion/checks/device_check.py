"""Check `device`: the call uses the current stream and its tensors' device, and does not wait for the device.

On a stream of its own, behind a busy producer, the kernel must not run before its inputs exist, and a consumer after it
must find its results. As a control, a call on the memory before the producer writes must give another answer. With a
second GPU, one call runs while that GPU is current. Last, two calls in a row are watched for operations that wait for
the device, a hazard unless ``syncs=True``.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fusion.case import regimes
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import Context, rejection, tensors_of
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, hazard, passed, unknown
from pytest_fusion.run.fused import ContextLost
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import Placed, place, rewrite, write
from pytest_fusion.run.precision import default_precision
from pytest_fusion.run.process.fork import cuda_is_poisoned
from pytest_fusion.run.stress import streams
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief, first_line

NAME = "device"

# A case waits some 40 ms three times; the result does not depend on sizes.
_MOST_CASES, _MOST_CASES_DEEP = 2, 8
_STEPS = 40
# A launch on another stream may wait for the producer by chance if both share a hardware queue of the GPU
# (CUDA_DEVICE_MAX_CONNECTIONS, 8): so several calls, each on another stream, until two cannot have waited.
_STREAMS, _LATE = 4, 2
_NO_GPU = "needs a GPU: an interpreted kernel has no streams and no second device"
_ONE_GPU = "one GPU: tensors on a device that is not the current one were not tried"


@dataclass(slots=True)
class _State:
    """The check's state in one test: parts with evidence, and whether streams gave none."""

    cases: int = 0
    proved: dict[str, None] = field(default_factory=dict)
    blind: bool = False
    # Cases run for each finding that shrinks.
    steps: Counter[str] = field(default_factory=Counter)


def missing(spec: FusionSpec, device: torch.device) -> str | None:  # noqa: ARG001
    """Why there is nothing to check without CUDA."""
    return None if device.type == "cuda" else _NO_GPU


def closes(context: Context) -> bool:
    """Whether the last part, on another GPU, runs at the end: there a launch without a guard fails on any case."""
    device = context.device
    return missing(context.spec, device) is None and context.on(NAME) and streams.other_device(device) is not None


def due(trial: Trial) -> bool:
    """The first thorough cases of ordinary values, and one at the end; every case while a finding shrinks."""
    context, case = trial.context, trial.result.case
    state = context.state(_State)
    sought = context.focus.sought or ""
    if sought.startswith(NAME):
        state.steps[sought] += 1
        return state.steps[sought] <= _STEPS
    if not any(t.numel() for t in tensors_of(trial.logical).values()):
        return False
    if context.complete or context.focus.closing:
        return True
    special = any(regimes.is_special(tensor.regime) for tensor in case.tensors.values())
    return trial.thorough and not special and state.cases < (_MOST_CASES_DEEP if context.deep else _MOST_CASES)


def run(trial: Trial) -> Verdict:
    """The first part that fails; `unknown` where one gave no evidence. Hazards are noted."""
    state = trial.context.state(_State)
    state.cases += 1
    with trial.context.clock.phase(NAME):
        found = _Parts(trial, state).run()
    if found is not None:
        return found
    blind = state.blind and "streams" not in state.proved
    return unknown(NAME, _BLIND) if blind else passed(NAME, parts=list(state.proved))


_BLIND = (
    "no call behind a slow producer could be distinguished from one that ran too early: it waits for the device by "
    "itself, or its result does not depend on floating inputs"
)


def summary(context: Context) -> Verdict:
    """The verdict over all cases."""
    state = context.state(_State)
    if not state.cases:
        return unknown(NAME, "no case of ordinary values with an element was judged")
    if "streams" not in state.proved:
        return unknown(NAME, _BLIND)
    words = ", ".join(state.proved)
    return Verdict(NAME, "pass", f"{words}; {_ONE_GPU}" if streams.other_device(context.device) is None else words)


class _Parts:
    """The parts of the check on one case."""

    def __init__(self, trial: Trial, state: _State) -> None:
        self.trial, self.context, self.spec, self.state = trial, trial.context, trial.spec, state

    def run(self) -> Verdict | None:
        """The first failure; hazards are noted. While a finding shrinks, only its own part runs."""
        parts = {"wrong-stream": self.stream, "hidden-sync": self.waiting, "wrong-device": self.other_device}
        last, sought = "wrong-device", (self.context.focus.sought or "").removeprefix(f"{NAME}:")
        for cause, part in parts.items():
            now = self.context.complete or self.context.focus.closing is (cause == last)
            found = part() if sought == cause or (sought not in parts and now) else None
            if found is not None and found.failed:
                return found
            if found is not None:
                self.trial.note(found)
        return None

    def place(self) -> Placed:
        return place(self.trial.logical, self.trial.result.case, self.context.device, FILLS[0])

    def fused(self, **arguments: Any) -> Any:
        with default_precision():
            return self.spec.fused(**arguments, **self.context.extra)

    def guarded(self, work: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            return work(), None
        except Exception as error:
            if cuda_is_poisoned():
                raise ContextLost(first_line(error)) from error
            return None, error

    def fail(self, reason: str, slug: str, **evidence: Any) -> Verdict:
        return failed(NAME, reason, identity=f"{NAME}:{slug}", cause=slug, **evidence)

    def stream(self) -> Verdict | None:
        """Call behind a slow producer, on its own stream and on others."""
        early, late, cycles = self.early(), 0, streams.CYCLES
        for _ in range(_STREAMS if early else 1):
            behind, wrong = self.behind(wait=False, cycles=cycles)
            if behind is None:
                return None  # it raised on inputs on which it did not raise before: no evidence
            if wrong is not None:
                return self.too_early(wrong)
            late += behind.late
            if early and (late == _LATE or self.spec.syncs):
                self.state.proved["streams"] = None
                return None
            if not behind.late:
                cycles *= 2  # on a GPU that many processes share, each has a turn every few tens of milliseconds
        self.state.blind = True
        return None

    def too_early(self, wrong: Verdict) -> Verdict | None:
        """``wrong`` from behind the producer, if the result is right after it and then wrong behind it once more."""
        waited, still = self.behind(wait=True)
        if waited is None or still is not None:
            return None  # wrong with and without waiting: streams do not explain it
        if not any(self.behind(wait=False)[1] is not None for _ in range(_STREAMS)):
            return None
        return self.fail(
            f"on a stream of its own, behind a producer that was still writing the inputs: {wrong.reason}. With the "
            "producer done before the call it is right: something is launched on another stream than the current one "
            "(torch.cuda.current_stream)",
            "wrong-stream",
            inner=wrong.check,
            found=wrong.facts,
        )

    def early(self) -> bool:
        """Whether a call on the memory from before the producer's write gives a wrong answer."""
        placed = self.place()
        _blank(placed)
        result, error = self.guarded(lambda: self.fused(**placed.arguments))
        streams.settle(self.context.device)
        return error is None and self.trial.wrong(result, placed) is not None

    def behind(self, *, wait: bool, cycles: int = streams.CYCLES) -> tuple[streams.Behind | None, Verdict | None]:
        placed = self.place()
        sources = {name: t.clone() for name, t in placed.tensors.items()}
        _blank(placed)

        def produce() -> None:
            for name, source in sources.items():
                write(placed.tensors[name], source)

        behind, error = self.guarded(
            lambda: streams.behind_producer(self.fused, placed.arguments, produce, wait=wait, cycles=cycles)
        )
        if error is not None or not isinstance(behind, streams.Behind):
            return None, None
        return behind, self.trial.wrong(behind.result, Placed(behind.arguments, placed.arena))

    def other_device(self) -> Verdict | None:
        """Call while another GPU is current."""
        other = streams.other_device(self.context.device)
        if other is None:
            return None
        placed = self.place()
        with streams.current_device(other):
            result, error = self.guarded(lambda: self.fused(**placed.arguments))
            streams.settle(self.context.device)
        where = f"with tensors on {self.context.device} while {other} is current"
        advice = "put `with torch.cuda.device(x.device)` around the launch"
        if error is not None:
            if rejection(self.spec, error) is not None:
                return None
            return self.fail(f"{where} the call raised {brief(error)}; {advice}", "wrong-device")
        wrong = self.trial.wrong(result, placed)
        if wrong is None:
            self.state.proved["a second GPU"] = None
            return None
        return self.fail(f"{where}: {wrong.reason}; {advice}", "wrong-device", inner=wrong.check, found=wrong.facts)

    def waiting(self) -> Verdict | None:
        """Two calls, each after one that compiled and tuned; what waits in both is not start-up."""
        if self.spec.syncs:
            self.state.proved["waiting allowed by syncs=True"] = None
            return None
        placed = self.place()
        seen: list[list[streams.Wait]] = []
        for watched in (False, True, True):
            rewrite(placed, self.trial.logical)
            streams.settle(self.context.device)
            context: AbstractContextManager[Any] = streams.waits() if watched else nullcontext()

            def call(context: AbstractContextManager[Any] = context) -> Any:
                with context as noted:
                    self.fused(**placed.arguments)
                return noted

            noted, error = self.guarded(call)
            if error is not None:
                return None
            if noted is not None:
                seen.append(noted)
        if not all(seen):
            self.state.proved["no waiting"] = None
            return None
        wait, own = seen[0][0], inspect.unwrap(getattr(self.spec.fused, "func", self.spec.fused))
        code = getattr(own, "__code__", None)
        glue = code is not None and (code.co_filename, code.co_firstlineno) == (wait.file, wait.begins)
        whose = ", the function under test itself, not in what it calls: its callers need not wait" if glue else ""
        return hazard(
            NAME,
            "hidden-sync",
            f"the call waits for the device at {wait}{whose}; it stops the CPU until all queued work is done and "
            'cannot be captured in a CUDA graph; where it has to wait, declare allow={"hidden-sync": "reason"} or '
            "syncs=True",
            identity=f"{NAME}:hidden-sync",
            places=[str(each) for each in seen[0]],
        )


def _blank(placed: Placed) -> None:
    """Zero the floating inputs. Integers stay: an index, length or step of zero may break a correct kernel."""
    for t in placed.tensors.values():
        if not (t.is_floating_point() or t.is_complex()):
            continue
        write(t, torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape))


CHECK = Check(NAME, run, due=due, missing=missing, summary=summary, closes=closes)
