"""Check `configs`: every config of an autotuned kernel, and the calls that tune it.

A tuner takes the fastest config on the machine, so a wrong one passes every test until another device or size prefers
it. A case launches each kernel with one config, a choice like a size (`case.plan`), under all checks. Further cases
follow from the launches: a process's first call, which tunes (a benchmark changes tensors that neither
``restore_value`` nor ``reset_to_zero`` names, and ``reset_to_zero`` clears what the caller wrote); a config that
pruning drops, but an earlier call with the same key chose; sizes past each config's blocks (`past_blocks`). A failure
that the first config does not have is a finding of this check.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case, Config
from pytest_fusion.case.plan import CONFIG, Plan
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.configs import bit_classes
from pytest_fusion.checks.configs.past_blocks import Reach, Reason
from pytest_fusion.checks.context import CaseResult, Context
from pytest_fusion.checks.repeat.repeat import Variance
from pytest_fusion.checks.verdict import Facts, Verdict, WrongConfig, failed, unknown
from pytest_fusion.run.autotuned import TRIED, Tuned
from pytest_fusion.spec.fusion_spec import FusionSpec

NAME = "configs"

# Cases of different sizes that are judged again with a first call that tunes: the probes and two more.
_MOST_EXAMPLES = 4
# Cases with a config that pruning drops: two for each set of configs that it leaves.
_MOST_STALE = 12
# Cases past blocks, and their runs: enough for 36 configs of a matmul past two blocks along two dims.
_MOST_PAST, _MOST_PAST_RUNS = 12, 72
# The most configs of one concrete call: hand-written lists are shorter, generated ones may not be.
_MOST_CONFIGS = 24
_ADVICE = (
    "; a benchmark runs the kernel many times, so name what it changes in restore_value=, and in reset_to_zero= only "
    "what every call clears by itself"
)
_KEY = ", which pruning drops here and another call with the same key leaves: key= lacks what pruning depends on"
_REASONS: Mapping[Reason, str] = {
    "dims": "dims= admits none",
    "limits": "a case of that size has more elements than this profile allows",
    "rejected": "those cases were rejected",
    "cases": "more cases would reach it",
}
_OWN = "its pruning leaves configs that are not in its list, which cannot be run one by one"


@dataclass(slots=True)
class _Kernel:
    """Launches of one autotuned kernel in all cases of a test; ``tuned`` is its record of the last one."""

    tuned: Tuned
    survived: set[int] = field(default_factory=set)
    ran: set[int] = field(default_factory=set)
    unable: dict[int, str] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    # By key, the sets of configs that pruning left, each with a case.
    left: dict[Any, dict[frozenset[int], Case]] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    """Launches of all cases; ``examples`` are cases by size, ``tuned`` the sizes judged with a call that tunes."""

    kernels: dict[str, _Kernel] = field(default_factory=dict)
    examples: dict[str, Case] = field(default_factory=dict)
    tuned: set[str] = field(default_factory=set)
    reach: Reach = field(default_factory=Reach)
    wrong: set[tuple[str, Config]] = field(default_factory=set)


def note(context: Context, result: CaseResult) -> None:
    """Add the launches of a case to the test's."""
    if not result.tuned:
        return
    state, case = context.state(_State), result.case
    for seen in result.tuned.values():
        kernel = state.kernels.get(seen.kernel)
        if kernel is None:
            kernel = state.kernels[seen.kernel] = _Kernel(seen)
            for index in range(seen.total):
                state.reach.add((seen.kernel, index), seen.blocks(index))
        kernel.tuned = seen
        kernel.survived |= seen.survivors
        kernel.refused |= seen.refused
        kernel.unable |= seen.unable
        for index in seen.refused:
            state.reach.drop((seen.kernel, index))
        if result.rejected is not None or result.failure is not None:
            continue
        kernel.ran |= seen.launched
        for index in range(seen.total):
            if index in seen.launched or index not in seen.survivors:
                state.reach.note((seen.kernel, index), context.spec, case)
        for key, left in seen.keys.items():
            kernel.left.setdefault(key, {}).setdefault(left, case)
    if result.rejected is None and result.failure is None and len(state.examples) < _MOST_EXAMPLES:
        state.examples.setdefault(repr(sorted(case.sizes.items())), case)


