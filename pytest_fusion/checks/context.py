"""The context of a test, calls of kernel and reference on one case, their outputs by name, what ends a case early."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.containers import leaves, nesting, tensors_by_name
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.checks.vacuity import Vacuity
from pytest_fusion.checks.verdict import (
    NO_ROOM_TO_JUDGE,
    NOT_MODELLED,
    OUT_OF_MEMORY,
    TOO_EXPENSIVE,
    Deviation,
    Verdict,
    failed,
)
from pytest_fusion.errors import GridTooLargeError, TooManyProgramsError
from pytest_fusion.interpreter.control.batch import EndlessLoopError
from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.oracle import OutputLanes, TooSlow
from pytest_fusion.oracle.reference import FEW_LANES, ReferenceFailed, ReferenceRun, run_reference
from pytest_fusion.run.autotuned import Tuned
from pytest_fusion.run.clock import Clock
from pytest_fusion.run.fused import Outcome, run_fused
from pytest_fusion.run.placing import Placed, place
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.promises import Tolerance
from pytest_fusion.spec.wording import first_line, not_modelled, out_of_memory, raised_by_filter

State = TypeVar("State")

# Checks whose failure may cause later ones on the same case: a result is wrong or missing.
SPOILING = frozenset({"error", "crash", "structure", "bounds", "unwritten", "repeat", "values"})


@dataclass(slots=True)
class Progress:
    """What the cases of a test have shown so far; the only part of a context that changes."""

    clock: Clock = field(default_factory=Clock)
    vacuity: Vacuity = field(default_factory=Vacuity)
    # Operators of the reference without a rule, priced in float32.
    fallbacks: set[str] = field(default_factory=set)
    # Statistical findings that fresh values did not repeat.
    unrepeated: int = 0
    # The case looks for block sizes, on a GPU.
    probing: bool = False
    # The first reason for each kind of rejection.
    refusals: dict[str, str] = field(default_factory=dict)
    # The state of each check, one object of each class.
    states: dict[type, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Focus:
    """The purpose of a run beyond judging: none, the minimum of a failure, or the end of a test.

    ``until`` is the last check of `registry` that runs; empty for none, ``None`` for all. ``sought`` is the identity of
    the failure that shrinks; a check stops after the step that shows it. ``closing``: all cases passed, and checks may
    run what would have hidden other findings. ``known`` identities were found before and end no case.
    """

    until: str | None = None
    sought: str | None = None
    closing: bool = False
    known: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Context:
    """What judging depends on beside the case: the spec, the device, limits, and the purpose."""

    spec: FusionSpec
    device: torch.device
    # Fixtures and parameters of the test that are no inputs.
    extra: Mapping[str, Any] = field(default_factory=dict)
    programs: int = 600
    # The limit of one run of the reference with its roundings; slower cases are rejected.
    reference_s: float = math.inf
    # There is no other case for parts of a check.
    complete: bool = False
    # The profile is `deep`: a nightly run, in which checks run on more cases.
    deep: bool = False
    # A budget of seconds ends the test: what is only of interest is looked at less.
    timed: bool = False
    focus: Focus = Focus()
    progress: Progress = field(default_factory=Progress)
    # Called with each check of `registry` before it runs, as its calls may end the process.
    began: Callable[[str], None] = lambda _: None

    @property
    def clock(self) -> Clock:
        """The seconds that were spent so far, by phase and by check."""
        return self.progress.clock

    def state(self, kind: type[State]) -> State:
        """The state of a check, by class; made when first read."""
        found = self.progress.states.setdefault(kind, kind())
        assert isinstance(found, kind)
        return found

    def on(self, check: str) -> bool:
        """Whether the spec leaves this check, or part of a check, on."""
        return check not in self.spec.without


@dataclass(slots=True)
class CaseResult:
    """What one case showed. ``case`` is the failing one, possibly with another seed than the judged one."""

    case: Case
    verdicts: list[Verdict] = field(default_factory=list)
    # Failures of checks that the spec switches off; no other check reports them.
    waived: list[Verdict] = field(default_factory=list)
    rejected: str | None = None
    launches: list[Launch] = field(default_factory=list)
    # The reference returned, or wrote, something to compare with.
    compared: bool = False
    # Triton launches, and operators of torch that compute or copy, of the first call.
    work: int = 0
    # The autotuned kernels that calls of this case launched, by identity.
    tuned: dict[int, Tuned] = field(default_factory=dict)
    # The failing output and the reference's lanes, for the error map of the report.
    evidence: tuple[str, torch.Tensor, OutputLanes | torch.Tensor] | None = None
    # Elements of an output or gradient with wrong bits, where bits fail and no price was needed; for the error map.
    differs: tuple[str, torch.Tensor] | None = None
    trace: str = ""
    # The last of the checks in `further` that concluded; empty where none ran.
    reached: str = ""
    # Identities of failures that the test has found before.
    known: frozenset[str] = frozenset()

    @property
    def failure(self) -> Verdict | None:
        """The new failure that ended the case."""
        return next(
            (verdict for verdict in self.verdicts if verdict.failed and verdict.identity not in self.known), None
        )

    @property
    def findings(self) -> list[Verdict]:
        """Each new failure and hazard, once."""
        new = [v for v in self.verdicts if v.status in ("fail", "hazard") and v.identity not in self.known]
        return list({verdict.identity: verdict for verdict in reversed(new)}.values())[::-1]

    def spoiled_by(self) -> Verdict | None:
        """A known failure that other failures here may follow from."""
        return next((v for v in self.verdicts if v.failed and v.identity in self.known and v.check in SPOILING), None)

    @property
    def ratio(self) -> float | None:
        """Worst error over the allowed one."""
        for verdict in self.verdicts:
            if verdict.check == "values" and isinstance(verdict.evidence, Deviation):
                return verdict.evidence.ratio
        return None


def call(context: Context, case: Case, logical: Mapping[str, Any], fill: str) -> tuple[Outcome, Placed]:
    with context.clock.phase("make"):
        placed = place(logical, case, context.device, fill)
        placed.arena.snapshot()
    return call_placed(context, context.spec.fused, placed), placed


def call_placed(context: Context, fused: Callable[..., Any], placed: Placed) -> Outcome:
    """One call of the kernel, or of a function that calls it, on placed inputs."""
    with context.clock.phase("fused"):
        return run_fused(fused, placed, context.extra, programs=context.programs)


def rejection(spec: FusionSpec, error: BaseException) -> str | None:
    """The kind of rejection where an error is no failure, else ``None``."""
    if isinstance(error, TooManyProgramsError):
        return TOO_EXPENSIVE
    if not_modelled(error) is not None:
        return NOT_MODELLED
    if out_of_memory(error):
        return OUT_OF_MEMORY
    return type(error).__name__ if isinstance(error, tuple(spec.rejects)) else None  # type: ignore[arg-type]


def unasked(error: ReferenceFailed) -> str:
    """The kind of rejection where the reference fails, usually outside of its own domain."""
    why = error.__cause__
    if isinstance(why, TooSlow):
        return TOO_EXPENSIVE
    if out_of_memory(why):
        return NO_ROOM_TO_JUDGE
    return NOT_MODELLED if not_modelled(why) is not None else f"reference {type(why).__name__}"


def reject(context: Context, result: CaseResult, kind: str, error: BaseException) -> CaseResult:
    """The result of a case that is not judged."""
    line = raised_by_filter(error)
    advice = f" (a warnings filter makes it an error: -W {line} lets it pass)" if line is not None else ""
    context.progress.refusals.setdefault(kind, first_line(not_modelled(error) or error)[:200] + advice)
    result.rejected = kind
    if kind in (OUT_OF_MEMORY, NO_ROOM_TO_JUDGE) and context.device.type == "cuda":
        # Memory that torch caches is needed to load the next kernel and other processes' contexts.
        torch.cuda.empty_cache()
    return result


def error_verdict(outcome: Outcome) -> Verdict:
    error = outcome.error
    assert error is not None
    kind = type(error).__name__
    text = first_line(error)
    what = f"the kernel raised {kind}: {text}".rstrip(": ")
    advice = f" (in {outcome.origin}); list the type in rejects= if refusing this case is meant"
    if (line := raised_by_filter(error)) is not None:
        advice = (
            f" (in {outcome.origin}): a warning that this run's warnings filter makes an error, which no caller need "
            f"have; let it pass with -W {line}, or with {line!r} in filterwarnings of the ini file"
        )
    if outcome.raiser == "test" and isinstance(error, AssertionError):
        what, advice = f"the test's own assertion failed: {text}".rstrip(": "), f" (in {outcome.origin})"
    endless = isinstance(error.__cause__, EndlessLoopError)
    if endless:
        advice = f" (in {outcome.origin})"
    if isinstance(error, GridTooLargeError):
        what, advice = text, "; where no caller has as many, bound the dim with dims="
    return failed(
        "error",
        what + advice,
        identity=f"error:{kind}:{outcome.origin}",
        cause="hang" if endless else None,
        error=kind,
        origin=outcome.origin,
    )


def tensors_of(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor by the name of its memory, including those in containers."""
    return {inner: t for name, value in arguments.items() for inner, t in tensors_by_name(name, value).items()}


