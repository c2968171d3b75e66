"""Check `honesty`: an answer is computed when it is asked for, is done when it is returned, and then is the caller's.

A few calls of a case that passed everything else, each of which some kernel does not survive that returns right answers
only while it is being judged, or only once:

* other values, then the same ones at another address, after the first result was written over by the caller: a result
  that the kernel keeps is spoilt, one that it remembers by content needs no operator and no launch;
* other tensors at the addresses of freed ones, as any allocator makes them, with as many writes behind them: a cache
  whose key is an address, a shape, a version or a number of an object that no longer lives, gives an old answer;
* results of earlier calls, compared with copies that were made when they were returned: what changes was unfinished
  (work on another thread or stream), or is memory that a later call used again;
* a call on a thread whose stack shows no test, without pytest among the imports or in the environment.

What a call replaced in torch, in the timers and in this package is noted by every call and reported here.

An honest cache is keyed by a tensor that it keeps alive or refers to weakly, and its version; all values here are
written by operators, which count it up. A kernel may cache what it does not return, keep threads, and call torch.
Not seen: a kernel that turns wrong after more calls than a test makes, or knows the plugin by its poison or its sizes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import sleep
from types import FrameType
from typing import Any

import torch

from pytest_fusion.case import numbers
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.run import genuine, incognito, stragglers
from pytest_fusion.run.fused import Outcome, run_fused
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.place import Placed, place, renewed
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.verdict import repeat, structure
from pytest_fusion.verdict.calls import Bench, rejection, shapes
from pytest_fusion.verdict.model import Verdict, failed, passed, unknown
from pytest_fusion.verdict.outputs import collect
from pytest_fusion.verdict.trial import Trial

NAME = "honesty"

# Three or four calls a case: what a kernel keeps or leaves running does not depend on its case.
_MOST_CASES, _ANY_CASES, _DEEP_CASES = 3, 2, 24
_UNOBSERVED_CASES = 2
# Counted where a finding was made: from then on the cases are those of its shrinking.
_FOUND = "honesty found"
_CALLED_REFERENCE, _ASKED_REFERENCE = "honesty called the reference", "honesty asked for the reference"
# How long a result that is not right when it is returned is looked at.
_WAIT_S, _STEP_S = 1.0, 0.01

Tensors = dict[str, torch.Tensor]


class _Refused(Exception):
    """A call was refused, which it may be."""


class _Raised(Exception):
    """A call raised what the first one did not; its outcome is the argument."""


def missing(spec: FusionSpec, device: torch.device) -> str | None:  # noqa: ARG001
    """It needs nothing but a kernel."""
    return None


def due(trial: Trial) -> bool:
    """Few cases of a test; every one in which something was replaced or whose finding is being shrunk."""
    bench = trial.bench
    if genuine.found():
        return True
    most = _DEEP_CASES if bench.deep else _MOST_CASES if trial.thorough else _ANY_CASES
    wanted = bench.complete or bool(bench.spent[_FOUND]) or bench.spent[NAME] < most
    return wanted and any(t.numel() for t in trial.got.tensors.values())


def run(trial: Trial) -> Verdict:
    """What the calls of this case replaced, then the calls described above."""
    spent = trial.bench.spent
    verdict = _tampering()
    if verdict is None:
        spent[NAME] += 1
        verdict = _Session(trial).judge()
        verdict = _tampering() or verdict
    spent[_FOUND] += verdict.failed
    return verdict


def summary(bench: Bench) -> list[Verdict]:
    """What the cases do not say one by one: that none was asked, or that nothing fused was called in any."""
    if not bench.spent[NAME]:
        return [unknown(NAME, "no case had a result with elements that passed everything else")]
    if 0 < bench.spent[_ASKED_REFERENCE] == bench.spent[_CALLED_REFERENCE]:
        return [
            unknown(
                NAME,
                "every call that was looked at ran the reference function itself, so the test compares it with itself; "
                "see which branch of the wrapper falls back to it here",
            )
        ]
    return []


def _tampering() -> Verdict | None:
    replaced, foreign = genuine.take(), genuine.foreign()
    if not (replaced or foreign):
        return None
    names = replaced or foreign
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    told = "a call of the kernel replaced" if replaced else "somebody replaced functions of this package:"
    after = "; it was put back and nothing was judged with it" if replaced else ""
    return failed(
        NAME,
        f"{told} {listed}{after}. Whoever uses it next in this process gets another function: patch where a caller can "
        "undo it, or not at all",
        identity="honesty:tampers",
        cause="tampers",
        replaced=names,
    )


@dataclass(slots=True)
class _Call:
    """One call: its results now, and copies made when it returned, on the caller's stream."""

    placed: Placed
    outcome: Outcome
    outputs: Tensors
    returned: Tensors

    @property
    def work(self) -> int:
        """Launches, and operators that compute something."""
        assert self.outcome.watch is not None
        return len(self.outcome.launches) + self.outcome.watch.computed


