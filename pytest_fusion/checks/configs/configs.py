"""Check `configs`: every config of an autotuned kernel alone, and the call that chooses one of them.

A tuner takes whichever config is fastest on the machine at hand, so a wrong one passes every test until another device
or another size prefers it. Each config runs on fresh, poisoned memory, twice, under both fills, and is judged as the
case was: accesses, damage, values, what the result depends on, and the gradients where `gradients` judges the case.
After them the case runs once more as the first call of a process, which tunes: what a benchmark leaves in a tensor that
neither ``restore_value`` nor ``reset_to_zero`` names shows there, and what ``reset_to_zero`` clears though the caller
put it there.

These cases are the first of a test, which are small. When all others have passed, further ones take each config past
its own blocks (`past_blocks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.plan import Plan
from pytest_fusion.checks import memory
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.configs.past_blocks import Key, Reach, Reason
from pytest_fusion.checks.context import CaseResult, Context, call, error_verdict, rejection
from pytest_fusion.checks.evidence import WrongConfig
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.repeat.repeat import Variance
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.vacuity import Vacuity
from pytest_fusion.checks.verdict import Verdict, failed, passed, unknown
from pytest_fusion.run.autotuned import Tuned, forced, refused, retuned, unable
from pytest_fusion.run.fused import ContextLost
from pytest_fusion.run.memory import FILLS
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief

NAME = "configs"

_MOST_CASES = 8
# Two interpreted calls each; lists of configs that are written by hand are shorter, generated ones are not.
_MOST_CONFIGS = 24
# Cases past blocks that were judged, and configs run on them: enough for the 36 configs of a matmul, at 60 ms each on
# the CPU lane, to be past two blocks along each of its three dims before any is past a single one.
_MOST_PAST, _MOST_PAST_RUNS = 12, 108
_ADVICE = (
    "; a benchmark runs the kernel many times, so name what it changes in restore_value=, and in reset_to_zero= only "
    "what every call clears by itself"
)
_REASONS: Mapping[Reason, str] = {
    "dims": "dims= admits none",
    "limits": "a case of that size has more elements than this profile allows",
    "rejected": "those cases were rejected",
    "cases": "more cases would reach it",
}
_OWN = "its pruning leaves configs that are not in its list, which cannot be run one by one"


@dataclass(slots=True)
class _Progress:
    """How far the configs of one kernel have come over all cases of a test."""

    kernel: Tuned
    survived: set[int] = field(default_factory=set)
    tries: Counter[int] = field(default_factory=Counter)
    ran: set[int] = field(default_factory=set)
    unable: dict[int, str] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Focus:
    """The kernel and config (``None``: the call that tunes) that failed, the only ones that run while the case shrinks.

    A suspicion that fresh values did not repeat ends it.
    """

    tuner: int
    index: int | None
    unrepeated: int


@dataclass(slots=True)
class _State:
    """What this check keeps from case to case of one test."""

    progress: dict[int, _Progress] = field(default_factory=dict)
    cases: int = 0
    sizes: set[str] = field(default_factory=set)
    focus: _Focus | None = None
    suspects_tuning: bool = False
    reach: Reach = field(default_factory=Reach)
    # The configs that a case past their blocks is about.
    aim: tuple[Key, ...] = ()
    past_cases: int = 0
    past_runs: int = 0

    def of(self, seen: Tuned) -> _Progress:
        key = id(seen.tuner)
        if key not in self.progress:
            self.progress[key] = _Progress(seen)
            for index in range(seen.total):
                self.reach.add((key, index), seen.blocks(index))
        self.progress[key].survived |= seen.survivors
        return self.progress[key]


def _state(context: Context) -> _State:
    state = context.state(_State)
    if state.focus is not None and state.focus.unrepeated != context.progress.unrepeated:
        state.focus = None
    return state


def due(trial: Trial) -> bool:
    """A few thorough cases of different sizes that launched an autotuned kernel; the failing one in every case."""
    context, tuned = trial.context, trial.result.tuned
    state = _state(context)
    if state.focus is not None:
        return state.focus.tuner in tuned
    if state.aim and not state.suspects_tuning:
        return True
    if not tuned or state.suspects_tuning or context.complete:
        return bool(tuned)
    return trial.thorough and state.cases < _MOST_CASES and _sizes(trial) not in state.sizes


def _sizes(trial: Trial) -> str:
    return repr(sorted(trial.result.case.sizes.items()))


def run(trial: Trial) -> Verdict:
    """The first wrong config, or the call that tunes where that is wrong."""
    context, tuned = trial.context, list(trial.result.tuned.values())
    state = _state(context)
    focus = state.focus
    if focus is not None:
        seen = trial.result.tuned[focus.tuner]
        found = _tuning(trial, [seen]) if focus.index is None else _alone(trial, seen, focus.index).failure
        return found or passed(NAME)
    progress_of = [state.of(seen) for seen in tuned]
    aim = () if state.suspects_tuning else state.aim
    if aim:
        chosen = _aimed(trial, state)
        state.past_cases += 1
        state.past_runs += len(chosen)
    else:
        state.cases += 1
        state.sizes.add(_sizes(trial))
        chosen = _chosen(context, progress_of, tuned)
    why: list[str] = []
    for seen, index in chosen:
        alone = _alone(trial, seen, index)
        state.of(seen).tries[index] += 1
        if alone.failure is not None:
            state.focus = _Focus(id(seen.tuner), index, context.progress.unrepeated)
            return alone.failure
        why += _noted(trial, state, seen, index, alone)
    # What a benchmark leaves behind was asked of the cases before.
    found = None if aim else _tuning(trial, tuned)
    if found is not None:
        assert isinstance(found.evidence, WrongConfig)
        kernel = found.evidence.kernel
        at_fault = next((seen for seen in tuned if seen.kernel == kernel), tuned[0])
        state.focus = _Focus(id(at_fault.tuner), None, context.progress.unrepeated)
        return found
    why += [] if chosen or aim else [_OWN]
    of = sum(seen.total for seen in tuned)
    return unknown(NAME, why[0], ran=len(chosen), of=of) if why else passed(NAME, ran=len(chosen), of=of)


def _noted(trial: Trial, state: _State, seen: Tuned, index: int, alone: _Alone) -> list[str]:
    """Note what became of a config that is not wrong; the reason if it could not run on any case so far."""
    progress, key = state.of(seen), (id(seen.tuner), index)
    if alone.refused:
        progress.refused.add(index)
        state.reach.drop(key)
    elif alone.unable:
        progress.unable[index] = f"{seen.called(index)} could not run: {alone.unable}"
        return [] if index in progress.ran else [progress.unable[index]]
    elif alone.launches:
        progress.ran.add(index)
        state.reach.note(key, trial.spec, trial.result.case)
    return []


def _chosen(context: Context, progress: Iterable[_Progress], tuned: Iterable[Tuned]) -> list[tuple[Tuned, int]]:
    """The configs that this case runs: what pruning left, those least tried first, so that all have their turn."""
    pairs = [
        (kernel.tries[index], seen, index)
        for kernel, seen in zip(progress, tuned, strict=True)
        for index in sorted(seen.survivors)
    ]
    pairs.sort(key=lambda pair: pair[0])
    # A replayed case has no other to leave the rest to.
    return [(seen, index) for _, seen, index in (pairs if context.complete else pairs[:_MOST_CONFIGS])]


def _aimed(trial: Trial, state: _State) -> list[tuple[Tuned, int]]:
    """The configs that a case past their blocks is about, but for those that are not launched with its sizes."""
    tuned, chosen = trial.result.tuned, []
    for tuner, index in state.aim:
        if tuner in tuned and index in tuned[tuner].survivors:
            chosen.append((tuned[tuner], index))
        else:
            state.reach.note((tuner, index), trial.spec, trial.result.case)
    return chosen


@contextmanager
def past_blocks(context: Context, plan: Plan, base: int) -> Iterator[Case | None]:
    """The next case past the blocks of configs, which are judged on it meanwhile; ``None`` where there is none."""
    state = _state(context)
    most = min(_MOST_CONFIGS, _MOST_PAST_RUNS - state.past_runs)
    spent = state.past_cases >= _MOST_PAST or most <= 0
    aim = None if spent else state.reach.following(plan, base, most)
    state.aim = () if aim is None else aim.configs
    try:
        yield None if aim is None else aim.case
    finally:
        state.aim = ()


def suspects_tuning(context: Context, *, so: bool) -> None:
    """Make this check due whatever the case: its first call tuned and failed, and the next one may not."""
    _state(context).suspects_tuning = so


def summary(context: Context) -> Verdict:
    """What all cases of a test add up to; a config that ran in none of them is not known to be right."""
    state = _state(context)
    kernels = state.progress.values()
    if not kernels:
        return unknown(NAME, "nothing to judge: no autotuned kernel was launched")
    words = "; ".join(map(_counted, kernels))
    for kernel in kernels:
        left = sorted(kernel.survived - kernel.ran - kernel.refused)
        reason = next((kernel.unable[i] for i in left if i in kernel.unable), "more cases would reach the others")
        if left or not kernel.survived:
            return unknown(NAME, f"{words}; {reason if left else _OWN}")
    within = [short for kernel in kernels for short in _within(kernel, state.reach, context.spec)]
    if not within:
        return Verdict(NAME, "pass", words)
    settled, _, first = min(within, key=lambda short: (short[0], -short[1]))
    others = {text for *_, text in within} - {first}
    words = f"{words}; {first}" + (f" (and {len(others)} more of this kind)" if others else "")
    return Verdict(NAME, "pass", words) if settled else unknown(NAME, words)


def _within(progress: _Progress, reach: Reach, spec: FusionSpec) -> Iterator[tuple[bool, int, str]]:
    """The blocks that no axis passed under a config, in words, and whether no case can pass them."""
    seen = progress.kernel
    for index in sorted(progress.ran):
        lacking = reach.lacking((id(seen.tuner), index), spec)
        for name, size in seen.blocks(index).items():
            if reason := lacking.get(size):
                text = f"{seen.called(index)} met no axis longer than {name}={size}: {_REASONS[reason]}"
                yield reason in ("dims", "rejected"), size, text


def _counted(progress: _Progress) -> str:
    seen = progress.kernel
    dropped = seen.total - len(progress.survived)
    pruned = f", {dropped} dropped by its own pruning" if dropped else ""
    refuses = len(progress.refused - progress.ran)
    asserted = f", {refuses} refused by its own static_assert" if refuses else ""
    return f"ran {len(progress.ran)} of {seen.total} configs of {seen.kernel}{pruned}{asserted}"


@dataclass(frozen=True, slots=True)
class _Alone:
    """What one config did: failed, could not run (and why), or passed in so many launches."""

    failure: Verdict | None = None
    unable: str = ""
    refused: bool = False
    launches: int = 0


def _alone(trial: Trial, seen: Tuned, index: int) -> _Alone:
    """One config, judged as the case was."""
    called = seen.called(index)
    try:
        with forced(seen.tuner, index) as applied:
            inner = _Inner(trial)
            found = inner.judge() or (None if inner.unable else inner.judge_gradients())
    except ContextLost as lost:
        raise ContextLost(f"{called}: {lost}") from lost
    for verdict in inner.result.verdicts:
        if verdict.status == "hazard":
            trial.note(verdict)
    error = applied.error
    if error is not None and (unable(error) or refused(error)):
        return _Alone(None, brief(error), refused(error), applied.launches)
    if found is None or inner.unable:
        return _Alone(None, inner.unable, launches=applied.launches)
    trial.result.evidence, trial.result.trace = inner.result.evidence, inner.result.trace
    return _Alone(
        failed(
            NAME,
            f"{called}: {found.reason}",
            identity=f"configs:{seen.kernel}:{index}:{found.identity}",
            statistical=found.statistical,
            inner=found.check,
            evidence=WrongConfig(seen.kernel, found.facts, index, seen.config(index)),
        )
    )


def _tuning(trial: Trial, tuned: Sequence[Tuned]) -> Verdict | None:
    """What is wrong with the call that tunes, of the first kernel to which alone it happens."""
    together = _retuned(trial, tuned)
    if together is None or len(tuned) == 1:
        return together
    return next((found for seen in tuned if (found := _retuned(trial, [seen])) is not None), together)


def _retuned(trial: Trial, tuned: Sequence[Tuned]) -> Verdict | None:
    tuning = partial(retuned, [seen.tuner for seen in tuned])
    inner = _Inner(trial)
    found = inner.judge(tuning) or (None if inner.unable else inner.judge_gradients(tuning))
    if found is None or inner.unable:
        return None
    trial.result.evidence, trial.result.trace = inner.result.evidence, inner.result.trace
    kernel = tuned[0].kernel
    what = found.reason
    if isinstance(seen := found.evidence, Variance):
        what = (
            f"{seen.worst.count} of {seen.worst.total} element(s) of {found.output} differ from a later call's, "
            f"the first at {seen.worst.first}"
        )
    return failed(
        NAME,
        f"the first call, in which {kernel} is tuned: {what}{'' if found.check == 'error' else _ADVICE}",
        identity=f"configs:{kernel}:tuning:{found.identity}",
        statistical=found.statistical,
        inner=found.check,
        evidence=WrongConfig(kernel, found.facts),
    )


class _NotObserved(Vacuity):
    """Only the case itself counts as evidence that a wrong answer is refuted, not its repetitions."""

    def observe(self, name: str, right: torch.Tensor, accepts: Callable[[torch.Tensor], bool]) -> None:
        """Nothing."""


class _Inner:
    """The case once more, under other configs, against the reference that it has already."""

    def __init__(self, trial: Trial) -> None:
        progress = replace(trial.context.progress, vacuity=_NotObserved())
        self._context = replace(trial.context, progress=progress)
        self.result = CaseResult(trial.result.case)
        self._trial = Trial(
            self._context, self.result, trial.logical, trial.reference, trial.expected, trial.alone, trial.draws
        )
        # Why nothing could be judged.
        self.unable = ""

    def judge(self, around_first: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Verdict | None:
        """The first failure of the checks that every case goes through."""
        context, trial = self._context, self._trial
        with around_first():
            first, placed = call(context, self.result.case, trial.logical, FILLS[0])
        error = first.error
        if error is not None and rejection(context.spec, error) is not None:
            self.unable = brief(error)
            return None
        accessed = memory.check_access(first, context.spec)
        if accessed is not None and context.on(accessed.check):
            return accessed
        if error is not None:
            self.result.trace = first.trace
            return error_verdict(first) if context.on("error") else None
        trial.run(first, placed, again=False)
        self.unable = self.result.rejected or ""
        return self.result.failure

    def judge_gradients(self, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Verdict | None:
        """The failure of ``gradients``, where that check judges this case: kernels of a backward are launched there."""
        context, trial = self._context, self._trial
        if not context.on(gradients.NAME) or gradients.missing(context.spec, context.device) is not None:
            return None
        if not gradients.due(trial):
            return None
        with around():
            found = gradients.run(trial)
        return found if found.failed else None


def _cause(verdict: Verdict) -> str:
    seen = verdict.evidence
    return "bad-config" if isinstance(seen, WrongConfig) and seen.index is not None else "autotune-side-effect"


CHECK = Check(NAME, run, due=due, summary=summary, cause=_cause)
