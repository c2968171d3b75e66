"""Check `compile`: a compiler or a CUDA graph of the call gives what the call itself gives.

Opt-in, by ``compile=True``, by a bound in ``max_recompiles=``, or in the profile `deep`. In this order: custom
operators (with ``grad=``, of backward too) make fake tensors of the form that they return, and pass
``torch.library.opcheck``; ``torch.compile`` with ``fullgraph=True`` is right for static and dynamic sizes; compilations
are counted over a sweep of sizes; a CUDA graph of the call is right when replayed on other values. On the CPU lane an
interpreted launch compiles only inside a custom operator, without generated code. A refusal to compile or capture is
`unknown` in `deep`, else a failure.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fusion.case import regimes
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.layouts import geometry
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.case.plan import refit
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import CaseResult, Context, other_values, reference_of, rejection
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.gradients.backward import Attempt
from pytest_fusion.checks.gradients.upstream import NoGraph, Upstream
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, passed, unknown
from pytest_fusion.oracle.reference import ReferenceFailed
from pytest_fusion.run import compilers
from pytest_fusion.run.fused import bare, called
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.operators import Form, Log, Made, OperatorCall, logged, opcheck
from pytest_fusion.run.placing import Placed, place, rewrite
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief

NAME = "compile"

# Operators run on up to 24 cases, each with a tensor in a new layout: a fake that copies strides is wrong only for a
# transposed tensor. Compiling takes seconds with generated code, so few plain and few strided cases are compiled.
_MOST_CASES = 24
_COMPILED_OF_A_KIND = 2
# While a finding shrinks, only its own part runs, and ends early where each step compiles.
_STEPS, _COMPILED_STEPS = 60, 10
_OF_OPERATORS = ("wrong-fake", "operator-contract")
# Sizes that differ in what compilers specialise on: 16-byte multiples, powers of two, neither.
_SWEEP = (17, 32, 48, 63, 64, 100, 128)
_MOST_SIZES = 14
_INTERPRETED = (
    "the call launches Triton kernels outside of a custom operator, and torch.compile cannot trace interpreted "
    "launches: wrap them in torch.library.custom_op, or run this on a GPU"
)
_LOOKED_INTO = "compilers look inside it, and cannot trace interpreted launches; a GPU tries it"
_NO_BACKWARD = "no case of finite values came to a backward, whose operators were not tried"


@dataclass(slots=True)
class _State:
    """The check's state in one test. ``ran``: what was tried, in words."""

    plain: int = 0
    layouts: set[tuple[Any, ...]] = field(default_factory=set)
    cases: int = 0
    compiled: Counter[str] = field(default_factory=Counter)
    ran: dict[str, None] = field(default_factory=dict)
    left: dict[str, None] = field(default_factory=dict)
    # Whether the operators of a backward were tried.
    backward: bool = False
    swept: bool = False
    recompiles: str = ""
    found: str = ""
    steps: int = 0


def wanted(spec: FusionSpec) -> bool:
    """Whether the spec itself requests this check."""
    return spec.compile or spec.max_recompiles is not None


def due(trial: Trial) -> bool:
    """A few cases of ordinary values, plain and strided; every case while a finding shrinks."""
    context, case = trial.context, trial.result.case
    if not (wanted(trial.spec) or context.deep):
        return False
    state = context.state(_State)
    if state.found:
        state.steps += 1
        return state.steps <= (_STEPS if state.found in _OF_OPERATORS else _COMPILED_STEPS)
    if context.complete:
        return True
    if any(regimes.is_special(tensor.regime) for tensor in case.tensors.values()):
        return False
    if not any(isinstance(t, torch.Tensor) and t.numel() > 1 for t in trial.logical.values()):
        return False
    if _kind(case) == "plain":
        return state.plain < _COMPILED_OF_A_KIND
    return not _layouts(trial) <= state.layouts and state.cases < _MOST_CASES


def _kind(case: Case) -> str:
    return "plain" if all(tensor.layout.plain for tensor in case.tensors.values()) else "strided"


def _layouts(trial: Trial) -> set[tuple[Any, ...]]:
    """Each tensor's layout, without its offset, and its order of axes: a transposed single column is contiguous."""
    found: set[tuple[Any, ...]] = set()
    for name, tensor in trial.result.case.tensors.items():
        value = trial.logical.get(name)
        if isinstance(value, torch.Tensor):
            strides = geometry(tuple(value.shape), tensor.layout).strides
            axes = [axis for axis, size in enumerate(value.shape) if size > 1]
            order = sorted(axes, key=lambda axis: -strides[axis])
            found.add((name, tensor.layout.kind, tensor.layout.variant, tuple(order)))
    return found


