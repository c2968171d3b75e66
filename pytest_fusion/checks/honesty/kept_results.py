"""The part of check `honesty` that makes further calls of a case, and compares earlier results.

* Other values, then the same ones again, at the same and another address, after the caller overwrites the first result:
  a result that the kernel keeps is then spoilt; one that it remembers by content takes no operator and no launch.
* Other tensors at the addresses of freed ones, as any allocator makes them, with as many writes: a cache keyed by
  address, shape, version or the id of a dead object gives an old answer.
* Results of earlier calls against copies made when they were returned: a change means unfinished work (on another
  thread or stream), or memory that a later call used again.

Outputs that may vary by ``deterministic=`` are judged by `values`, and compared in bits only with themselves. An honest
cache is keyed by a tensor that it keeps alive or refers to weakly, and its version, which all writes here increase.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep
from types import FrameType
from typing import Any

import torch

from pytest_fusion.case import counter_random as numbers
from pytest_fusion.case.strided import expanded
from pytest_fusion.checks import structure
from pytest_fusion.checks.context import call_placed, collect, other_values, rejection
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, unknown
from pytest_fusion.oracle.reference import ReferenceFailed
from pytest_fusion.run import pristine
from pytest_fusion.run.fused import Outcome
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import Placed, place, renewed
from pytest_fusion.run.stress import streams

NAME = "honesty"

# The interval at which a wrong result is checked again.
_STEP_S = 0.005
# The most buffers that a kernel returns in turn; so many calls show which memory an earlier result uses.
_BUFFERS = 3
# How often a kernel must be right elsewhere before the old address is to blame for a wrong answer: a kernel that is
# right half of the time passes this in 1 of 256.
_ELSEWHERE = 8
# This many different numbers do not repeat in every bit by chance.
_FEW_VALUES = 2

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class ReferenceCalls:
    """Calls of the kernel watched for the reference function, and how many ran it."""

    watched: int = 0
    ran: int = 0


class _Refused(Exception):
    """A call was refused, which is allowed."""


class _Raised(Exception):
    """A call raised where the first did not; its outcome is the argument."""


@dataclass(slots=True)
class _Call:
    """One call: its results now, and copies made when it returned, on the caller's stream."""

    placed: Placed
    outcome: Outcome
    outputs: Tensors
    returned: Tensors

    @property
    def work(self) -> int:
        """The number of launches, and of operators that compute something."""
        assert self.outcome.watch is not None
        return len(self.outcome.launches) + self.outcome.watch.computed


