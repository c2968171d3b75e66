"""Classes of configs that give equal bits: the tuner's choice, by each machine's clock, decides among them.

Two ranks or two restarts that tune apart then disagree (Megatron-LM #6966: in 13 of 22 entries). On a few cases every
config of a kernel runs alone on the same inputs, and outputs (not gradients) are compared bit for bit. More than one
class is the hazard `config-variant-bits`, and a failure with ``invariant="configs"``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fusion.case import regimes
from pytest_fusion.case.case_model import Config
from pytest_fusion.case.plan import cost
from pytest_fusion.case.sizes import count
from pytest_fusion.checks import memory
from pytest_fusion.checks.context import Context, call
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Evidence, Verdict, failed, hazard, passed
from pytest_fusion.run.autotuned import Tuned, launched
from pytest_fusion.run.memory import FILLS
from pytest_fusion.spec.wording import grouped

CODE = "config-variant-bits"
_CHECK = "configs"
# Each config is one call a case. A sum in one block has the same bits in blocks of any size, so a case shows more if an
# axis passes half of the blocks that it has not passed; in the first cases, any. Longer ones do not: under 24 configs a
# row of 65 of the largest blocks took half of a test's time. One element past a block often rounds to the same bits.
_MOST_CASES, _FIRST_CASES, _LONGER = 6, 3, 1.5
# Where no config has a block: they differ in warps or stages.
_BLOCKS = {256, 4096}
# One in three sums of some hundred terms has the same bits in another order: fewer elements than this are little
# evidence, unless there are as many terms that nearly all differ.
_FEW, _LONG = 16, 4000
# A sum with an infinity in it, or of zeros, has the same bits in any order.
_TELLING = ("unit", "small", "hundred", "offset", "negative")
_MOST_CONFIGS = 24
# Under a budget and without invariant="configs": on a GPU compiling one config takes half a second. With three of 25
# configs of fla-core's l2norm other bits are not seen. Nor in probes: of later cases others compile configs ahead.
_FEW_CASES, _FEW_CONFIGS = 2, 6


@dataclass(frozen=True, slots=True)
class OtherBits(Evidence):
    """Two configs of a kernel whose outputs differ in bits; ``classes``: numbers of configs with equal bits."""

    kernel: str
    configs: list[int]
    output: str
    count: int
    first: list[int]
    classes: list[list[int]]


@dataclass(slots=True)
class _Bits:
    """The longest of each axis in the compared cases, and the class of each kernel's configs in each case."""

    cases: int = 0
    longest: dict[str, int] = field(default_factory=dict)
    tuned: dict[str, Tuned] = field(default_factory=dict)
    classes: dict[str, dict[int, list[int]]] = field(default_factory=dict)


def due(trial: Trial) -> bool:
    """A few cases, each past more blocks; every case while a difference shrinks."""
    context, tuned = trial.context, _several(trial)
    if not tuned or (_in_passing(context) and context.progress.probing):
        return False
    if context.focus.sought is not None:
        return context.focus.sought.startswith(f"{_CHECK}:{CODE}")
    lengths, drawn = _lengths(trial), {tensor.regime for tensor in trial.result.case.tensors.values()}
    few = sum(t.numel() for t in trial.expected.tensors.values()) < (1 if max(lengths.values()) >= _LONG else _FEW)
    if few or drawn & regimes.REGIMES.keys() - set(_TELLING):
        return False
    blocks = {size for seen in tuned for index in seen.survivors for size in seen.blocks(index).values()}
    state = context.state(_Bits)
    most, any_of_first = (_FEW_CASES, 0) if _in_passing(context) else (_MOST_CASES, _FIRST_CASES)
    # Pruning may have left others in all cases so far, whose sizes may have passed every block along another dim.
    fresh = (set(sorted(t.survivors)[:_MOST_CONFIGS]) - state.classes.get(t.kernel, {}).keys() for t in tuned)
    if not _in_passing(context) and state.cases < 2 * most and any(fresh):
        return True
    for name, length in lengths.items() if state.cases < most else ():
        left = [block for block in (blocks or _BLOCKS) | {_FEW} if state.longest.get(name, 0) < _LONGER * block]
        now = sum(block < length for block in left)
        if now and (state.cases < any_of_first or 2 * now >= len(left)):
            return True
    return context.complete


def _in_passing(context: Context) -> bool:
    return context.timed and not context.spec.invariant_configs


def _several(trial: Trial) -> list[Tuned]:
    """The kernels of the case with several configs to compare."""
    return [seen for seen in trial.result.tuned.values() if len(seen.survivors) > 1]