def reference_of(
    context: Context, case: Case, logical: Mapping[str, Any], *, priced: bool = True
) -> tuple[ReferenceRun, Outputs]:
    """The reference's run and outputs; with lanes if its rounding is ``priced`` and no tolerance is fixed."""
    spec = context.spec
    lanes = FEW_LANES if priced and not isinstance(spec.tolerance, Tolerance) else 0
    with context.clock.phase("reference"):
        seed = counter_random.mix(case.seed, "lanes")
        run = run_reference(
            spec, logical, context.extra, reader(spec), lanes=lanes, seed=seed, limit_s=context.reference_s
        )
    context.progress.fallbacks.update(run.fallbacks)
    return run, collect(run.result, run.arguments, spec.mutates)


def reader(spec: FusionSpec) -> Callable[[Any, Mapping[str, Any]], list[torch.Tensor]]:
    return lambda result, arguments: list(collect(result, arguments, spec.mutates).tensors.values())


def conclude(context: Context, result: CaseResult, verdict: Verdict) -> bool:
    """Note a verdict unless its check is switched off; True when it ends the case."""
    if not context.on(verdict.check):
        result.waived += [verdict] if verdict.failed else []
        return False
    result.verdicts.append(verdict)
    return verdict.failed and verdict.identity not in result.known


