"""One case through all checks: make the inputs, run the kernel under both fills, run the reference, conclude."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pytest_fusion.case import numbers
from pytest_fusion.case.make import ImpossibleCase, make_inputs
from pytest_fusion.case.model import Case
from pytest_fusion.errors import SpecError, TooManyProgramsError
from pytest_fusion.run.clock import Clock
from pytest_fusion.run.fused import Outcome, compile_only, run_fused
from pytest_fusion.run.lanes import OutputLanes
from pytest_fusion.run.launch import Launch
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.place import Placed, place, rewrite
from pytest_fusion.run.reference import FEW_LANES, MANY_LANES, MOST_LANES, ReferenceFailed, ReferenceRun, run_reference
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.policy import Tolerance
from pytest_fusion.verdict import memory, repeat, structure, values
from pytest_fusion.verdict.model import Verdict, failed, passed
from pytest_fusion.verdict.outputs import Outputs, collect
from pytest_fusion.verdict.tolerance import ValuesVerdict
from pytest_fusion.verdict.vacuity import Vacuity


# Fewer elements than this tell little about a statistic, so more lanes are asked (tolerance.md, "what the failures taught").
_FEW_ELEMENTS = 16


@dataclass(slots=True)
class Bench:
    """What every case of a test shares: device, fixtures, limits, clocks, and what the run has learned."""

    spec: FusionSpec
    device: torch.device
    extra: Mapping[str, Any] = field(default_factory=dict)
    programs: int = 600
    clock: Clock = field(default_factory=Clock)
    vacuity: Vacuity = field(default_factory=Vacuity)
    fallbacks: set[str] = field(default_factory=set)
    unrepeated: int = 0

    def on(self, check: str) -> bool:
        return check not in self.spec.without


@dataclass(slots=True)
class CaseResult:
    """What one case showed. ``case`` is the failing one, which may differ from the one asked for in its seed."""

    case: Case
    verdicts: list[Verdict] = field(default_factory=list)
    rejected: str | None = None
    launches: list[Launch] = field(default_factory=list)
    # The failing output and the reference's lanes, kept for the error map of the final report only.
    evidence: tuple[str, torch.Tensor, OutputLanes | torch.Tensor] | None = None
    trace: str = ""

    @property
    def failure(self) -> Verdict | None:
        return next((verdict for verdict in self.verdicts if verdict.failed), None)

    @property
    def ratio(self) -> float | None:
        """Worst error over what was allowed."""
        for verdict in self.verdicts:
            if verdict.check == "values" and "ratio" in verdict.evidence:
                return float(verdict.evidence["ratio"])
        return None


def judge_case(bench: Bench, case: Case, *, again: bool = False) -> CaseResult:
    """Judge one case; ``again`` also calls the kernel with changed values at the same addresses.

    A purely statistical failure of ``values`` counts only when two cases with fresh values repeat it.
    """
    result = _judge(bench, case, again=again)
    found = result.failure
    if found is None or not found.statistical:
        return result
    for attempt in (1, 2):
        fresh = case.with_(seed=numbers.mix(case.seed, "confirm", attempt) >> 1)
        second = _judge(bench, fresh, again=False)
        if second.failure is None or second.failure.check != "values":
            bench.unrepeated += 1
            result.verdicts = [v for v in result.verdicts if v is not found]
            result.verdicts.append(passed("values", unrepeated=found.reason))
            return result
    return result


def dry_run(bench: Bench, case: Case) -> CaseResult:
    """The launches that a case would make, its kernels compiled but not run; nothing is judged."""
    result = CaseResult(case, rejected="dry run")
    try:
        placed = place(make_inputs(bench.spec, case, bench.device), case, bench.device, FILLS[0])
    except ImpossibleCase:
        return result
    result.launches = compile_only(bench.spec.fused, placed, bench.extra)
    return result


def _judge(bench: Bench, case: Case, *, again: bool) -> CaseResult:
    result = CaseResult(case)
    try:
        with bench.clock.phase("make"):
            logical = make_inputs(bench.spec, case, bench.device)
    except ImpossibleCase:
        result.rejected = "impossible"
        return result
    first, placed = _call(bench, case, logical, FILLS[0])
    result.launches = first.launches
    if first.error is not None and (kind := _rejection(bench.spec, first.error)):
        result.rejected = kind
        return result
    try:
        reference, expected = _reference(bench, case, logical)
    except ReferenceFailed as error:
        # A case outside the reference's own domain asks nothing of the kernel.
        result.rejected = f"reference {str(error).partition(':')[0]}"
        return result
    if first.error is not None:
        _conclude(bench, result, _check_error(first))
        result.trace = first.trace
        return result
    _Trial(bench, result, logical, reference, expected).run(first, placed, again=again)
    return result


def _call(bench: Bench, case: Case, logical: Mapping[str, Any], fill: str) -> tuple[Outcome, Placed]:
    with bench.clock.phase("make"):
        placed = place(logical, case, bench.device, fill)
        placed.arena.snapshot()
    with bench.clock.phase("fused"):
        return run_fused(bench.spec.fused, placed, bench.extra, programs=bench.programs), placed


def _rejection(spec: FusionSpec, error: BaseException) -> str | None:
    """The kind of a refusal that is no failure."""
    if isinstance(error, TooManyProgramsError):
        return "too-expensive"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out-of-memory"
    return type(error).__name__ if isinstance(error, tuple(spec.rejects)) else None  # type: ignore[arg-type]


def _check_error(outcome: Outcome) -> Verdict:
    error = outcome.error
    assert error is not None
    kind = type(error).__name__
    text = str(error).strip().splitlines()
    return failed(
        "error",
        f"the kernel raised {kind}: {text[0] if text else ''}".rstrip(": ")
        + f" (in {outcome.origin}); list the type in rejects= if refusing such a case is meant",
        identity=f"error:{kind}:{outcome.origin}",
        error=kind,
        origin=outcome.origin,
    )


def _tensors(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def _reference(bench: Bench, case: Case, logical: Mapping[str, Any]) -> tuple[ReferenceRun, Outputs]:
    spec = bench.spec
    lanes = 0 if isinstance(spec.tolerance, Tolerance) else FEW_LANES
    with bench.clock.phase("reference"):
        run = run_reference(spec, logical, bench.extra, _reader(spec), lanes=lanes, seed=numbers.mix(case.seed, "lanes"))
    bench.fallbacks.update(run.fallbacks)
    return run, collect(run.result, run.arguments, spec.mutates)


def _reader(spec: FusionSpec) -> Callable[[Any, Mapping[str, Any]], list[torch.Tensor]]:
    return lambda result, arguments: list(collect(result, arguments, spec.mutates).tensors.values())


def _conclude(bench: Bench, result: CaseResult, verdict: Verdict) -> bool:
    """Note a verdict unless its check is switched off; true when it ends the case."""
    if not bench.on(verdict.check):
        return False
    result.verdicts.append(verdict)
    return verdict.failed


class _Trial:
    """The checks of one case that has both a fused result and a reference."""

    def __init__(
        self, bench: Bench, result: CaseResult, logical: Mapping[str, Any], reference: ReferenceRun, expected: Outputs
    ) -> None:
        self.bench, self.result, self.logical = bench, result, logical
        self.reference, self.expected = reference, expected
        self.spec = bench.spec
        self.order = list(expected.tensors)
        self._lanes: dict[tuple[int, str], list[OutputLanes]] = {}

    def run(self, first: Outcome, placed: Placed, *, again: bool) -> None:
        got = self.collect(first, placed)
        note = lambda verdict: _conclude(self.bench, self.result, verdict)  # noqa: E731 - used six times below
        note(passed("error"))
        if not got.tensors and not got.plain and not self.expected.tensors:
            raise SpecError(f"{self.spec.name}: neither the test nor the reference returned anything; return the output")
        ours, theirs = _tensors(placed.arguments), _tensors(self.reference.arguments)
        with self.bench.clock.phase("judge"):
            verdict = structure.check_structure(
                got,
                self.expected,
                device=self.bench.device,
                fused_sharing=structure.sharing(self.returned(got), ours),
                reference_sharing=structure.sharing(self.returned(self.expected), theirs),
            )
        # A result of the wrong shape or dtype cannot be compared any further, switched off or not.
        if note(verdict) or (verdict.failed and "aliasing" not in verdict.identity):
            return
        changes = placed.arena.changed()
        if note(memory.check_inputs(changes, (*self.spec.mutates, *self.spec.clobbers))):
            return
        if note(memory.check_damage(first.damage)):
            return
        second, other = _call(self.bench, self.result.case, self.logical, FILLS[1])
        if second.error is not None:
            note(_check_error(second))
            self.result.trace = second.trace
            return
        again_got = self.collect(second, other)
        if note(memory.check_damage(second.damage)):
            return
        masks = {name: memory.unwritten_mask(first, second, got.tensors[name], again_got.tensors[name]) for name in self.order}
        if note(memory.check_unwritten(masks)):
            return
        difference = repeat.first_difference(got.tensors, again_got.tensors)
        if difference is None:
            note(repeat.check_repeat(None, 2))
        elif self.explain_difference(got, difference):
            return
        verdicts = self.judge(got, grade=again)
        if note(values.as_verdict(verdicts)):
            self.keep(got, verdicts)
            return
        self.observe_vacuity(got)
        if again:
            self.call_again(got, other)

    def returned(self, outputs: Outputs) -> dict[str, torch.Tensor]:
        """Outputs that the call returned, without inputs written in place, which are their own memory."""
        return {name: t for name, t in outputs.tensors.items() if name.startswith("out") and not self.is_mutated(t, outputs)}

    def is_mutated(self, t: torch.Tensor, outputs: Outputs) -> bool:
        return any(t is other for name, other in outputs.tensors.items() if name.endswith(" (in place)"))

    def collect(self, outcome: Outcome, placed: Placed) -> Outputs:
        """The kernel's outputs; what an in-place kernel or its reference returns besides is left out when the other has none."""
        got = collect(outcome.result, placed.arguments, self.spec.mutates)
        if self.spec.mutates and (outcome.result is None) != (self.reference.result is None):
            got = collect(None, placed.arguments, self.spec.mutates, returned=False)
            self.expected = collect(None, self.reference.arguments, self.spec.mutates, returned=False)
            keep = [i for i, name in enumerate(self.order) if name in self.expected.tensors]
            self.reference.lanes = [self.reference.lanes[i] for i in keep] if self.reference.lanes else []
            self.reference.native = [self.reference.native[i] for i in keep]
            self.order = [self.order[i] for i in keep]
        return got

    def explain_difference(self, got: Outputs, difference: tuple[str, torch.Tensor]) -> bool:
        """Two runs under different fills differ: is it chance, the surroundings of the inputs, or fresh memory?"""
        spec, bench, case = self.spec, self.bench, self.result.case
        for _ in range(3):
            third, placed = _call(bench, case, self.logical, FILLS[0])
            if third.error is not None:
                return _conclude(bench, self.result, _check_error(third))
            same = repeat.first_difference(got.tensors, self.collect(third, placed).tensors)
            if same is not None:
                if self.tolerates(same[0]):
                    return False
                return _conclude(bench, self.result, repeat.check_repeat(same, 3))
        with bench.clock.phase("make"):
            placed = place(self.logical, case, bench.device, FILLS[0])
        with bench.clock.phase("fused"):
            fresh = run_fused(spec.fused, placed, bench.extra, programs=bench.programs, fill=FILLS[1])
        name, mask = difference
        count, first = int(mask.sum()), [int(i) for i in mask.nonzero()[0]]
        caused_by_fresh = fresh.error is None and (
            repeat.first_difference(got.tensors, self.collect(fresh, placed).tensors) is not None
        )
        check, source, slug = (
            ("unwritten", "fresh memory (torch.empty) that nothing wrote", "scratch")
            if caused_by_fresh
            else ("bounds", "what lies between or around the elements of an input", "surroundings")
        )
        return _conclude(
            bench,
            self.result,
            failed(
                check,
                f"{count} of {mask.numel()} element(s) of {name} depend on {source}, the first at {first}",
                identity=f"{check}:{slug}",
                output=name,
                count=count,
                total=mask.numel(),
                first=first,
            ),
        )

    def tolerates(self, output: str) -> bool:
        declared = self.spec.deterministic
        return not declared if isinstance(declared, bool) else not declared.get(output, True)

    def fresh_lanes(self, index: int, count: int, kind: Literal["E", "F"]) -> OutputLanes:
        """Lanes of one output from another run of the reference, which serves all outputs."""
        key = (count, kind)
        if key not in self._lanes:
            with self.bench.clock.phase("reference"):
                run = run_reference(
                    self.spec,
                    self.logical,
                    self.bench.extra,
                    _reader(self.spec),
                    lanes=count,
                    kind=kind,
                    seed=numbers.mix(self.result.case.seed, "fresh lanes", count, kind),
                )
            names = collect(run.result, run.arguments, self.spec.mutates).tensors
            by_name = dict(zip(names, run.lanes, strict=True))
            self._lanes[key] = [by_name[name] for name in self.order]
        return self._lanes[key][index]

    def judge(self, got: Outputs, *, grade: bool = False) -> dict[str, ValuesVerdict]:
        with self.bench.clock.phase("judge"):
            return {name: self.judge_tensor(i, got.tensors[name], grade=grade) for i, name in enumerate(self.order)}

    def judge_tensor(self, index: int, candidate: torch.Tensor, *, grade: bool = False) -> ValuesVerdict:
        lanes = self.reference.lanes
        native = self.reference.native[index]
        return values.judge_one(
            candidate,
            native,
            lanes[index] if lanes else None,
            lambda: self.fresh_lanes(index, MANY_LANES if native.numel() >= _FEW_ELEMENTS else MOST_LANES, "E"),
            self.spec.tolerance,
            (lambda: self.fresh_lanes(index, FEW_LANES, "F")) if grade else None,
        )

    def keep(self, got: Outputs, verdicts: Mapping[str, ValuesVerdict]) -> None:
        for i, name in enumerate(self.order):
            if not verdicts[name].ok:
                lanes = self.reference.lanes
                self.result.evidence = (name, got.tensors[name], lanes[i] if lanes else self.reference.native[i])
                return

    def observe_vacuity(self, got: Outputs) -> None:
        if not self.bench.on("vacuity"):
            return
        with self.bench.clock.phase("judge"):
            for i, name in enumerate(self.order):
                self.bench.vacuity.observe(name, self.reference.native[i], lambda t, i=i: self.judge_tensor(i, t).ok)

    def call_again(self, got: Outputs, placed: Placed) -> None:
        """Changed values at the same addresses: a cached answer, or state left by the first call, shows here."""
        bench, spec = self.bench, self.spec
        case = self.result.case.with_(seed=numbers.mix(self.result.case.seed, "again") >> 1)
        before = {name: t.clone() for name, t in got.tensors.items()}
        with bench.clock.phase("make"):
            logical = make_inputs(spec, case, bench.device)
            if _shapes(logical) != _shapes(self.logical):
                return
            rewrite(placed, logical)
            placed.arena.refill(FILLS[0])
        with bench.clock.phase("fused"):
            outcome = run_fused(spec.fused, placed, bench.extra, programs=bench.programs)
        if outcome.error is not None:
            _conclude(bench, self.result, _check_error(outcome))
            return
        try:
            reference, expected = _reference(bench, case, logical)
        except ReferenceFailed:
            return
        trial = _Trial(bench, CaseResult(case), logical, reference, expected)
        now = trial.collect(outcome, placed)
        if expected.shape != now.shape and not spec.mutates:
            return
        verdict = values.as_verdict(trial.judge(now))
        if not verdict.failed or verdict.statistical:
            return
        stale = repeat.first_difference(before, now.tensors) is None
        alone = _judge(bench, case, again=False)
        if alone.failure is not None:
            self.result.case, self.result.verdicts = case, alone.verdicts
            self.result.evidence = alone.evidence
            return
        what = "the previous call's answer" if stale else "a wrong answer that a first call does not give"
        _conclude(
            bench,
            self.result,
            failed(
                "repeat",
                f"called again with changed values at the same addresses, the kernel returned {what}: "
                f"{verdict.reason.partition(': ')[2]}",
                identity="repeat:stale",
                **verdict.evidence,
            ),
        )


def _shapes(logical: Mapping[str, Any]) -> list[Any]:
    return [(name, tuple(v.shape), v.dtype) for name, v in logical.items() if isinstance(v, torch.Tensor)]