class _Session:
    """The calls of one case. Outputs that ``deterministic=`` allows to vary are left out."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.bench, self.spec = trial, trial.bench, trial.spec
        self.case = trial.result.case
        self.names = [name for name, t in trial.got.tensors.items() if t.numel() and not trial.tolerates(name)]
        self.right: Tensors = {name: trial.got.tensors[name].detach().clone() for name in self.names}
        self.other: _Call | None = None
        self.ran: list[str] = []
        self.left: dict[str, str] = {}

    def judge(self) -> Verdict:
        if not self.names:
            return unknown(NAME, "every output may vary from run to run, as deterministic= allows")
        steps = (("values", self._other_values), ("address", self._recycled), ("caller", self._unobserved))
        for name, step in steps:
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
        verdict = self._changed(self.trial.got.tensors, self.right, "a later call")
        if verdict is not None:
            return verdict
        if self.bench.device.type != "cuda":
            self.left["streams"] = "there are none on a CPU"
        if not self.ran:
            return unknown(NAME, "; ".join(self.left.values()))
        return passed(NAME, ran=self.ran, not_run=self.left)

    def _other_values(self) -> Verdict | None:
        """Other values, then the same ones elsewhere once the caller has written over the result."""
        logical = self._values("other")
        if logical is None:
            self.left["values"] = "no other values of the same shapes could be drawn"
            return None
        a = self.other = self._called(self._place(logical), told=True)
        verdict = self._late(a) or self._changed(self.trial.got.tensors, self.right, "the next call", a.outputs)
        if verdict is not None:
            return verdict
        # An output that is the same for other values (a table of positions) may be shared and remembered.
        depends = [name for name in self.names if name in a.returned and _differ(self.right[name], a.returned[name])]
        written = [name for name in depends if _scribble(a.outputs[name], a.placed.tensors.values())]
        b = self._called(self._place(logical))
        verdict = self._late(b)
        if verdict is not None:
            return verdict
        for name in self.names:
            if name not in a.returned or name not in b.returned:
                return unknown(NAME, f"{name} is not returned for other values")
            if not _differ(a.returned[name], b.returned[name]):
                continue
            if name in written and not _differ(b.returned[name], a.outputs[name]):
                return self._finding(
                    "kept",
                    f"{name} is memory that the kernel keeps: after the caller wrote over it, a call on the same values "
                    "returned what the caller had written",
                    name,
                    "cached-answer",
                )
            if not _differ(a.returned[name], self.right[name]):
                return self._recycled_finding(name, old=True)
            return self._unfinished(b) or self._unsteady(name)
        if depends and a.work and not b.work and self._works_for_new_values():
            return self._finding(
                "remembered",
                f"{depends[0]} was not computed: a call on values seen before launched no kernel and ran no operator, "
                "while one on new values does; the answer is looked up",
                depends[0],
                "cached-answer",
            )
        return self._changed(b.outputs, b.returned, "another thread")

    def _recycled(self) -> Verdict | None:
        """Other tensors with the case's own values where the last ones' memory was."""
        if self.other is None:
            self.left["address"] = "no other values were called"
            return None
        placed, returned, self.other = self.other.placed, self.other.returned, None
        names, arena = tuple(placed.tensors), placed.arena
        living = [weakref.ref(tensor) for tensor in placed.tensors.values()]
        placed.arguments.clear()
        placed.tensors.clear()
        if any(reference() is not None for reference in living):
            # Who keeps a tensor alive may know it by its address: no other one can be there.
            self.left["address"] = "the kernel keeps its inputs alive, so that their addresses are not used again"
            return None
        with self.bench.clock.phase("make"):
            fresh = renewed(arena, names, self.trial.logical)
            arena.refill(FILLS[0])
        got = self._called(fresh)
        wrong = self._wrong(got)
        if wrong is None:
            return self._late(got)
        verdict = self._late(got)
        if verdict is not None:
            return verdict
        if wrong in returned and wrong in got.returned and not _differ(returned[wrong], got.returned[wrong]):
            return self._recycled_finding(wrong, old=True)
        verdict = self._unfinished(got)
        if verdict is not None:
            return verdict
        elsewhere = self._wrong(self._called(self._place(self.trial.logical)))
        return self._recycled_finding(wrong, old=False) if elsewhere is None else self._unsteady(wrong)

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

    def _unobserved(self) -> Verdict | None:
        """A call that shows no test; where it differs, one in the same place that does."""
        if self.bench.spent[NAME] > _UNOBSERVED_CASES and not (self.bench.spent[_FOUND] or self.bench.complete):
            self.left["caller"] = "asked of other cases"
            return None
        frames: list[incognito.Frame] = []
        verdict, wrong = None, self._in_thread(frames, hidden=True)
        if wrong is None:
            return None
        # A thread has its own autocast, default device and locals: only the stack may make the difference.
        if self._in_thread(frames, hidden=False) is not None or self._in_thread([], hidden=True) is None:
            self.left["caller"] = "the answer is another one in another thread, whoever calls"
            return None
        verdict = self._finding(
            "caller",
            f"{wrong} when nothing shows that a test calls: without pytest on the stack, among the imports and in the "
            "environment",
            wrong.partition(" ")[0],
            "detects-test",
        )
        return verdict

    def _in_thread(self, frames: list[incognito.Frame], *, hidden: bool) -> str | None:
        """What is wrong with a call in a thread; ``frames`` are noted by the first and shown by the one not hidden."""
        prepare: Callable[[], Any] = partial(torch.set_grad_enabled, torch.is_grad_enabled())
        if self.bench.device.type == "cuda":
            prepare = partial(torch.cuda.set_device, self.bench.device)
        shown = [] if hidden else frames

        def fused(**arguments: Any) -> Any:
            frames[:] = frames or incognito.stack()[:-1]
            return incognito.called(partial(self.spec.fused, **arguments), prepare, shown)

        placed = self._place(self.trial.logical)
        with self.bench.clock.phase("fused"):
            outcome = run_fused(fused, placed, self.bench.extra, programs=self.bench.programs)
        if outcome.error is not None:
            return f"the kernel raises {type(outcome.error).__name__}"
        outputs = collect(outcome.result, placed.arguments, self.spec.mutates).tensors
        wrong = next((name for name in self.names if name not in outputs or _differ(self.right[name], outputs[name])), "")
        return f"{wrong} is another one" if wrong else None

    def _works_for_new_values(self) -> bool:
        """Whether a call on values never seen does some work: else it is work that nobody sees."""
        logical = self._values("third")
        return logical is not None and self._called(self._place(logical)).work > 0

    def _values(self, which: str) -> Mapping[str, Any] | None:
        """Other values of the same shapes."""
        case = self.case.with_(seed=numbers.mix(self.case.seed, NAME, which) >> 1)
        try:
            with self.bench.clock.phase("make"):
                logical = make_inputs(self.spec, case, self.bench.device)
        except (ImpossibleCase, InputFailed):
            return None
        return logical if shapes(logical) == shapes(self.trial.logical) else None

    def _place(self, logical: Mapping[str, Any]) -> Placed:
        with self.bench.clock.phase("make"):
            return place(logical, self.case, self.bench.device, FILLS[0])

    def _called(self, placed: Placed, *, told: bool = False) -> _Call:
        """One call. ``told`` also notes whether it runs the reference. Raises ``_Refused``, ``_Raised``."""
        returned: Tensors = {}

        def fused(**arguments: Any) -> Any:
            with stragglers.delayed(self.bench.device), self._reference_noted() if told else _unnoted():
                result = self.spec.fused(**arguments)
            now = collect(result, placed.arguments, self.spec.mutates).tensors
            returned.update({name: now[name].detach().clone() for name in self.names if name in now})
            return result

        with self.bench.clock.phase("fused"):
            outcome = run_fused(fused, placed, self.bench.extra, programs=self.bench.programs)
        if outcome.error is not None:
            raise _Refused if rejection(self.spec, outcome.error) is not None else _Raised(outcome)
        now = collect(outcome.result, placed.arguments, self.spec.mutates).tensors
        return _Call(placed, outcome, {name: now[name] for name in returned if name in now}, returned)

    @contextmanager
    def _reference_noted(self) -> Iterator[None]:
        code = getattr(self.spec.reference, "__code__", None)
        if code is None or sys.getprofile() is not None:
            yield
            return
        seen = False

        def note(frame: FrameType, event: str, _: Any) -> None:
            nonlocal seen
            seen = seen or (event == "call" and frame.f_code is code)

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
        self.bench.spent[_ASKED_REFERENCE] += 1
        self.bench.spent[_CALLED_REFERENCE] += seen

    def _wrong(self, call: _Call) -> str | None:
        """The first output that is not the case's own answer."""
        for name in self.names:
            if name not in call.returned or _differ(self.right[name], call.returned[name]):
                return name
        return None

    def _late(self, call: _Call) -> Verdict | None:
        """What changed between the return and the end of all work on the device."""
        return self._changed(call.outputs, call.returned, "another thread")

    def _unfinished(self, call: _Call) -> Verdict | None:
        """As ``_late``, of a result that is wrong: whether it still changes."""
        begun = genuine.perf_counter()
        while genuine.perf_counter() - begun < _WAIT_S:
            verdict = self._late(call)
            if verdict is not None:
                return verdict
            sleep(_STEP_S)
        return None

    def _changed(self, held: Tensors, kept: Tensors, by: str, later: Tensors | None = None) -> Verdict | None:
        """The first result that is no longer what it was when it was returned."""
        for name, before in kept.items():
            if name not in held or not _differ(before, held[name]):
                continue
            if later is not None and any(structure.overlap(held[name], t) for t in later.values()):
                return self._finding(
                    "overwritten",
                    f"{name} of an earlier call was changed by {by}, which returned the same memory: who keeps a result "
                    "finds another one in it; allocate it anew, or let the caller pass it in",
                    name,
                    "aliasing",
                )
            where = "another stream or thread" if held[name].is_cuda else by
            return self._finding(
                "late-work",
                f"{name} changed after the call had returned it: work was left on {where}, and who reads the result "
                "in time reads something else; wait for it before returning",
                name,
                "late-work",
            )
        return None

    def _raised(self, outcome: Outcome) -> Verdict:
        """A call raised: by itself such a case may do so too, and then `error` will say so; else that is a finding."""
        error = outcome.error
        kind = type(error).__name__
        logical = self.trial.alone(self.case.with_(seed=numbers.mix(self.case.seed, NAME, "other") >> 1))
        if logical.failure is not None or logical.rejected is not None:
            return unknown(NAME, f"a call with other values raised {kind}")
        return failed(
            NAME,
            f"a later call on values that a first call bears raised {kind}: {error} (in {outcome.origin})",
            identity=f"honesty:raises:{kind}",
            cause="cached-answer",
        )

    def _finding(self, what: str, reason: str, name: str, cause: str) -> Verdict:
        return failed(NAME, reason, identity=f"honesty:{what}", output=name, cause=cause)


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return repeat.first_difference({"": a}, {"": b}) is not None


def _scribble(t: torch.Tensor, inputs: Any) -> bool:
    """Write over a result, as its owner may; ``False`` where it lies in the call's own inputs or takes no writing."""
    if any(structure.overlap(t, other) for other in inputs):
        return False
    try:
        with torch.inference_mode():
            target = t.detach()
            for axis, stride in enumerate(target.stride()):
                if stride == 0 and target.shape[axis] > 1:
                    target = target.narrow(axis, 0, 1)
            if target.dtype.is_floating_point or target.is_complex():
                target.fill_(-0.40625)
            else:
                target.bitwise_not_()
    except RuntimeError:
        return False
    return True


@contextmanager
def _unnoted() -> Iterator[None]:
    yield