def as_launched(result: CaseResult) -> Case:
    """The case with the configs that its kernels launched in place of those that pruning drops."""
    if not result.tuned:
        return result.case
    configs = dict(result.case.configs)
    for seen in result.tuned.values():
        wanted = configs.get(seen.kernel, Config())
        if wanted.launch == "chosen" and len(seen.launched) == 1 and wanted.number not in seen.launched:
            (number,) = seen.launched
            configs[seen.kernel] = Config(number)
    return result.case.with_(configs={name: config for name, config in configs.items() if config != Config()})


def assigned(context: Context, case: Case, planned: Collection[str]) -> Case:
    """The case with a config for each kernel that the plan has no factor for; none that was found wrong."""
    state = context.state(_State)
    if not state.kernels:
        return case
    configs = {kernel: config for kernel, config in case.configs.items() if (kernel, config) not in state.wrong}
    for name, kernel in state.kernels.items():
        if f"{CONFIG}{name}" not in planned and context.on(NAME):
            config = Config(counter_random.mix(case.seed, NAME, name) % kernel.tuned.total)
            if config.number and (name, config) not in state.wrong:
                configs.setdefault(name, config)
    return case.with_(configs=configs)


def first_calls(context: Context) -> Iterator[Case]:
    """A few cases with a first call that tunes; before them, cases with its configs that none has had."""
    state = context.state(_State)
    yield from _unmet(state, TRIED)
    for sizes, case in list(state.examples.items()):
        tuned = _tuned_by(state, case, len(state.tuned))
        if tuned.configs and sizes not in state.tuned:
            state.tuned.add(sizes)
            yield tuned


def further(context: Context, plan: Plan, base: int) -> Iterator[Case]:
    """Cases that follow from all launches; each depends on the notes of those before it."""
    state = context.state(_State)
    yield from _unmet(state)
    yield from first_calls(context)
    for name, kernel in list(state.kernels.items()):
        yield from (case for case in _stale(name, kernel) if (name, case.configs[name]) not in state.wrong)
    runs = 0
    for _ in range(_MOST_PAST):
        aim = state.reach.following(plan, base, min(_MOST_CONFIGS, _MOST_PAST_RUNS - runs))
        if aim is None:
            return
        runs += len(aim.configs)
        for name, index in aim.configs:
            if (name, Config(index)) not in state.wrong:
                yield aim.case.with_(configs={name: Config(index)})
        if runs >= _MOST_PAST_RUNS:
            return


def _unmet(state: _State, first: int | None = None) -> Iterator[Case]:
    """Cases with configs that none has had; with ``first``, only of that many that pruning leaves."""
    examples = list(state.examples.values())
    for name, kernel in list(state.kernels.items()):
        for turn, index in enumerate(sorted(kernel.survived)[:first]):
            if examples and not any(index in seen for seen in (kernel.ran, kernel.refused, kernel.unable)):
                yield examples[turn % len(examples)].with_(configs={name: Config(index)})


def every(context: Context, case: Case) -> Iterator[Case]:
    """The case with each further config of the kernels that it launched, and with a first call that tunes."""
    state = context.state(_State)
    for name, kernel in list(state.kernels.items()):
        for index in sorted(kernel.survived - kernel.ran)[:_MOST_CONFIGS]:
            yield case.with_(configs={name: Config(index)})
    if state.kernels:
        yield _tuned_by(state, case)


def _tuned_by(state: _State, case: Case, wins: int = 0) -> Case:
    """The case with a first call that tunes all kernels without a finding; ``wins`` counts through their configs."""
    wrong = {name for name, _ in state.wrong}
    return case.with_(configs={name: Config(wins, "tuning") for name in state.kernels if name not in wrong})


def _stale(name: str, kernel: _Kernel) -> Iterator[Case]:
    """Cases with configs that pruning drops and that another call with the same key leaves."""
    count = 0
    for sets in kernel.left.values():
        together = frozenset().union(*sets)
        for left, case in sets.items():
            dropped = sorted(together - left)
            for index in dict.fromkeys([*dropped[:1], *dropped[-1:]]):
                if count < _MOST_STALE:
                    count += 1
                    yield case.with_(configs={name: Config(index, "stale")})


