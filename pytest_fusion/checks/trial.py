"""The checks of one case that has both a fused result and a reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.containers import has_no_equality, hidden, leaves, tensors_by_name
from pytest_fusion.checks import memory, structure, values_check
from pytest_fusion.checks.context import (
    IN_PLACE,
    CaseResult,
    Context,
    Outputs,
    call,
    call_placed,
    collect,
    conclude,
    error_verdict,
    other_values,
    precision,
    reference_of,
    reject,
    rejection,
    tensors_of,
    varies,
)
from pytest_fusion.checks.kernels import tf32, undefined
from pytest_fusion.checks.randomness.masks import Draws, drawn_alike
from pytest_fusion.checks.reference_runs import ReferenceRuns
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.verdict import Verdict, passed, unknown
from pytest_fusion.errors import SpecError
from pytest_fusion.interpreter.memory.undefined_lanes import masked_fill
from pytest_fusion.oracle.reference import FEW_LANES, MANY_LANES, MOST_LANES, ReferenceFailed, ReferenceRun
from pytest_fusion.oracle.rounding import NARROW, factors_in_tf32
from pytest_fusion.oracle.tolerance import ValuesVerdict
from pytest_fusion.run.fused import Outcome, run_fused
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import Placed, place, rewrite

# Fewer elements are weak evidence for a statistic, so more lanes are used.
_FEW_ELEMENTS = 16
# How often both fills run again before a difference between them is no chance: two equally likely outcomes pass for an
# effect of the fill in 2^-16. While a failure shrinks that is known, except where chance is declared.
_CHANCES, _CHANCES_WHILE_SHRINKING = 8, 2
# Calls under each fill that must agree before the first call of a case is to blame: an output that alternates passes
# for that in one case in 64.
_LATER = 3


@dataclass(eq=False)
class Trial:
    """One case's results and reference. ``alone`` judges another case without calling it twice.

    ``thorough``: one of the cases with more calls, the first few of a test and every tenth.
    """

    context: Context
    result: CaseResult
    logical: Mapping[str, Any]
    reference: ReferenceRun
    expected: Outputs
    alone: Callable[[Case], CaseResult]
    draws: Draws | None = None
    thorough: bool = field(default=False, init=False)
    # Copies of the judged results before further calls; only in thorough cases.
    judged: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    _excused: set[str] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.spec = self.context.spec
        self.order = list(self.expected.tensors)
        self.sampled = self.set_apart()
        # Whether the reference may round to 16 bits on its way.
        self.narrow = any(t.dtype in NARROW for t in tensors_of(self.logical).values())
        self.runs = ReferenceRuns(self.context, self.result, self.logical, self.reference)

    def infinite(self) -> bool:
        """Whether an input holds an infinity."""
        floating = [t for t in tensors_of(self.logical).values() if t.is_floating_point()]
        return any(bool((t.float() if t.element_size() == 1 else t).isinf().any()) for t in floating)

    def run(self, first: Outcome, placed: Placed, *, again: bool) -> None:
        self.thorough = again
        got = self.got = self.collect(first, placed)
        note = self.note
        note(passed("error"))
        self.forbid_nothing()
        ours, theirs = self.read_only(placed.arguments), self.read_only(self.reference.arguments)
        with self.context.clock.phase("judge"):
            shared = structure.sharing(self.returned(got), ours)
            shared -= structure.sharing(self.returned(self.expected), theirs)
            verdict = structure.check_structure(got, self.expected, shared=shared, precision=precision(self.logical))
        # A result of the wrong shape or dtype cannot be compared further, even with the check off.
        if note(verdict) or (verdict.failed and "aliasing" not in verdict.identity):
            return
        changes = placed.arena.changed()
        if note(memory.check_inputs(changes, self.spec.given_up)):
            return
        if note(memory.check_damage(first.damage)):
            return
        with self.context.clock.check("unwritten"):
            second, other = self.second(first, got)
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
            note(repeat.check_repeat([], 2))
        elif self.explain_difference(got, again_got):
            return
        verdicts = self.judge(got, grade=again)
        self._excused = {name for name, verdict in verdicts.items() if not verdict.ok}
        if self.note_values(got, verdicts):
            return
        with self.context.clock.check("vacuity"):
            self.observe_vacuity()
        self.judged = {name: t.detach().clone() for name, t in got.tensors.items()} if again else {}
        if again:
            with self.context.clock.check("repeat"):
                self.call_again(got, other)

    def with_(self, logical: Mapping[str, Any], case: Case, context: Context | None = None) -> Trial:
        """A trial of other inputs with the same reference's outputs; none of its own are judged."""
        result = replace(self.result, case=case)
        return Trial(context or self.context, result, logical, self.reference, self.expected, self.alone, self.draws)

    def of_values(self, case: Case, logical: Mapping[str, Any]) -> Trial:
        """A trial of other values, with the reference's answer for them; to be made after the kernel's call, which must
        find no right answer in memory. Raises ``ReferenceFailed``."""
        context = drawn_alike(self.context, case, logical, self.draws)
        reference, expected = reference_of(context, case, logical)
        return Trial(context, CaseResult(case), logical, reference, expected, self.alone)

    def set_apart(self) -> dict[str, torch.Tensor]:
        """The reference's probabilities of sampled outputs, removed from those compared element by element."""
        apart = {name: self.expected.tensors.pop(name) for name in self.order if name in self.spec.sampled}
        if apart:
            self.leave_out_others()
        return apart

    def leave_out_others(self) -> None:
        """Remove what is no longer expected from the reference's results."""
        reference, keep = self.reference, [i for i, name in enumerate(self.order) if name in self.expected.tensors]
        reference.lanes = [reference.lanes[i] for i in keep] if reference.lanes else []
        reference.native = [reference.native[i] for i in keep]
        self.order = [self.order[i] for i in keep]

    def note(self, verdict: Verdict) -> bool:
        return conclude(self.context, self.result, verdict)

    def note_values(self, got: Outputs, verdicts: Mapping[str, ValuesVerdict]) -> bool:
        """Note the verdicts on all outputs' values; True where one is wrong, new or known."""
        for found in values_check.swallowed("values", verdicts):
            self.note(found)
        values = values_check.as_verdict(verdicts)
        if self.note(values) or values.status == "hazard":
            self.keep(got, verdicts)
        return values.failed and self.context.on("values")

    def stop(self, outcome: Outcome) -> bool:
        """End the case where a repeated call raised: a late refusal, or the finding."""
        assert outcome.error is not None
        kind = rejection(self.spec, outcome.error)
        if kind is not None:
            reject(self.context, self.result, kind, outcome.error)
            return True
        self.result.trace = outcome.trace
        return self.note(error_verdict(outcome))

    def forbid_nothing(self) -> None:
        """Raise ``SpecError`` where the spec names nothing to compare; a list may be empty in this case."""
        # An object whose inner tensors are not compared counts too: equal types would pass for equal results.
        for name, value in self.expected.plain.items():
            inner = hidden(value)
            if inner is not None or (not self.expected.tensors and has_no_equality(value)):
                held = f", whose {inner!r} holds tensors" if inner is not None else ""
                raise SpecError(
                    f"{self.spec.name}: {name} of the reference is a {type(value).__name__}{held}, which is not "
                    "compared; return tensors, in tuples, lists, dicts or dataclasses"
                )
        written = {name: leaves(self.logical[name]) for name in self.spec.mutates}
        for name, found in written.items():
            if not tensors_by_name(name, self.logical[name]) and any(leaf.value is not None for leaf in found):
                kind = type(self.logical[name]).__name__
                raise SpecError(
                    f"{self.spec.name}: mutates={name!r} names an input that holds no tensor ({kind}); what is written "
                    "in place is a tensor, or tensors in lists, tuples, dicts and dataclasses"
                )
        if (
            not self.expected.tensors
            and not self.spec.distribution
            and self.expected.plain
            and all(value is None for value in self.expected.plain.values())
            and all(written.values())
        ):
            raise SpecError(
                f"{self.spec.name}: the reference returned nothing to compare with; return the output, from the test "
                "too, or name the inputs that are written in place in mutates="
            )

    def read_only(self, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The inputs that the kernel may not write; results may share memory with the others."""
        given_up, tensors = self.spec.given_up, arguments.items()
        return {name: t for name, t in tensors if isinstance(t, torch.Tensor) and name not in given_up}

    def returned(self, outputs: Outputs) -> dict[str, torch.Tensor]:
        """Returned outputs, without inputs written in place, which are their own memory."""
        written = {id(t) for name, t in outputs.tensors.items() if name.endswith(IN_PLACE)}
        return {name: t for name, t in outputs.tensors.items() if id(t) not in written}

    def collect(self, outcome: Outcome, placed: Placed) -> Outputs:
        """The kernel's outputs; a return value that only the in-place kernel or its reference has is left out."""
        got = collect(outcome.result, placed.arguments, self.spec.mutates)
        if self.spec.mutates and (outcome.result is None) != (self.reference.result is None):
            got = collect(None, placed.arguments, self.spec.mutates, returned=False)
            self.expected = collect(None, self.reference.arguments, self.spec.mutates, returned=False)
            self.leave_out_others()
        return got

    def explain_difference(self, got: Outputs, other: Outputs) -> bool:
        """Explain a difference between fills: chance, undefined lanes, the inputs' surroundings, or fresh memory.

        A difference between two runs under one fill is chance. True when it ends the case.
        """
        spec, context, case = self.spec, self.context, self.result.case
        chance: set[str] = set()
        answered = context.focus.until is not None and not any(map(self.tolerates, got.tensors))
        rounds = _CHANCES_WHILE_SHRINKING if answered else _CHANCES
        # Back and forth: A B, A B B A ... is out of step with a kernel that alternates between two buffers.
        runs = list(zip(FILLS, (got, other), strict=True))
        for fill, before in [run for turn in range(rounds) for run in (runs[::-1] if turn % 2 else runs)]:
            if repeat.first_difference(_without(got, chance), other.tensors) is None:
                break
            outcome, placed = call(context, case, self.logical, fill)
            if outcome.error is not None:
                return self.stop(outcome)
            now = self.collect(outcome, placed)
            while (same := repeat.first_difference(_without(before, chance), now.tensors)) is not None:
                if not self.tolerates(same[0]):
                    # A thread that still writes to a result may undo the difference before it is measured.
                    varied = repeat.variations(self.steady(before.tensors), [now.tensors]) or [repeat.seen(*same)]
                    if before is got and self.agree(now, other):
                        return self.note(repeat.varies(varied, repeat.FIRST, runs=3 + 2 * _LATER))
                    return self.note(repeat.check_repeat(varied, 3))
                chance.add(same[0])
        difference = repeat.first_difference(_without(got, chance), other.tensors)
        if difference is None:
            names = ", ".join(sorted(chance))
            return self.note(unknown("repeat", f"{names} varies from run to run, as deterministic= allows"))
        with context.clock.phase("make"):
            placed = place(self.logical, case, context.device, FILLS[0])
        with context.clock.phase("fused"):
            fresh = run_fused(spec.fused, placed, context.extra, programs=context.programs, fill=FILLS[1])
        caused_by_fresh = fresh.error is None and (
            repeat.first_difference(_without(got, chance), self.collect(fresh, placed).tensors) is not None
        )
        check, source, slug = (
            ("unwritten", "fresh memory (torch.empty) that nothing wrote", "scratch")
            if caused_by_fresh
            else ("bounds", "the bytes between or around the elements of an input", "surroundings")
        )
        source += memory.read_at(fresh, scratch=caused_by_fresh)
        return self.note(memory.of_elements(check, *difference, f"depend on {source}", slug=slug))

    def agree(self, *earlier: Outputs) -> bool:
        """Whether later calls give what an ``earlier`` one gave under each fill: only the case's first call differs."""
        for _ in range(_LATER):
            for fill, before in zip(FILLS, earlier, strict=True):
                outcome, placed = call(self.context, self.result.case, self.logical, fill)
                now = {} if outcome.error is not None else self.collect(outcome, placed).tensors
                if repeat.first_difference(self.steady(before.tensors), now) is not None:
                    return False
        return True

    def second(self, first: Outcome, got: Outputs) -> tuple[Outcome, Placed]:
        """The call under the other fill, with poison in undefined lanes unless poison alone changes a result."""

        def called(fill: str) -> tuple[Outcome, Placed]:
            return call(self.context, self.result.case, self.logical, fill)

        def results(outcome: Outcome, placed: Placed) -> Mapping[str, torch.Tensor] | None:
            spoilt = outcome.error is not None or outcome.damage or memory.check_access(outcome, self.spec)
            return None if spoilt else self.collect(outcome, placed).tensors

        with masked_fill("poison"):
            outcome, placed = called(FILLS[1])
        now = results(outcome, placed) if first.undefined else got.tensors
        if now is not None and repeat.first_difference(got.tensors, now) is None:
            return outcome, placed
        found = undefined.dependence(self.context, first.undefined, lambda: results(*called(FILLS[0])))
        if found is not None:
            self.note(found)
        return called(FILLS[1])

    def tolerates(self, output: str) -> bool:
        """Whether this output, or gradient, may vary by ``deterministic=``."""
        return varies(self.spec.deterministic, output)

    def steady(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs, or gradients, that may not vary."""
        return {name: t for name, t in tensors.items() if not self.tolerates(name)}

    def wrong(self, result: Any, placed: Placed) -> Verdict | None:
        """The failure of another call's results; ``None`` if they are right."""
        found = self.compare(self.collect(Outcome(result=result), placed))
        return found if found.failed else None

    def compare(self, got: Outputs, *, keep: bool = False, excused: bool = True) -> Verdict:
        """The verdict on another result, without aliasing; ``keep`` a wrong one for the picture of its errors."""
        verdict = structure.check_structure(got, self.expected, precision=precision(self.logical))
        if verdict.failed:
            return verdict if self.context.on("structure") else passed("structure")
        judged = self.judge(got)
        if excused:
            judged = {name: judged[name] for name in judged if name not in self.excused()}
        if keep:
            self.keep(got, judged)
        return values_check.as_verdict(judged)

    def judge(self, got: Outputs, *, grade: bool = False) -> dict[str, ValuesVerdict]:
        with self.context.clock.phase("judge"):
            return {name: self.judge_tensor(i, got.tensors[name], grade=grade) for i, name in enumerate(self.order)}

    def judge_tensor(
        self, index: int, candidate: torch.Tensor, *, grade: bool = False, laid: bool = True
    ) -> ValuesVerdict:
        """The verdict on one output. Without ``laid`` (planted errors), layout and 16 bits excuse nothing."""
        lanes = self.reference.lanes
        name, native = self.order[index], self.reference.native[index]
        many = MANY_LANES if native.numel() >= _FEW_ELEMENTS else MOST_LANES

        def judge() -> ValuesVerdict:
            coarse = factors_in_tf32()
            few = self.runs.fresh_lanes(name, FEW_LANES, "E") if coarse and lanes else lanes[index] if lanes else None
            return values_check.judge_one(
                candidate,
                native,
                few,
                lambda: self.runs.fresh_lanes(name, many, "E"),
                self.spec.tolerance,
                infinite=self.infinite,
                fine=(lambda: self.runs.fresh_lanes(name, FEW_LANES, "F")) if grade else None,
                wide=(lambda: self.runs.fresh_lanes(name, many, "F")) if self.narrow else None,
                laid=(lambda: self.runs.laid_lanes(name, many)) if laid and not coarse else None,
                eager=(lambda: self.runs.eager(name)) if laid and self.narrow else (lambda: None),
            )

        return tf32.judged(self.context, native, judge)

    def excused(self) -> set[str]:
        """Outputs that a plain call gets wrong, waived or known; no other check judges them."""
        if self._excused is None and self.context.on("values") and not self.context.focus.known:
            return set()
        if self._excused is None:
            outcome, placed = call(self.context, self.result.case, self.logical, FILLS[0])
            verdicts = {} if outcome.error is not None else self.judge(self.collect(outcome, placed))
            self._excused = {name for name, verdict in verdicts.items() if not verdict.ok}
        return self._excused

    def judge_varying(self, tensors: Mapping[str, torch.Tensor]) -> Verdict:
        """The verdict on values of outputs that may vary by ``deterministic=``; they must still be right."""
        judged = {
            name: self.judge_tensor(index, tensors[name])
            for index, name in enumerate(self.order)
            if name in tensors and self.tolerates(name) and name not in self.excused()
        }
        return values_check.as_verdict(judged)

    def keep(self, got: Outputs, verdicts: Mapping[str, ValuesVerdict]) -> None:
        """Store the failing output for the picture of errors; a hazard's only if sought, as a failure may follow."""
        name, sought = values_check.worst_of(verdicts), self.context.focus.sought
        if name is not None and (verdicts[name].grade == "D" or sought == values_check.as_verdict(verdicts).identity):
            right = verdicts[name].by or self.reference.native[self.order.index(name)]
            self.result.evidence = (name, got.tensors[name], right)

    def observe_vacuity(self) -> None:
        if not self.context.on("vacuity"):
            return
        with self.context.clock.phase("judge"):
            for i, name in enumerate(self.order):

                def accepts(wrong: torch.Tensor, i: int = i) -> bool:
                    # Losing NaN alone is accepted: it is a hazard, which fails no test.
                    return self.judge_tensor(i, wrong, laid=False).ok

                self.context.progress.vacuity.observe(name, self.reference.native[i], accepts)

    def call_again(self, got: Outputs, placed: Placed) -> None:
        """Call with changed values at the same addresses, which shows cached answers and state of the first call."""
        context, spec = self.context, self.spec
        case, logical = other_values(context, self.result.case, self.logical, "again")
        if logical is None:
            return
        before = {name: t.clone() for name, t in got.tensors.items()}
        with context.clock.phase("make"):
            rewrite(placed, logical)
            placed.arena.refill(FILLS[0])
        outcome = call_placed(context, spec.fused, placed)
        try:
            trial = self.of_values(case, logical)
        except ReferenceFailed:
            return
        if outcome.error is not None:
            if rejection(spec, outcome.error) is not None:
                return
            verdict, what, cause = error_verdict(outcome), "raised what a first call does not", None
        else:
            now = trial.collect(outcome, placed)
            verdict = trial.compare(now, excused=False)
            stale = repeat.first_difference(before, now.tensors) is None
            what = "returned the previous call's answer" if stale else "returned what a first call does not"
            cause = "cached-answer" if stale else None
        if not verdict.failed or verdict.statistical:
            return
        # Something kept by shape spoils every later call of these sizes: alone, the case would show a wrong value.
        certain = cause and _varied(before) and not self.result.waived
        alone = CaseResult(case) if certain else self.alone(case)
        if alone.rejected is not None or alone.waived or alone.spoiled_by():
            return
        if alone.failure is not None:
            self.result.case, self.result.verdicts = case, alone.verdicts
            self.result.evidence, self.result.trace = alone.evidence, alone.trace
            return
        found = verdict.reason.partition(": ")[2] if verdict.check == "values" else verdict.reason
        reason = f"called again with changed values at the same addresses, the kernel {what}: {found}"
        self.note(replace(verdict, check="repeat", reason=reason, identity="repeat:stale", cause=cause))


def _varied(outputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether an output has two or more non-integers, which a kernel that ignores its input does not get right."""
    floating = [t.detach().double() for t in outputs.values() if t.is_floating_point()]
    broken = [t[t.isfinite() & (t != t.round())] for t in floating]
    return any(bool((t != t[0]).any()) for t in broken if len(t))


def _without(outputs: Outputs, names: set[str]) -> dict[str, torch.Tensor]:
    return {name: t for name, t in outputs.tensors.items() if name not in names}