def run(trial: Trial) -> Verdict:
    """The first finding; `unknown` where only a part could be tried."""
    state, case = trial.context.state(_State), trial.result.case
    state.cases += 1
    state.plain += _kind(case) == "plain"
    state.layouts |= _layouts(trial)
    found = _Compiling(trial, state).run()
    if found is None:
        return unknown(NAME, "; ".join(state.left)) if state.left else passed(NAME, ran=list(state.ran))
    if found.failed:
        state.found = str(found.cause)
    return found


def summary(context: Context) -> Verdict:
    """What was tried, and what was not and why."""
    state = context.state(_State)
    if not (wanted(context.spec) or context.deep):
        return unknown(NAME, "not requested: compile=True or --fusion-profile deep switches it on")
    if not state.ran and not state.left:
        return unknown(NAME, "no case of ordinary values with more than one element was judged")
    words = ", ".join(state.ran) + (f"; {state.recompiles}" if state.recompiles else "")
    left = list(state.left) or ([_NO_BACKWARD] if context.spec.grad and not state.backward else [])
    if left:
        return unknown(NAME, "; ".join([*left, *([f"tried: {words}"] if words else [])]))
    if context.device.type != "cuda":
        words += "; code generation and CUDA graphs are for a GPU to try"
    return Verdict(NAME, "pass", words)