def blamed(context: Context, result: CaseResult, found: Verdict) -> Verdict:
    """The finding of a case that is right with first configs, as one of its configs or of the call that tunes."""
    seen = {tuned.kernel: tuned for tuned in result.tuned.values()}
    configs = {name: config for name, config in result.case.configs.items() if name in seen}
    if not configs:
        return found
    context.state(_State).wrong |= set(configs.items())
    name, config = next(iter(configs.items()))
    if config.launch == "tuning":
        kernels, what = " and ".join(configs), found.reason
        if isinstance(wrong := found.evidence, Variance):
            what = (
                f"{wrong.worst.count} of {wrong.worst.total} element(s) of {found.output} differ from a later call's, "
                f"the first at {wrong.worst.first}"
            )
        reason = f"the first call, in which {kernels} is tuned: {what}{'' if found.check == 'error' else _ADVICE}"
        evidence = WrongConfig(name, found.facts)
    else:
        called = " with ".join(seen[kernel].called(one.number) for kernel, one in configs.items())
        reason = f"{called}{_KEY if config.launch == 'stale' else ''}: {found.reason}"
        evidence = WrongConfig(name, found.facts, config.number, seen[name].config(config.number))
    return failed(
        NAME,
        reason,
        identity=f"configs:{name}:{config}:{found.identity}",
        statistical=found.statistical,
        output=found.output,
        inner=found.check,
        evidence=evidence,
    )


def summary(context: Context) -> Verdict:
    """The conclusion of all cases; a config that never ran is not known to be right."""
    state = context.state(_State)
    kernels = state.kernels.values()
    if not kernels:
        return unknown(NAME, "nothing to judge: no autotuned kernel was launched")
    words = "; ".join(map(_counted, kernels))
    for kernel in kernels:
        left = sorted(kernel.survived - kernel.ran - kernel.refused)
        reason = next(
            (f"{kernel.tuned.called(i)} could not run: {kernel.unable[i]}" for i in left if i in kernel.unable), ""
        )
        if left or not kernel.survived:
            return unknown(NAME, f"{words}; {(reason or 'more cases would reach the others') if left else _OWN}")
    within = [short for kernel in kernels for short in _within(kernel, state.reach, context.spec)]
    classes = Facts({"classes": bit_classes.listed(context)})
    if not within:
        return Verdict(NAME, "pass", words + bit_classes.in_words(context), classes)
    settled, _, first = min(within, key=lambda short: (short[0], -short[1]))
    others = {text for *_, text in within} - {first}
    words = f"{words}; {first}" + (f" (and {len(others)} more of this kind)" if others else "")
    words += bit_classes.in_words(context)
    return Verdict(NAME, "pass" if settled else "unknown", words, classes)


def _within(kernel: _Kernel, reach: Reach, spec: FusionSpec) -> Iterator[tuple[bool, int, str]]:
    """The blocks that no axis passed under a config, in words, and whether no case can pass them."""
    seen = kernel.tuned
    for index in sorted(kernel.ran):
        lacking = reach.lacking((seen.kernel, index), spec)
        for name, size in seen.blocks(index).items():
            if reason := lacking.get(size):
                text = f"{seen.called(index)} met no axis longer than {name}={size}: {_REASONS[reason]}"
                yield reason in ("dims", "rejected"), size, text


def _counted(kernel: _Kernel) -> str:
    seen = kernel.tuned
    dropped = seen.total - len(kernel.survived)
    pruned = f", {dropped} dropped by its own pruning" if dropped else ""
    refuses = len(kernel.refused - kernel.ran)
    asserted = f", {refuses} refused by its own static_assert" if refuses else ""
    return f"ran {len(kernel.ran)} of {seen.total} configs of {seen.kernel}{pruned}{asserted}"


def _cause(verdict: Verdict) -> str:
    seen = verdict.evidence
    return "bad-config" if isinstance(seen, WrongConfig) and seen.index is not None else "autotune-side-effect"


CHECK = Check(NAME, bit_classes.run, due=bit_classes.due, summary=summary, cause=_cause)