class LaterCalls:
    """The calls of one case. Varying outputs are judged by values; a wrong result is watched for ``patience_s``."""

    def __init__(self, trial: Trial, *, patience_s: float) -> None:
        self.patience_s = patience_s
        self.trial, self.context, self.spec = trial, trial.context, trial.spec
        self.case = trial.result.case
        self.varying = {name for name in trial.order if trial.tolerates(name)}
        self.names = [
            name
            for name, t in trial.got.tensors.items()
            if t.numel() and (name in self.varying or not trial.tolerates(name))
        ]
        self.right: Tensors = {
            name: trial.judged[name] if name in trial.judged else trial.got.tensors[name].detach().clone()
            for name in self.names
        }
        self.other: _Call | None = None
        # Where an output may vary: the right answer for the other values.
        self.there: Trial | None = None
        self.ran: list[str] = []
        self.left: dict[str, str] = {}

    def judge(self) -> Verdict | None:
        """The verdict that ends the check, if any; notes what ``ran``, and what is ``left`` and why."""
        for name, step in (("values", self._other_values), ("address", self._recycled)):
            try:
                verdict = step()
            except _Refused:
                verdict = None
                self.left[name] = "a call was refused"
            except _Raised as raised:
                return self._raised(raised.args[0])
            if verdict is not None:
                return verdict
            if name not in self.left:
                self.ran.append(name)
        return None

    def _other_values(self) -> Verdict | None:
        """Call with other values, then with the same ones elsewhere after the caller overwrites the result."""
        case, logical = other_values(self.context, self.case, self.trial.logical, NAME, "other")
        if logical is None:
            self.left["values"] = "no other values of the same shapes could be drawn"
            return None
        a = self.other = self._called(self._place(logical), watched=True)
        if self.varying:
            try:
                self.there = self.trial.of_values(case, logical)
            except ReferenceFailed:
                self.left["values"] = "the reference does not take other values"
                return None
        verdict = self._late(a) or self._earlier(a)
        if verdict is not None:
            return verdict
        # An output that does not depend on values (a table of positions) may be shared and remembered.
        depends = [name for name in self.names if name in a.returned and not self._is_right(name, a.returned[name])]
        written = [name for name in depends if _scribble(a.outputs[name], a.placed.tensors.values())]
        if not self.spec.given_up:
            verdict = self._same_answer(a, self._called(a.placed), written)
            if verdict is not None:
                return verdict
        b = self._called(self._place(logical))
        # With several calls after the judged one, buffers used in turn come round.
        verdict = self._same_answer(a, b, written) or self._earlier(b)
        if verdict is not None:
            return verdict
        return self._looked_up(a, b, depends) or self._late(b)

    def _looked_up(self, a: _Call, b: _Call, depends: Sequence[str]) -> Verdict | None:
        """The finding that the second call on the same values took an output that ``depends`` on them from a cache."""
        if not depends or b.work >= a.work or not self._works_for_new_values(b.work):
            return None
        # Less work may be a weight packed once for its content; no work, or the answer in memory, is not.
        if b.work and not _held(a.returned[depends[0]], (a, b)):
            return None
        return self._finding(
            "remembered",
            f"{depends[0]} was looked up: a call on values seen before made {b.work} of the {a.work} launches and "
            "operators that new values take, and the kernel keeps its answer",
            depends[0],
            "cached-answer",
        )

    def _earlier(self, a: _Call) -> Verdict | None:
        """Compare the judged results after this call: a change means memory that is returned again, or was."""
        held = self.trial.got.tensors
        name = next((name for name in self.names if repeat.differ(self.right[name], held[name])), None)
        if name is None:
            return None
        later = [*a.outputs.values()]
        for _ in range(_BUFFERS):
            later += self._called(self._place(self.trial.logical)).outputs.values()
        if not any(structure.overlap(held[name], t) for t in later):
            return self._late_finding(name)
        return self._finding(
            "overwritten",
            f"{name} of an earlier call was changed by a later one, which returned the same memory: who keeps a result "
            "finds another one in it; allocate it anew, or let the caller pass it in",
            name,
            "aliasing",
        )

    def _same_answer(self, a: _Call, b: _Call, written: Sequence[str]) -> Verdict | None:
        """Compare two calls on the same values, with the results ``written`` overwritten in between."""
        if (verdict := self._late(b)) is not None:
            return verdict
        for name in self.names:
            if name not in a.returned or name not in b.returned:
                return unknown(NAME, f"{name} is not returned for other values")
            wrong = self._differing(name, a, b)
            if wrong is None:
                continue
            if name in written and not repeat.differ(b.returned[name], a.outputs[name]):
                return self._finding(
                    "kept",
                    f"{name} is memory that the kernel keeps: after the caller wrote over it, a call on the same "
                    "values returned what the caller had written; return a copy, or memory that nothing else holds",
                    name,
                    "cached-answer",
                )
            if (verdict := self._unfinished(b)) is not None:
                return verdict
            old = not repeat.differ(wrong, self.right[name])
            # Where results may vary, one or two numbers may repeat by chance.
            old = old and (name not in self.varying or len(set(wrong.flatten().tolist())) > _FEW_VALUES)
            return self._recycled_finding(name, old=True) if old else self._unsteady(name)
        return None

    def _differing(self, name: str, a: _Call, b: _Call) -> torch.Tensor | None:
        """The result of ``a`` if ``b`` gave other bits; where these may vary, the one that is wrong for the values."""
        first, second = a.returned[name], b.returned[name]
        if name not in self.varying or self.there is None:
            return first if repeat.differ(first, second) else None
        return next((t for t in (first, second) if not _judged(self.there, name, t)), None)

    def _recycled(self) -> Verdict | None:
        """Call with other tensors of the case's own values in the memory of the last ones."""
        if self.other is None:
            self.left["address"] = "no other values were called"
            return None
        placed, returned, self.other = self.other.placed, self.other.returned, None
        numbers, arena = {name: id(tensor) for name, tensor in placed.tensors.items()}, placed.arena
        living = [weakref.ref(tensor) for tensor in placed.tensors.values()]
        placed.arguments.clear()
        placed.tensors.clear()
        if any(reference() is not None for reference in living):
            # A kernel that keeps a tensor alive may know it by its address: no other can be there.
            self.left["address"] = "the kernel keeps its inputs alive, so that their addresses are not used again"
            return None
        with self.context.clock.phase("make"):
            fresh = renewed(arena, numbers, self.trial.logical)
            arena.refill(FILLS[0])
        got = self._called(fresh)
        wrong = self.first_wrong(got.returned)
        if wrong is None:
            return self._late(got)
        if (verdict := self._unfinished(got)) is not None:  # first: two unfinished results are alike
            return verdict
        if wrong in returned and wrong in got.returned and not repeat.differ(returned[wrong], got.returned[wrong]):
            return self._recycled_finding(wrong, old=True)
        for _ in range(_ELSEWHERE):
            if self.first_wrong(self._called(self._place(self.trial.logical)).returned) is not None:
                return self._unsteady(wrong)
        return self._recycled_finding(wrong, old=False)

    def _recycled_finding(self, name: str, *, old: bool) -> Verdict:
        what = "the answer to earlier values" if old else "another answer than for new tensors elsewhere"
        return self._finding(
            "recycled",
            f"called with new tensors at the address of freed ones, the kernel returned {what} as {name}: it knows "
            "tensors by an address, a shape or a version, which the next tensor may have too",
            name,
            "cached-answer",
        )

    def _unsteady(self, name: str) -> Verdict:
        return unknown(NAME, f"{name} differs between calls on the same values: `repeat` comes first")

    def _works_for_new_values(self, least: int) -> bool:
        """Whether a call on new values does more work; else the call before did something once."""
        logical = other_values(self.context, self.case, self.trial.logical, NAME, "third")[1]
        return logical is not None and self._called(self._place(logical)).work > least

    def _place(self, logical: Mapping[str, Any]) -> Placed:
        with self.context.clock.phase("make"):
            return place(logical, self.case, self.context.device, FILLS[0])

    def _called(self, placed: Placed, *, watched: bool = False) -> _Call:
        """One call; ``watched`` also notes whether it runs the reference. Raises ``_Refused``, ``_Raised``."""
        returned: Tensors = {}

        def fused(**arguments: Any) -> Any:
            with (
                streams.delayed(self.context.device),
                self._reference_noted() if watched else contextlib.nullcontext(),
            ):
                result = self.spec.fused(**arguments)
            now = collect(result, placed.arguments, self.spec.mutates).tensors
            returned.update({name: now[name].detach().clone() for name in self.names if name in now})
            return result

        outcome = call_placed(self.context, fused, placed)
        if outcome.error is not None:
            raise _Refused if rejection(self.spec, outcome.error) is not None else _Raised(outcome)
        now = collect(outcome.result, placed.arguments, self.spec.mutates).tensors
        return _Call(placed, outcome, {name: now[name] for name in returned if name in now}, returned)

    @contextmanager
    def _reference_noted(self) -> Iterator[None]:
        reference = getattr(self.spec.reference, "stands_for", self.spec.reference)
        code = getattr(reference, "__code__", None)
        if code is None or sys.getprofile() is not None:
            yield
            return
        seen = False

        def note(frame: FrameType, event: str, _: Any) -> None:
            nonlocal seen
            seen = seen or (event == "call" and frame.f_code is code and _is_of(frame, reference))

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
        calls = self.context.state(ReferenceCalls)
        calls.watched += 1
        calls.ran += seen

    def first_wrong(self, outputs: Mapping[str, torch.Tensor]) -> str | None:
        """The first of the case's outputs that is missing or wrong here."""
        return next((n for n in self.names if n not in outputs or not self._is_right(n, outputs[n])), None)

    def _is_right(self, name: str, t: torch.Tensor) -> bool:
        """Whether this is the case's own answer: in every bit, or in value if it may vary."""
        if not repeat.differ(self.right[name], t):
            return True
        return name in self.varying and _judged(self.trial, name, t)

    def _late(self, call: _Call) -> Verdict | None:
        """The finding of a change between the return and the end of all work on the device."""
        for name, before in call.returned.items():
            if name in call.outputs and repeat.differ(before, call.outputs[name]):
                return self._late_finding(name)
        return None

    def _unfinished(self, call: _Call) -> Verdict | None:
        """As ``_late``, for a wrong result: whether it still changes."""
        begun = pristine.perf_counter()
        while pristine.perf_counter() - begun < self.patience_s:
            if (verdict := self._late(call)) is not None:
                return verdict
            sleep(_STEP_S)
        return None

    def _late_finding(self, name: str) -> Verdict:
        where = "another stream or thread" if self.context.device.type == "cuda" else "another thread"
        return self._finding(
            "late-work",
            f"{name} changed after the call had returned it: work was left on {where}, and who reads the result at "
            "once reads something else; wait for it before returning",
            name,
            "late-work",
        )

    def _raised(self, outcome: Outcome) -> Verdict:
        """The verdict on a call that raised: a finding, unless the case alone raises too."""
        error = outcome.error
        kind = type(error).__name__
        logical = self.trial.alone(self.case.with_(seed=numbers.mix(self.case.seed, NAME, "other") >> 1))
        if logical.failure is not None or logical.rejected is not None:
            return unknown(NAME, f"a call with other values raised {kind}")
        return failed(
            NAME,
            f"a later call on values that a first call takes raised {kind}: {error} (in {outcome.origin})",
            identity=f"honesty:raises:{kind}",
            cause="cached-answer",
        )

    def _finding(self, what: str, reason: str, name: str, cause: str) -> Verdict:
        return failed(NAME, reason, identity=f"honesty:{what}", output=name, cause=cause)


