"""Inputs that the reference uses and the kernel does not: whatever they hold, its result keeps its bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import function_of
from pytest_fusion.checks import probe as probing
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Answer, Lab
from pytest_fusion.diagnosis.rules import numerics
from pytest_fusion.spec.inputs import DerivedSpec, TensorSpec, unwrap
from pytest_fusion.spec.values import ValueProfile

# Of so many other contents of an input none may change a bit, and so many must change the right result.
_OTHERS, _TELLING = 5, 3
# Less of the largest element, and of its dtype's epsilons, is no change: a decay of 0.1 at a rate of 0.01 is a
# thousandth of a weight.
_CHANGED, _EPSILONS = 1e-2, 64

Tensors = Mapping[str, torch.Tensor]


def lost(lab: Lab) -> Found | None:
    """What one of several outputs sends back, as the check sees it in larger cases: of one key's softmax it is 0."""
    for case in lab.telling(lab.grown(), 2) if lab.check == gradients.NAME else []:
        found = lab.attempt(case).probe
        failure = found.failure if found is not None else None
        if failure is not None and failure.cause == "lost-output-gradient":
            return Found(failure.cause, [failure.because])
    return None


def unread(lab: Lab) -> Found | None:
    """One input may hold anything, where the right result is another one and other inputs do change the kernel's."""
    case = lab.grown()
    if not lab.mostly_wrong(case):
        case = lab.base
    seeds = lab.seeds(case, _OTHERS + 1)
    answers = [lab.attempt(case.with_(seed=seed)) for seed in seeds]
    first, before = answers[0], _results(lab, answers[0])
    others = [(answer, found) for answer in answers[1:] if (found := _results(lab, answer)) is not None]
    if before is None or not any(repeat.first_difference(before[0], got) for _, (got, _) in others):
        return None
    needed = _needed(lab)
    for name in case.tensors:
        if name in case.absent or name in needed:
            continue
        values = [answer.probe.logical[name] for answer, _ in others if answer.probe is not None]
        changes = (_instead(name, f"that of seed {i}", v) for i, v in enumerate(values))
        further = (_of_size_one(lab, case, name), _backwards(lab, case, name), _otherwise_drawn(lab, case, name))
        if _has_no_say(lab, case, before, itertools.chain(changes, *further)):
            return Found("ignores-input", [_sentence(lab, name)])
    for name, value in case.drawn.items():
        values = [other for other in lab.plan.pools.get(name, ()) if other != value][:_OTHERS]
        if name not in needed and _has_no_say(lab, case, before, (_instead(name, repr(v), v) for v in values), most=1):
            return Found("ignores-input", [_sentence(lab, name)])
    if first.wrong:
        lab.ruled_out.append("an input that is not read: each changes the kernel's result, or not the right one")
    return None


def _sentence(lab: Lab, name: str) -> str:
    output = lab.verdict.output
    what = f"gradient of {output[1:]}" if lab.check == gradients.NAME else "result"
    return f"whatever {name} holds, the kernel's {what} keeps its bits, where the right one changes"


def _needed(lab: Lab) -> set[str]:
    """What derived inputs are made of: changed alone, it would no longer fit them."""
    derived = (inner for given in lab.spec.inputs.values() if isinstance(inner := unwrap(given), DerivedSpec))
    return {need for inner in derived for need in inner.needs}


def _of_size_one(lab: Lab, case: Case, name: str) -> Iterator[Edit]:
    """The same values, scaled until the largest is about 1: scores near -12000 are all the same to who takes -10000
    for minus infinity, and yet are read."""
    most = numerics.largest(lab, case, [name]) if case.tensors[name].dtype.startswith(("float", "bfloat")) else 0.0
    if 2 < most < math.inf:
        yield edits.scaled([name], -math.ceil(math.log2(most)))


def _backwards(lab: Lab, case: Case, name: str) -> Iterator[Edit]:
    """The same values from the last to the first, where no function orders them: two whole numbers are mostly the
    largest and the least that are allowed, for every seed, and the first of them is read."""
    inner = unwrap(lab.spec.inputs[name])
    if isinstance(inner, TensorSpec) and function_of(inner, case.tensors[name].regime) is None:
        yield Edit(
            f"{name} backwards", lambda logical: {**logical, name: logical[name].flip(*range(logical[name].dim()))}
        )


def _otherwise_drawn(lab: Lab, case: Case, name: str) -> Iterator[Edit]:
    """What the other ones of several profiles give: of labels from 0 on all are kept by who takes those below 0 for
    padding, whatever number stands for it."""
    inner = unwrap(lab.spec.inputs[name])
    choices = inner.values.choices if isinstance(inner, TensorSpec) and isinstance(inner.values, ValueProfile) else ()
    for index in (i for i, profile in enumerate(choices) if profile.kind != "one_of"):
        drawn = lab.attempt(case.with_tensor(name, regime=str(index))).probe
        if drawn is not None:
            yield _instead(name, f"that of profile {index}", drawn.logical[name])


def _instead(name: str, what: str, value: Any) -> Edit:
    return Edit(f"{name}: {what}", lambda logical: {**logical, name: value})


def _results(lab: Lab, answer: Answer) -> tuple[Tensors, Tensors] | None:
    """What the kernel gave and what is right: all outputs, or the gradient that fails; ``None`` without either."""
    found, output = answer.probe, lab.verdict.output
    if found is None:
        return None
    if lab.check == gradients.NAME:
        pair = probing.gradient(found, output[1:]) if output.startswith("d") else None
        return None if pair is None else ({output: pair[0]}, {output: pair[1]})
    right = probing.right_of(lab.context, found.logical)
    return None if right is None or not found.got else (found.got, right)


def _has_no_say(
    lab: Lab, case: Case, before: tuple[Tensors, Tensors], changes: Iterator[Edit], *, most: int = _TELLING
) -> bool:
    """Whether none of the changes reaches a bit of the kernel's result, and enough of them the right one."""
    telling = 0
    for edit in changes:
        after = _results(lab, lab.attempt(case, edit=edit))
        if after is None or repeat.first_difference(before[0], after[0]) is not None:
            return False
        telling += any(_changed(t, after[1].get(name), _least(before[0].get(name))) for name, t in before[1].items())
    return telling >= most


def _least(got: torch.Tensor | None) -> float:
    """The least change, as a share of the largest element, that the kernel's own result could not miss."""
    return min(_CHANGED, _EPSILONS * torch.finfo(got.dtype).eps) if got is not None and got.is_floating_point() else 0.0


def _changed(before: torch.Tensor, after: torch.Tensor | None, least: float) -> bool:
    if after is None or after.shape != before.shape or not before.numel():
        return False
    if not before.is_floating_point():
        return not torch.equal(before, after)
    a, b = before.double().nan_to_num(), after.double().nan_to_num()
    return float((a - b).abs().max()) > least * float(b.abs().max())
