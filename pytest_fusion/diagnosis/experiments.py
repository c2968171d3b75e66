"""The laboratory: runs a kernel on variants of a failing case, each once, and reports what became of the failure."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.case.plan import Plan, cost, refit
from pytest_fusion.case.sizes import count
from pytest_fusion.checks.context import Context
from pytest_fusion.checks.gradients import blame, gradients
from pytest_fusion.checks.probe import Probe, probe
from pytest_fusion.checks.verdict import Deviation, Verdict, WrongAccess, WrongGradient
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.errors import SpecError
from pytest_fusion.oracle import OutputLanes
from pytest_fusion.oracle.tolerance import excess_by
from pytest_fusion.run.compiled import timed_compilations
from pytest_fusion.spec.dims import Size

# At 5 to 30 ms a run a diagnosis takes one to three seconds; the second limit is for slow kernels. It counts seconds of
# this process, so that a loaded machine finds the same cause.
MAX_RUNS = 240
# The share of one rule: one that tries every dim with every tile leaves runs for the others.
_MOST_RUNS_OF_RULE = 100
MAX_SECONDS = 8.0
# Compiling a variant takes ten times as long as running it, once: with an empty cache on an H200, 32 of 215 causes were
# not found within the limit above, and 30 of them not with 20 s more. Then the CPU lane runs (`second_opinion`).
MAX_COMPILING_S = 8.0
_SEEDS = 3
# An error of so many times the allowed does not come and go by chance.
_PLAINLY = 32.0

Status = Literal["right", "alike", "otherwise", "impossible"]


@dataclass(frozen=True, slots=True)
class Found:
    """A cause that the experiments of one rule support, and its evidence, a sentence each."""

    cause: str
    evidence: list[str]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A failing output: its name, the kernel's values, the exact ones, and a mask of wrong elements."""

    name: str
    got: torch.Tensor
    right: torch.Tensor
    mask: torch.Tensor

    @property
    def far_off(self) -> bool:
        """Whether an error is as large as the elements, unlike a rounding; integers are always far off."""
        return blame.far_off(self.got, self.right)


@dataclass(frozen=True, slots=True)
class Answer:
    """The failure is gone, the same or another one, or the variant cannot run (any more)."""

    status: Status
    probe: Probe | None = None

    @property
    def right(self) -> bool:
        return self.status == "right"

    @property
    def wrong(self) -> bool:
        return self.status in ("alike", "otherwise")


_IMPOSSIBLE = Answer("impossible")