def precision(logical: Mapping[str, Any]) -> float:
    """The relative error allowed of a number computed from these inputs: 8 units of the coarsest dtype."""
    floating = [t.dtype for t in tensors_of(logical).values() if t.dtype.is_floating_point]
    return max([1e-5, *(8 * torch.finfo(dtype).eps for dtype in floating)])


def shapes(logical: Mapping[str, Any]) -> list[Any]:
    """A key, equal where the values of one case fit the memory of another."""
    return [(name, tuple(t.shape), t.dtype) for name, t in tensors_of(logical).items()]


def other_values(
    context: Context, case: Case, logical: Mapping[str, Any], *salt: int | str
) -> tuple[Case, dict[str, Any] | None]:
    """The case with another seed, and its values, or ``None`` where shapes differ."""
    case = case.with_(seed=counter_random.mix(case.seed, *salt) >> 1)
    try:
        with context.clock.phase("make"):
            other = {**make_inputs(context.spec, case, context.device), **same_draws(context.spec, logical)}
    except (ImpossibleCase, InputFailed):
        return case, None
    return case, other if shapes(other) == shapes(logical) else None


def same_draws(spec: FusionSpec, logical: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that decide a kernel's random numbers; the reference knows only its own draw."""
    rng = spec.random
    names = (rng.seed, rng.p) if rng is not None else ()
    return {name: logical[name] for name in names if isinstance(name, str)}


# The end of the name of an output that is an input.
IN_PLACE = " (in place)"


@dataclass(slots=True)
class Outputs:
    """Named result tensors and plain values; ``shape`` is the nesting as text."""

    tensors: dict[str, torch.Tensor]
    plain: dict[str, Any]
    shape: str


def collect(result: Any, arguments: Mapping[str, Any], mutates: Iterable[str], *, returned: bool = True) -> Outputs:
    """Name every leaf. The lone result is called ``out``; an input written in place keeps its name (``ps[0]``)."""
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    if returned:
        for leaf in leaves(result):
            name = f"out{leaf.path}"
            if leaf.is_tensor:
                tensors[name] = leaf.value
            else:
                plain[name] = leaf.value
    for name in mutates:
        tensors |= {f"{inner}{IN_PLACE}": t for inner, t in tensors_by_name(name, arguments[name]).items()}
    return Outputs(tensors, plain, nesting(result) if returned else "")


def spellings(output: str) -> tuple[str, ...]:
    """Names that ``deterministic=`` may use for an output: ``out[1]``, ``out['dq']``, ``dq``, or an input's name."""
    if output.endswith(IN_PLACE):
        inner = output.removesuffix(IN_PLACE)
        return (output, inner, inner.partition("[")[0])
    last = re.search(r"(?:\.|\[')(\w+)(?:'\])?$", output)
    return (output, last[1] if last else output)


def varies(declared: bool | Mapping[str, bool], output: str) -> bool:
    """Whether ``deterministic=`` lets this output, or gradient, vary."""
    if isinstance(declared, bool):
        return not declared
    return not next((declared[name] for name in spellings(output) if name in declared), True)