def _lengths(trial: Trial) -> dict[str, int]:
    """The sizes of the case and, by an empty name, the elements of its largest input."""
    case = trial.result.case
    return {name: count(size) for name, size in case.sizes.items()} | {"": cost(trial.spec, case)[0]}


def run(trial: Trial) -> Verdict:
    """A finding where two configs of a kernel give different bits."""
    state = _Bits() if trial.context.focus.sought is not None else trial.context.state(_Bits)
    state.cases += 1
    for name, length in _lengths(trial).items():
        state.longest[name] = max(length, state.longest.get(name, 0))
    found: Verdict | None = None
    for seen in _several(trial):
        found = _compared(trial, seen, state) or found
    return found or passed(_CHECK)


def _compared(trial: Trial, seen: Tuned, state: _Bits) -> Verdict | None:
    """Run every config on the case's inputs; one that cannot run, or is wrong, has no class."""
    context, case = trial.context, trial.result.case
    classes: list[tuple[int, dict[str, torch.Tensor]]] = []
    verdict = None
    state.tuned[seen.kernel] = seen
    of_kernel = state.classes.setdefault(seen.kernel, {})
    tried = _unlike(trial, seen)
    tried = tried[:: -(-len(tried) // _FEW_CONFIGS)] if _in_passing(context) else tried[:_MOST_CONFIGS]
    for index, *others in tried:
        ran: dict[int, Tuned] = {}
        with launched({**case.configs, seen.kernel: Config(index)}, ran):
            outcome, placed = call(context, case, trial.logical, FILLS[0])
        mine = ran.get(id(seen.tuner))
        if outcome.error is not None or mine is None or mine.launched != {index}:
            continue
        outputs = trial.collect(outcome, placed)
        if memory.check_access(outcome, trial.spec) is not None:
            continue
        got = trial.steady(outputs.tensors)
        number = next((n for n, (_, other) in enumerate(classes) if repeat.first_difference(other, got) is None), None)
        if number is None:
            # Bits of a wrong result say nothing: the config is a finding by itself.
            if trial.compare(outputs).failed:
                continue
            number = len(classes)
            classes.append((index, {name: t.detach().clone() for name, t in got.items()}))
            if number == 1:
                verdict = _verdict(context, seen, (classes[0][0], index), classes[0][1], got)
        for one in (index, *others):
            of_kernel.setdefault(one, []).append(number)
    return verdict


def _unlike(trial: Trial, seen: Tuned) -> list[list[int]]:
    """The configs that pruning leaves; together those that differ in nothing that an interpreted kernel reads."""
    on_cpu = trial.context.device.type == "cpu"
    return list(grouped((seen.read(index) if on_cpu else index, index) for index in sorted(seen.survivors)).values())


def _verdict(
    context: Context, seen: Tuned, pair: tuple[int, int], first: dict[str, torch.Tensor], got: dict[str, torch.Tensor]
) -> Verdict:
    varied = repeat.variations(first, [got])[0]
    text = f"{seen.called(pair[0])} and {seen.called(pair[1]).rpartition(' of ')[0]} give other bits: {varied} differ"
    evidence = OtherBits(
        seen.kernel, list(pair), varied.output, varied.count, varied.first, classes_of(context).get(seen.kernel, [])
    )
    identity = f"{_CHECK}:{CODE}:{seen.kernel}"
    if not context.spec.invariant_configs:
        return hazard(_CHECK, CODE, text, identity=identity, output=varied.output, evidence=evidence)
    reason = f"{text}, the first at {varied.first}, where invariant= promises one result for all configs"
    return failed(_CHECK, reason, identity=identity, output=varied.output, cause=CODE, evidence=evidence)


def classes_of(context: Context) -> dict[str, list[list[int]]]:
    """For each kernel the numbers of its configs, grouped by equal bits in every case."""
    found = {}
    for kernel, numbers in context.state(_Bits).classes.items():
        whole = max(map(len, numbers.values()), default=0)
        together = grouped((tuple(seen), index) for index, seen in sorted(numbers.items()) if len(seen) == whole)
        found[kernel] = list(together.values())
    return found


def listed(context: Context) -> dict[str, list[list[dict[str, Any]]]]:
    """``classes_of`` with what each config passes to its kernel, in JSON types."""
    tuned = context.state(_Bits).tuned
    return {
        kernel: [[{"number": index, **tuned[kernel].config(index)} for index in one] for one in classes]
        for kernel, classes in classes_of(context).items()
    }


def in_words(context: Context) -> str:
    """How many classes of bits there are where configs differ, to be put behind a sentence."""
    found = [len(classes) for classes in classes_of(context).values()]
    return "".join(f"; {n} classes of equal bits" for n in found if n > 1)