class Lab:
    """Experiments on one failure; ``base`` is the plainest case known, which rules may replace. ``note`` gets cases."""

    def __init__(
        self,
        context: Context,
        plan: Plan,
        case: Case,
        verdict: Verdict,
        *,
        blocks: Iterable[int] = (),
        note: Callable[[Case], None] = lambda _: None,
        max_runs: int = MAX_RUNS,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        # A right gradient is right, whatever else a variant of its case shows: the sums of atomics in another order.
        self.context = replace(context, focus=replace(context.focus, sought=verdict.identity))
        self.plan, self.spec, self.base, self.verdict = plan, plan.spec, case, verdict
        self.blocks = tuple(blocks)
        self.ruled_out: list[str] = []
        self.runs = 0
        self._note, self._max_runs, self._clock = note, max_runs, clock
        self._until = clock() + max_seconds
        self._compiled = 0.0
        self._most_now = max_runs
        self._known: dict[tuple[str, str, str], Answer] = {}
        self.check = _check_of(verdict)
        # Another check reports errors of a backward beside its gradients, and no forward shows them.
        if self.spec.grad and self.check != gradients.NAME and not self.attempt(case).wrong:
            self.check = gradients.NAME
            self._known.clear()

    def attempt(self, case: Case | None, *, laid: Case | None = None, edit: Edit | None = None) -> Answer:
        """Run the kernel on the values of ``case``, changed by ``edit``, in the layout of ``laid``; memoised."""
        if case is None:
            return _IMPOSSIBLE
        key = (case.key(), laid.key() if laid is not None else "", edit.name if edit is not None else "")
        if key not in self._known:
            if self.spent:
                return _IMPOSSIBLE
            self.runs += 1
            self._note(laid or case)
            self._known[key] = self._run(case, laid, edit)
        return self._known[key]

    def once(self, case: Case) -> Answer:
        """Run the kernel on a case in circumstances that a caller made; not memoised."""
        if self.spent:
            return _IMPOSSIBLE
        self.runs += 1
        self._note(case)
        return self._run(case, None, None)

    @property
    def spent(self) -> bool:
        return self.runs >= self._most_now or self._clock() - min(self._compiled, MAX_COMPILING_S) > self._until

    def begin_rule(self) -> None:
        """Start one rule's share of the runs."""
        self._most_now = min(self._max_runs, self.runs + _MOST_RUNS_OF_RULE)

    def _add_compiling(self, seconds: float) -> None:
        self._compiled += seconds

    def _run(self, case: Case, laid: Case | None, edit: Edit | None) -> Answer:
        try:
            with self.context.clock.phase("diagnosis"), timed_compilations(self._clock, self._add_compiling):
                found = probe(
                    self.context,
                    case,
                    self.check,
                    laid=laid,
                    edit=edit.apply if edit is not None else None,
                    again=self.verdict.identity == "repeat:stale",
                )
        except (SpecError, ImpossibleCase):
            return _IMPOSSIBLE
        if found.result.rejected is not None:
            return _IMPOSSIBLE
        failure = found.failure
        if failure is None:
            # Another finding may hide this one: the variant is no evidence that it is gone.
            hidden = any(
                v.failed and (v.check, v.output) == (self.check, self.verdict.output) for v in found.result.verdicts
            )
            return _IMPOSSIBLE if hidden else Answer("right", found)
        return Answer("alike" if failure.identity == self.verdict.identity else "otherwise", found)

    def seeds(self, case: Case | None = None, count: int = _SEEDS) -> list[int]:
        """The case's own seed and others that need the same checks."""
        own = (case or self.base).seed
        found = [own]
        for seed in range(200):
            if len(found) == count:
                break
            if seed != own and (self.check != gradients.NAME or gradients.all_gradients(seed)):
                found.append(seed)
        return found

    def telling(self, case: Case, count: int = 4, most: int = 16) -> list[Case]:
        """The case at the first few seeds for which it is wrong: drawn inputs may show nothing at some."""
        seeded = (case.with_(seed=seed) for seed in self.seeds(case, most))
        return list(itertools.islice((each for each in seeded if self.attempt(each).wrong), count))

    def always_right(self, case: Case | None, *, edit: Edit | None = None) -> bool:
        """Whether the case is right for each of a few seeds."""
        return case is not None and all(
            self.attempt(case.with_(seed=seed), edit=edit).right for seed in self.seeds(case, _SEEDS + 1)
        )

    def mostly_wrong(self, case: Case | None, *, edit: Edit | None = None) -> bool:
        """Whether the case is wrong for three of at most six seeds; drawn inputs may show nothing at some."""
        if case is None:
            return False
        wrong = right = 0
        for seed in self.seeds(case, 2 * _SEEDS):
            answer = self.attempt(case.with_(seed=seed), edit=edit)
            wrong += answer.wrong
            right += not answer.wrong
            if wrong == _SEEDS:
                return True
            if right > min(wrong + 1, _SEEDS):
                return False
        return False

    def plainly_wrong(self, case: Case, *, edit: Edit | None = None) -> bool:
        """Whether the case is wrong for some seed by far more than is allowed.

        An average of few elements has a wider limit, below 16 none: errors near a limit show at one size and not the
        next.
        """
        return any(
            self._is_plain(self.attempt(case.with_(seed=seed), edit=edit)) for seed in self.seeds(case, 2 * _SEEDS)
        )

    def _is_plain(self, answer: Answer) -> bool:
        failure = answer.probe.failure if answer.probe is not None else None
        if failure is None:
            return False
        wrong = self.wrong_of(answer)
        return (
            failure.check not in ("values", gradients.NAME)
            or (wrong is not None and wrong.far_off)
            or (ratio_of(failure) or 0.0) > _PLAINLY
        )

    def resized(self, sizes: Mapping[str, Size], case: Case | None = None) -> Case | None:
        """The case with these sizes; ``None`` if bounds or limits forbid them."""
        case = case or self.base
        try:
            fitted = refit(self.spec, {**case.sizes, **sizes})
            resized = case.with_(sizes=fitted)
            elements, work = cost(self.spec, resized)
        except ImpossibleCase:
            return None
        if elements > self.plan.limits.elements or work > self.plan.limits.work:
            return None
        return resized if all(count(fitted[name]) == count(size) for name, size in sizes.items()) else None

    def plain_sizes(self) -> dict[str, int]:
        """The dims of the base that are one number each."""
        return {name: size for name, size in self.base.sizes.items() if isinstance(size, int)}

    def axes_of(self, dim: str, case: Case) -> dict[str, int]:
        """The axis of a dim in each present tensor that has one."""
        shapes = {name: self.spec.tensors[name].shape for name in case.tensors if name not in case.absent}
        return {name: axis for name, shape in shapes.items() if (axis := shape.axis_of(dim, case.sizes)) is not None}

    def lengths(self) -> dict[str, int]:
        """These dims, and the batches of one dimension, as numbers of rows."""
        found = {name: size for name, size in self.base.sizes.items() if isinstance(size, int) or len(size) == 1}
        return {name: count(size) for name, size in found.items()}

    def grown(self, case: Case | None = None, at_least: Iterable[int] = (5, 7, 3, 4, 6)) -> Case:
        """The case with at least these sizes, different from dim to dim, as far as bounds allow."""
        case = case or self.base
        wanted = list(at_least)
        for position, (name, size) in enumerate(case.sizes.items()):
            least = wanted[position % len(wanted)]
            if isinstance(size, int) and size < least:
                for candidate in (least, least + 1, least - 1, 2):
                    fitted = self.resized({name: candidate}, case) if candidate > size else None
                    if fitted is not None:
                        case = fitted
                        break
        return case

    def wrong_of(self, answer: Answer) -> Wrong | None:
        """The output that the failure is about where it is wrong, else the failing one of an answer.

        Where no values failed, the first output with wrong elements.
        """
        found = answer.probe
        if found is None:
            return None
        evidence, sought = found.result.evidence, self.verdict.output
        names = [sought, evidence[0]] if evidence is not None else list(found.got)
        for name in names:
            got, against = found.got.get(name), found.lanes.get(name)
            if got is None or against is None:
                continue
            right = against.oracle if isinstance(against, OutputLanes) else against
            if got.shape != right.shape:
                continue
            mask = excess_by(got, against, self.spec.tolerance) > 1
            if bool(mask.any()):
                # torch has few operations for float8.
                small = got.is_floating_point() and got.element_size() == 1
                values = got.detach().float() if small else got.detach()
                return Wrong(name, values, right.detach().to(torch.float64 if small else right.dtype), mask)
        return None


def ordinary(case: Case, names: Iterable[str]) -> Case:
    """The case with ordinary values in these tensors."""
    for name in names:
        case = case.with_tensor(name, regime="unit")
    return case


def _check_of(verdict: Verdict) -> str:
    """The check that shows the failure with the fewest calls."""
    inner = verdict.inner or verdict.check
    if inner in ("values", gradients.NAME, "error"):
        return inner
    never_written = verdict.check == "unwritten" and verdict.identity != "unwritten:scratch"
    return "values" if isinstance(verdict.evidence, WrongAccess) or never_written else "all"


def ratio_of(verdict: Verdict) -> float | None:
    """The error of a wrong output or gradient over what is allowed."""
    seen = verdict.evidence.deviation if isinstance(verdict.evidence, WrongGradient) else verdict.evidence
    return seen.ratio if isinstance(seen, Deviation) else None