def _judged(trial: Trial, name: str, t: torch.Tensor) -> bool:
    """Whether `values` finds no wrong element."""
    if name not in trial.order or name in trial.excused():
        return True
    verdict = trial.judge_tensor(trial.order.index(name), t)
    return verdict.grade != "D" or verdict.statistical


def _held(answer: torch.Tensor, calls: Sequence[_Call]) -> bool:
    """Whether a tensor with these bits is alive that is not ours; walks over all objects, some 50 ms."""
    ours = {id(t) for call in calls for t in (*call.outputs.values(), *call.returned.values())}
    return any(
        type(thing) is torch.Tensor
        and id(thing) not in ours
        and thing.shape == answer.shape
        and thing.dtype == answer.dtype
        and thing.device == answer.device
        and not repeat.differ(thing.detach(), answer)
        for thing in gc.get_objects()
    )


def _scribble(t: torch.Tensor, inputs: Any) -> bool:
    """Overwrite a result, as its owner may; ``False`` where it shares memory with an input or is read-only."""
    if any(structure.overlap(t, other) for other in inputs):
        return False
    try:
        with torch.inference_mode():
            target = t.detach()
            for axis in expanded(target.shape, target.stride()):
                target = target.narrow(axis, 0, 1)
            if target.dtype.is_floating_point or target.is_complex():
                target.fill_(-0.40625)
            else:
                target.bitwise_not_()
    except RuntimeError:
        return False
    return True


def _is_of(frame: FrameType, function: Any) -> bool:
    """Whether a frame runs ``function`` with the same closure; one factory may make kernel and reference."""
    cells = getattr(function, "__closure__", None) or ()
    names = frame.f_code.co_freevars
    with contextlib.suppress(ValueError):  # a cell that is still empty
        return all(frame.f_locals.get(n) is cell.cell_contents for n, cell in zip(names, cells, strict=False))
    return True
