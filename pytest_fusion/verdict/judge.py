"""One case through all checks: make the inputs, run the kernel under both fills, run the reference, conclude."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pytest_fusion.case import numbers
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
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
from pytest_fusion.verdict.model import Verdict, failed, passed, unknown
from pytest_fusion.verdict.outputs import Outputs, collect
from pytest_fusion.verdict.tolerance import ValuesVerdict
from pytest_fusion.verdict.vacuity import Vacuity

# Fewer elements than this tell little about a statistic, so more lanes are asked (tolerance.md).
_FEW_ELEMENTS = 16
# How often both fills are run again before a difference between them is no chance. Where chance is declared, two
# outcomes of a race that are equally likely must not pass for an effect of the fill: 2^-16 are left.
_CHANCES, _DECLARED_CHANCES = 2, 8


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
    # What was first said by each kind of rejection.
    refusals: dict[str, str] = field(default_factory=dict)

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
        if second.failure is not None and not second.failure.statistical:
            return second
        if second.failure is None:
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
    except (ImpossibleCase, InputFailed):
        return result
    result.launches = compile_only(bench.spec.fused, placed, bench.extra)
    return result


def _judge(bench: Bench, case: Case, *, again: bool) -> CaseResult:
    result = CaseResult(case)
    try:
        with bench.clock.phase("make"):
            logical = make_inputs(bench.spec, case, bench.device)
    except ImpossibleCase as error:
        return _reject(bench, result, "impossible", error)
    except InputFailed as error:
        return _reject(bench, result, f"inputs {type(error.__cause__).__name__}", error)
    first, placed = _call(bench, case, logical, FILLS[0])
    result.launches = first.launches
    if first.error is not None and (kind := _rejection(bench.spec, first.error)):
        return _reject(bench, result, kind, first.error)
    try:
        reference, expected = _reference(bench, case, logical)
    except ReferenceFailed as error:
        # A case outside the reference's own domain asks nothing of the kernel.
        return _reject(bench, result, f"reference {type(error.__cause__).__name__}", error)
    accessed = memory.check_access(first, chance=_allows_chance(bench.spec))
    if accessed is not None and _conclude(bench, result, accessed):
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


def _reject(bench: Bench, result: CaseResult, kind: str, error: BaseException) -> CaseResult:
    """The case asks nothing of the kernel."""
    bench.refusals.setdefault(kind, str(error).strip().partition("\n")[0][:200])
    result.rejected = kind
    return result


def _allows_chance(spec: FusionSpec) -> bool:
    """Whether any output may vary from run to run."""
    declared = spec.deterministic
    return not declared if isinstance(declared, bool) else not all(declared.values())


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
        seed = numbers.mix(case.seed, "lanes")
        run = run_reference(spec, logical, bench.extra, _reader(spec), lanes=lanes, seed=seed)
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
        note = self.note
        note(passed("error"))
        self.forbid_nothing()
        ours, theirs = self.kept(placed.arguments), self.kept(self.reference.arguments)
        with self.bench.clock.phase("judge"):
            verdict = structure.check_structure(
                got,
                self.expected,
                fused_sharing=structure.sharing(self.returned(got), ours),
                reference_sharing=structure.sharing(self.returned(self.expected), theirs),
                precision=_precision(self.logical),
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
            self.stop(second)
            return
        again_got = self.collect(second, other)
        if note(memory.check_damage(second.damage)):
            return
        pairs = {name: (t, again_got.tensors[name]) for name, t in got.tensors.items() if name in again_got.tensors}
        masks = {name: memory.unwritten_mask(first, second, x, y) for name, (x, y) in pairs.items()}
        if note(memory.check_unwritten(masks)):
            return
        difference = repeat.first_difference(got.tensors, again_got.tensors)
        if difference is None:
            note(repeat.check_repeat(None, 2))
        elif self.explain_difference(got, again_got):
            return
        verdicts = self.judge(got, grade=again)
        if note(values.as_verdict(verdicts)):
            self.keep(got, verdicts)
            return
        self.observe_vacuity()
        if again:
            self.call_again(got, other)

    def note(self, verdict: Verdict) -> bool:
        return _conclude(self.bench, self.result, verdict)

    def stop(self, outcome: Outcome) -> bool:
        """A repeated call raised: it refused the case after all, or that is the finding."""
        assert outcome.error is not None
        kind = _rejection(self.spec, outcome.error)
        if kind is not None:
            _reject(self.bench, self.result, kind, outcome.error)
            return True
        self.result.trace = outcome.trace
        return self.note(_check_error(outcome))

    def forbid_nothing(self) -> None:
        if not self.expected.tensors and all(value is None for value in self.expected.plain.values()):
            raise SpecError(
                f"{self.spec.name}: the reference returned nothing to compare with; return the output, from the test "
                "too, or name the inputs that are written in place in mutates="
            )

    def kept(self, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The inputs whose memory stays the caller's: results may lie in what the kernel is allowed to write."""
        given_up = {*self.spec.mutates, *self.spec.clobbers}
        return {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor) and name not in given_up}

    def returned(self, outputs: Outputs) -> dict[str, torch.Tensor]:
        """Outputs that the call returned, without inputs written in place, which are their own memory."""
        own = {name: t for name, t in outputs.tensors.items() if not name.endswith(" (in place)")}
        return {name: t for name, t in own.items() if not self.is_mutated(t, outputs)}

    def is_mutated(self, t: torch.Tensor, outputs: Outputs) -> bool:
        return any(t is other for name, other in outputs.tensors.items() if name.endswith(" (in place)"))

    def collect(self, outcome: Outcome, placed: Placed) -> Outputs:
        """The kernel's outputs; what one of an in-place kernel and its reference returns alone is left out."""
        got = collect(outcome.result, placed.arguments, self.spec.mutates)
        if self.spec.mutates and (outcome.result is None) != (self.reference.result is None):
            got = collect(None, placed.arguments, self.spec.mutates, returned=False)
            self.expected = collect(None, self.reference.arguments, self.spec.mutates, returned=False)
            keep = [i for i, name in enumerate(self.order) if name in self.expected.tensors]
            self.reference.lanes = [self.reference.lanes[i] for i in keep] if self.reference.lanes else []
            self.reference.native = [self.reference.native[i] for i in keep]
            self.order = [self.order[i] for i in keep]
        return got

    def explain_difference(self, got: Outputs, other: Outputs) -> bool:
        """Two runs under different fills differ: is it chance, the surroundings of the inputs, or fresh memory?

        What differs between two runs under one fill is chance. True when that ends the case.
        """
        spec, bench, case = self.spec, self.bench, self.result.case
        chance: set[str] = set()
        rounds = _DECLARED_CHANCES if any(map(self.tolerates, got.tensors)) else _CHANCES
        # Back and forth: A B, A B B A ... falls out of step with a kernel that takes turns between two buffers.
        runs = list(zip(FILLS, (got, other), strict=True))
        for fill, before in [run for turn in range(rounds) for run in (runs[::-1] if turn % 2 else runs)]:
            if repeat.first_difference(_without(got, chance), other.tensors) is None:
                break
            outcome, placed = _call(bench, case, self.logical, fill)
            if outcome.error is not None:
                return self.stop(outcome)
            now = self.collect(outcome, placed)
            while (same := repeat.first_difference(_without(before, chance), now.tensors)) is not None:
                if not self.tolerates(same[0]):
                    return self.note(repeat.check_repeat(same, 3))
                chance.add(same[0])
        difference = repeat.first_difference(_without(got, chance), other.tensors)
        if difference is None:
            names = ", ".join(sorted(chance))
            return self.note(unknown("repeat", f"{names} varies from run to run, as deterministic= allows"))
        with bench.clock.phase("make"):
            placed = place(self.logical, case, bench.device, FILLS[0])
        with bench.clock.phase("fused"):
            fresh = run_fused(spec.fused, placed, bench.extra, programs=bench.programs, fill=FILLS[1])
        name, mask = difference
        count, first = int(mask.sum()), [int(i) for i in mask.nonzero()[0]]
        caused_by_fresh = fresh.error is None and (
            repeat.first_difference(_without(got, chance), self.collect(fresh, placed).tensors) is not None
        )
        check, source, slug = (
            ("unwritten", "fresh memory (torch.empty) that nothing wrote", "scratch")
            if caused_by_fresh
            else ("bounds", "what lies between or around the elements of an input", "surroundings")
        )
        source += memory.read_at(fresh, scratch=caused_by_fresh)
        return self.note(
            failed(
                check,
                f"{count} of {mask.numel()} element(s) of {name} depend on {source}, the first at {first}",
                identity=f"{check}:{slug}",
                output=name,
                count=count,
                total=mask.numel(),
                first=first,
            )
        )

    def tolerates(self, output: str) -> bool:
        declared = self.spec.deterministic
        if isinstance(declared, bool):
            return not declared
        return not declared.get(output, declared.get(output.removesuffix(" (in place)"), True))

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

    def observe_vacuity(self) -> None:
        if not self.bench.on("vacuity"):
            return
        with self.bench.clock.phase("judge"):
            for i, name in enumerate(self.order):

                def accepts(wrong: torch.Tensor, i: int = i) -> bool:
                    return self.judge_tensor(i, wrong).ok

                self.bench.vacuity.observe(name, self.reference.native[i], accepts)

    def call_again(self, got: Outputs, placed: Placed) -> None:
        """Changed values at the same addresses: a cached answer, or state left by the first call, shows here."""
        bench, spec = self.bench, self.spec
        case = self.result.case.with_(seed=numbers.mix(self.result.case.seed, "again") >> 1)
        before = {name: t.clone() for name, t in got.tensors.items()}
        try:
            with bench.clock.phase("make"):
                logical = make_inputs(spec, case, bench.device)
            if _shapes(logical) != _shapes(self.logical):
                return
            reference, expected = _reference(bench, case, logical)
        except (ImpossibleCase, InputFailed, ReferenceFailed):
            return
        with bench.clock.phase("make"):
            rewrite(placed, logical)
            placed.arena.refill(FILLS[0])
        with bench.clock.phase("fused"):
            outcome = run_fused(spec.fused, placed, bench.extra, programs=bench.programs)
        if outcome.error is not None:
            if _rejection(spec, outcome.error) is not None:
                return
            verdict, what = _check_error(outcome), "raised what a first call does not"
        else:
            trial = _Trial(bench, CaseResult(case), logical, reference, expected)
            now = trial.collect(outcome, placed)
            verdict = structure.check_structure(
                now, trial.expected, fused_sharing=set(), reference_sharing=set(), precision=_precision(logical)
            )
            if not verdict.failed:
                verdict = values.as_verdict(trial.judge(now))
            stale = repeat.first_difference(before, now.tensors) is None
            what = "returned the previous call's answer" if stale else "returned what a first call does not"
        if not verdict.failed or verdict.statistical:
            return
        alone = _judge(bench, case, again=False)
        if alone.rejected is not None:
            return
        if alone.failure is not None:
            self.result.case, self.result.verdicts = case, alone.verdicts
            self.result.evidence, self.result.trace = alone.evidence, alone.trace
            return
        reason = verdict.reason.partition(": ")[2] if verdict.check == "values" else verdict.reason
        self.note(
            failed(
                "repeat",
                f"called again with changed values at the same addresses, the kernel {what}: {reason}",
                identity="repeat:stale",
                **verdict.evidence,
            )
        )


def _without(outputs: Outputs, names: set[str]) -> dict[str, torch.Tensor]:
    return {name: t for name, t in outputs.tensors.items() if name not in names}


def _precision(logical: Mapping[str, Any]) -> float:
    """The relative error that a number computed from these inputs may have: 8 units of the coarsest dtype."""
    floating = [t.dtype for t in _tensors(logical).values() if t.dtype.is_floating_point]
    return max([1e-5, *(8 * torch.finfo(dtype).eps for dtype in floating)])


def _shapes(logical: Mapping[str, Any]) -> list[Any]:
    return [(name, tuple(v.shape), v.dtype) for name, v in logical.items() if isinstance(v, torch.Tensor)]