class _Compiling:
    """The parts of the check on one case."""

    def __init__(self, trial: Trial, state: _State) -> None:
        self.trial, self.context, self.spec, self.state = trial, trial.context, trial.spec, state
        self.on_gpu = trial.context.device.type == "cuda"

    def run(self) -> Verdict | None:
        """The first finding of any part."""
        state, kind = self.state, _kind(self.trial.result.case)
        with self.context.clock.phase(NAME):
            log = self.log()
            if log is None:
                return None
            if state.found in _OF_OPERATORS or not state.found:
                found = self.operators(log.calls.values()) or self.backward(log)
                if found is not None or state.found:
                    return found
            if not state.found and state.compiled[kind] >= _COMPILED_OF_A_KIND:
                return None
            state.compiled[kind] += 1
            with compilers.compiling():
                return self.compiled(log) or self.captured()

    def place(self, case: Case, logical: Mapping[str, Any]) -> Placed:
        return place(logical, case, self.context.device, FILLS[0])

    def call(self, fused: Callable[..., Any], placed: Placed) -> tuple[Any, Exception | None]:
        return called(fused, placed.arguments, self.context.extra)

    def fail(self, reason: str, slug: str, *, where: str = "", statistical: bool = False, **evidence: Any) -> Verdict:
        identity = f"{NAME}:{slug}" + (f":{where}" if where else "")
        return failed(NAME, reason, identity=identity, statistical=statistical, cause=slug, **evidence)

    def refuse(self, reason: str, slug: str, *, where: str = "", **evidence: Any) -> Verdict | None:
        """A refusal, not a wrong answer: a failure where the spec requests this check, else `unknown`."""
        if wanted(self.spec):
            return self.fail(reason, slug, where=where, **evidence)
        self.state.left[reason] = None
        return None

    def log(self) -> Log | None:
        """The operators of an eager call of this case; ``None`` where it raises, which other checks report."""
        placed = self.place(self.trial.result.case, self.trial.logical)
        with logged() as log:
            _, error = self.call(self.spec.fused, placed)
        return log if error is None else None

    def backward(self, forward: Log) -> Verdict | None:
        """The operators of forward and backward where a graph is recorded, except those in ``forward``."""
        trial, state = self.trial, self.state
        if gradients.missing(self.spec, self.context.device) is not None or not gradients.due(trial):
            return None
        # A fake that copies the upstream gradient's strides is wrong only for a transposed one, which few cases draw.
        own, calls = Upstream.of(trial, gradients.wanted(trial)), dict[Form, OperatorCall]()
        error: BaseException | None = None
        try:
            own.settle()
            for upstream in (own, own.transposed()):
                with logged() as log:
                    error = error or Attempt(trial, upstream, FILLS[0]).outcome.error
                calls |= log.calls
        except (NoGraph, ReferenceFailed) as why:
            error = why
        if error is not None:
            if rejection(self.spec, error) is None:
                state.left[f"the operators of a backward could not be tried: {brief(error)[:300]}"] = None
            return None
        state.backward = True
        fresh = [call for form, call in calls.items() if form not in forward.calls]
        if not self.on_gpu:
            state.left.update(dict.fromkeys(f"{call.name}: {_LOOKED_INTO}" for call in fresh if call.decomposes))
        return self.operators(fresh)

    def operators(self, calls: Iterable[OperatorCall]) -> Verdict | None:
        for call in calls:
            if call.decomposes and not self.on_gpu:
                continue
            found = self.fake(call) or self.opcheck(call)
            if found is not None:
                return found
            self.state.ran[f"operator {call.name}"] = None
        return None

    def fake(self, call: OperatorCall) -> Verdict | None:
        try:
            with bare(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = call.fake()
        except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
            reason = f"{call.name} makes nothing of fake tensors: {brief(error)[:300]}; register it with register_fake"
            return self.refuse(reason, "wrong-fake", where=call.name, operator=call.name)
        for what, got, real in _differences(made, call.made):
            return self.fail(
                f"{call.name}: its fake implementation returns {what} {got}, the operator itself {real}; compiled code "
                "is generated for what the fake says",
                "wrong-fake",
                where=f"{call.name}:{what.partition(' ')[0]}",
                operator=call.name,
                fake=str(got),
                real=str(real),
            )
        return None

    def opcheck(self, call: OperatorCall) -> Verdict | None:
        call.restore()
        wrong, left = opcheck(call.operator, call.args, call.kwargs)
        self.state.left.update(dict.fromkeys(left))
        for test, reason in wrong.items():
            return self.fail(
                f"torch.library.opcheck of {call.name}: {test}: {reason}",
                "operator-contract",
                where=f"{call.name}:{test}",
                operator=call.name,
                test=test,
            )
        return None

    def compiled(self, log: Log) -> Verdict | None:
        if not self.on_gpu and (log.outside or any(call.decomposes for call in log.calls.values())):
            self.state.left[_INTERPRETED] = None
            return None
        backend = "inductor" if self.on_gpu else "aot_eager"
        for dynamic in (True, None):
            found = self.agrees(compilers.compiled(self.spec.fused, backend, dynamic=dynamic), dynamic)
            if found is not None or self.state.left:
                return found
        self.state.ran[f"torch.compile with {backend}"] = None
        if self.state.swept and self.state.found not in ("compile-differs", "recompiles"):
            return None
        self.state.swept = True
        return self.sweep(backend)

    def agrees(self, compiled: Callable[..., Any], dynamic: bool | None) -> Verdict | None:
        case, how = self.trial.result.case, f"torch.compile(fullgraph=True, dynamic={dynamic})"
        placed = self.place(case, self.trial.logical)
        result, error = self.call(compiled, placed)
        if error is not None:
            return self.raised(how, error)
        wrong = self.trial.wrong(result, placed)
        if wrong is None:
            return None
        return self.fail(
            f"under {how}: {wrong.reason}", "compile-differs", where=wrong.identity, statistical=wrong.statistical,
            how=how, inner=wrong.check, found=wrong.facts,
        )  # fmt: skip

    def raised(self, how: str, error: Exception) -> Verdict | None:
        if rejection(self.spec, error) is not None:
            return None
        kind, line = type(error).__name__, brief(error)[:300]
        refuses = compilers.refuses(error)
        if refuses is None:
            self.state.left[f"{how} failed inside torch: {line}"] = None
            return None
        if refuses:
            reason = f"{how} cannot take the call whole: {line}; wrap the kernel in torch.library.custom_op"
            return self.refuse(reason, "graph-break", error=kind)
        return self.fail(f"under {how} the call raised {line}", "compile-differs", where=kind, error=kind)

    def sweep(self, backend: str) -> Verdict | None:
        """Calls at other sizes, eager and compiled; counts the compilations."""
        compiled = compilers.compiled(self.spec.fused, backend, dynamic=None)
        placed = self.place(self.trial.result.case, self.trial.logical)
        with compilers.specialisations() as first:
            self.call(self.spec.fused, placed)
        self.call(compiled, placed)
        graphs, sizes = compilers.graphs(), 0
        kernels: dict[int, Any] = dict(first)
        for case in self.sizes():
            try:
                logical = make_inputs(self.spec, case, self.context.device)
            except (ImpossibleCase, InputFailed):
                continue
            with compilers.specialisations() as seen:
                _, error = self.call(self.spec.fused, self.place(case, logical))
            if error is not None:
                continue
            sizes += 1
            kernels |= seen
            placed = self.place(case, logical)
            result, error = self.call(compiled, placed)
            listed = " ".join(f"{name}={size}" for name, size in case.sizes.items())
            how = f"torch.compile(fullgraph=True), called at other sizes before, at {listed}"
            if error is not None:
                return self.raised(how, error)
            wrong = self.judged_as(case, logical, result, placed)
            if wrong is not None:
                return self.fail(
                    f"{how}: {wrong.reason}", "compile-differs", where="sweep", inner=wrong.check, found=wrong.facts
                )
        counts = {"torch.compile": compilers.graphs() - graphs, "Triton": len(kernels) - len(first)}
        self.state.recompiles = f"over {sizes} other sizes torch.compile recompiled {counts['torch.compile']} time(s)"
        if self.on_gpu:
            self.state.recompiles += f", Triton {counts['Triton']}"
        bound = self.spec.max_recompiles
        if bound is None or max(counts.values()) <= bound:
            return None
        return self.fail(
            f"{self.state.recompiles}; max_recompiles={bound} allows fewer. Constants that follow a size, and sizes "
            "that are specialised on (do_not_specialize), are compiled anew",
            "recompiles",
            sizes=sizes,
            graphs=counts["torch.compile"],
            kernels=counts["Triton"],
            allowed=bound,
        )

    def sizes(self) -> Iterator[Case]:
        """The case with one dim after the other at the sizes of the sweep, within bounds; up to `_MOST_SIZES`."""
        case, known, made = self.trial.result.case, {repr(self.trial.result.case.sizes)}, 0
        for size in _SWEEP:
            for name in self.spec.dim_order:
                try:
                    fitted = refit(self.spec, {**case.sizes, name: size})
                except ImpossibleCase:
                    continue
                if repr(fitted) not in known and made < _MOST_SIZES:
                    known.add(repr(fitted))
                    made += 1
                    yield case.with_(sizes=fitted)

    def judged_as(self, case: Case, logical: Mapping[str, Any], result: Any, placed: Placed) -> Verdict | None:
        """The verdict on another case's result; a wrong one that the eager call shares is no finding here."""
        try:
            reference, expected = reference_of(self.context, case, logical)
        except ReferenceFailed:
            return None
        trial = Trial(self.context, CaseResult(case), logical, reference, expected, self.trial.alone)
        wrong = trial.wrong(result, placed)
        if wrong is None or wrong.statistical:
            return None
        eager = self.place(case, logical)
        again, error = self.call(self.spec.fused, eager)
        return wrong if error is None and trial.wrong(again, eager) is None else None

    def captured(self) -> Verdict | None:
        """A CUDA graph of the call, replayed on other values in the same memory."""
        if not self.on_gpu:
            return None
        if self.spec.syncs:
            self.state.ran["no CUDA graph: syncs=True says that the call waits for the device"] = None
            return None
        case = self.trial.result.case
        placed = self.place(case, self.trial.logical)
        other, logical = other_values(self.context, case, self.trial.logical, "captured")
        if logical is None or _plain(logical) != _plain(self.trial.logical):
            return None  # host values that depend on the input are part of the graph
        graph, error = self.call(lambda **given: compilers.Captured(self.spec.fused, given, self.context.extra), placed)
        if error is not None:
            if rejection(self.spec, error) is not None:
                return None
            reason = (
                f"the call cannot be captured in a CUDA graph: {brief(error)[:300]}; it waits for the device or "
                "launches on another stream. Declare syncs=True if it has to wait"
            )
            return self.refuse(reason, "graph-capture", error=type(error).__name__)
        rewrite(placed, logical)
        result, error = self.call(lambda **_: graph.replay(), placed)
        if error is not None:
            return self.fail(f"replaying a CUDA graph of the call raised {brief(error)[:300]}", "graph-capture")
        wrong = self.judged_as(other, logical, result, placed)
        if wrong is not None:
            return self.fail(
                f"a CUDA graph of the call, replayed on changed values: {wrong.reason}; what was computed on the host "
                "or kept from the capture is not computed again",
                "graph-capture",
                where=wrong.identity,
                inner=wrong.check,
                found=wrong.facts,
            )
        self.state.ran["a CUDA graph"] = None
        return None


def _differences(fake: list[Made], real: list[Made]) -> Iterator[tuple[str, object, object]]:
    """How two forms of each tensor differ; strides count only where they matter."""
    if len(fake) != len(real):
        yield "a number of tensors", len(fake), len(real)
        return
    for ours, theirs in zip(fake, real, strict=True):
        at = f" of result {ours.path}" if ours.path else ""
        if ours.shape != theirs.shape:
            yield f"shape{at}", ours.shape, theirs.shape
        elif ours.dtype != theirs.dtype:
            yield f"dtype{at}", ours.dtype, theirs.dtype
        elif ours.device != theirs.device:
            yield f"device{at}", ours.device, theirs.device
        elif 0 not in ours.shape and any(
            a != b for a, b, size in zip(ours.strides, theirs.strides, ours.shape, strict=True) if size > 1
        ):
            yield f"strides{at}", ours.strides, theirs.strides


def _plain(logical: Mapping[str, Any]) -> str:
    return repr({name: value for name, value in logical.items() if not isinstance(value, torch.Tensor)})


CHECK = Check(NAME, run, due=due, summary=summary)
