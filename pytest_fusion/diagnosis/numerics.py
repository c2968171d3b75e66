"""Causes in numbers: NaN, overflow, roundings, an epsilon."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pytest_fusion.case.make import shape_of
from pytest_fusion.case.model import Case
from pytest_fusion.case.plan import cost
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.experiments import Lab, Wrong, ordinary
from pytest_fusion.diagnosis.model import Found
from pytest_fusion.run.lanes import OutputLanes
from pytest_fusion.spec.inputs import TensorSpec, unwrap

_NON_FINITE = ("nan", "inf")
# exp overflows float32 at 88.7, exp2 at 128, their float16 twins at 11 and 16; scores are scaled by as little as 1/30.
_EXP_RANGE = (4.0, 4096.0)
# What 16 bits round to is 2^-9 of the largest; a sum of many such roundings is still far from this.
_SMALL_ERROR = 2.0**-5
# Of rounding errors that add up, the sum grows with the length, by the fewest steps in a balanced tree: from 4 to 512
# elements by the root of 9/2, less where a dim admits less. Of one rounding it does not grow at all.
_GROWS, _GROWS_SHORT = 1.4, 1.2
_SHORT, _LONG = 4, (512, 256, 128, 64, 32)
_SLICES = 48
_MOST_WORK = 1 << 16
_SEEDS = 4


def special(lab: Lab) -> Found | None:
    """Wrong where an input holds NaN or infinity, right with finite numbers in their places."""
    names = [name for name in edits.free(lab.spec, lab.base) if lab.base.tensors[name].regime in _NON_FINITE]
    if not names:
        return None
    seeds = lab.seeds(count=_SEEDS)
    cured = [lab.ask(lab.base.with_(seed=seed), edit=edits.finite(names)) for seed in seeds]
    if any(answer.wrong for answer in cured):
        lab.ruled_out.append(f"NaN and infinity in {', '.join(names)}: wrong with finite numbers in their places too")
        plainer = ordinary(lab.base, names)
        if lab.ask(plainer).wrong:
            lab.base = plainer
        return None
    if not all(answer.right for answer in cured):
        return None
    evidence = [f"right with finite numbers in place of NaN and infinity in {', '.join(names)}"]
    wrong = lab.wrong_of(lab.ask(lab.base))
    if wrong is not None and wrong.got.is_floating_point():
        lost = int((~torch.isfinite(wrong.right) & torch.isfinite(wrong.got.double()) & wrong.mask).sum())
        made = int((torch.isfinite(wrong.right) & ~torch.isfinite(wrong.got.double()) & wrong.mask).sum())
        if made and not lost and _hidden(lab, names):
            evidence.append("the reference does not use those elements, whatever they hold")
            return Found("reads-padding", evidence)
        if lost or made:
            evidence.append(f"{wrong.name}: {lost} non-finite element(s) lost, {made} made where none belongs")
    return Found("nan-swallowed", evidence)


def _hidden(lab: Lab, names: list[str]) -> bool:
    """Whether the reference gives the same whatever stands in place of the NaN and infinities."""
    answers = [lab.ask(lab.base), *(lab.ask(lab.base, edit=edits.finite(names, value)) for value in (0.5, 7.0))]
    outputs = [answer.probe.expected for answer in answers if answer.probe is not None]
    return len(outputs) == len(answers) and all(
        torch.equal(outputs[0][name].nan_to_num(), other[name].nan_to_num()) for other in outputs[1:] for name in other
    )


def overflow(lab: Lab) -> Found | None:
    """Wrong for large values, right once they are scaled down; by how much tells an exponential from a product."""
    names = edits.free(lab.spec, lab.base)
    wrong = lab.wrong_of(lab.ask(lab.base))
    if not names or wrong is None:
        return None
    lost = _lost(wrong)
    if not lost and not (wrong.got.dtype.is_floating_point and _has_huge(lab)) and wrong.got.is_floating_point():
        return None
    most = _largest(lab, lab.base, names)
    if not 2 < most < math.inf:
        return None
    if _is_coarse(lab.base) and lab.always_right(lab.base, edit=edits.upcast()):
        evidence = ["the same numbers given as float32 are right: a 16-bit intermediate overflows"]
        return Found("low-precision-accumulation", evidence)
    if not lab.always_right(lab.base, edit=edits.scaled(names, -math.ceil(math.log2(most)))):
        lab.ruled_out.append("overflow: wrong with values scaled below 1 too")
        return None
    limit = _limit(lab, names, most)
    evidence = [f"right once values are scaled below {limit:.3g}, wrong above {2 * limit:.3g}"]
    if lost and _EXP_RANGE[0] <= limit <= _EXP_RANGE[1]:
        evidence.append("so small a limit is an exponential's: its argument's maximum is not taken away first")
        return Found("missing-max-subtraction", evidence)
    return Found("overflow", evidence)


def _lost(wrong: Wrong) -> bool:
    """Whether wrong elements are non-finite where the right ones are not, or saturated at 0."""
    if not wrong.got.is_floating_point():
        return False
    got = wrong.got.double()
    bad = (~torch.isfinite(got) & torch.isfinite(wrong.right)) | ((got == 0) & (wrong.right.abs() > 1e-30))
    return bool((bad & wrong.mask).any())


def _has_huge(lab: Lab) -> bool:
    return any(tensor.regime == "huge" for tensor in lab.base.tensors.values())


def _largest(lab: Lab, case: Case, names: list[str]) -> float:
    found = lab.ask(case).probe
    if found is None:
        return 0.0
    tensors = [found.logical[name].double() for name in names]
    return max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)


def _limit(lab: Lab, names: list[str], most: float) -> float:
    """The largest magnitude, to a factor of two, below which the case's values are right."""
    right, wrong = math.ceil(math.log2(most)), 0
    while right - wrong > 1:
        middle = (right + wrong) // 2
        if lab.ask(lab.base, edit=edits.scaled(names, -middle)).right:
            right = middle
        else:
            wrong = middle
    return most * 2.0**-right


def epsilon(lab: Lab) -> Found | None:
    """Wrong in step with an epsilon: right without it and wrong with a large one; or wrong for small values only."""
    case = ordinary(lab.base, edits.free(lab.spec, lab.base))
    for name in edits.epsilons(lab.spec, case):
        if lab.mostly_wrong(case, edit=edits.number(name, 0.05)) and lab.always_right(
            case, edit=edits.number(name, 0.0)
        ):
            return Found("eps-misplaced", [f"with ordinary values right for {name}=0 and wrong for {name}=0.05"])
        lab.ruled_out.append(f"{name}: the failure does not come and go with it")
    return _floor(lab, case)


def _floor(lab: Lab, case: Case) -> Found | None:
    """Values so small that the reference stops scaling with them are wrong, and ordinary ones right."""
    names = edits.free(lab.spec, case)
    if not names or not all(lab.ask(case.with_(seed=seed)).right for seed in lab.seeds(case, _SEEDS)):
        return None
    for power in (-10, -16, -24, -40):
        tiny = edits.scaled(names, power)
        if lab.mostly_wrong(case, edit=tiny):
            if not _scales(lab, case, names, power):
                told = f"right for ordinary values, wrong for 2^{power} times those"
                return Found("eps-misplaced", [f"{told}, where the reference's epsilon or floor takes over"])
            return None
    return None


def _scales(lab: Lab, case: Case, names: list[str], power: int) -> bool:
    """Whether the reference goes with a power of the values' scale around there, as it does far from an epsilon."""
    steps = [lab.ask(case, edit=edits.scaled(names, power + shift)).probe for shift in (0, 2, 4)]
    if None in steps:
        return True
    for output in steps[0].expected if steps[0] is not None else ():
        a, b, c = (step.expected[output].double() for step in steps if step is not None)
        if not a.is_floating_point() or not a.numel():
            continue
        first, second = (b / a).nan_to_num(0.0), (c / b).nan_to_num(0.0)
        if bool(((first - second).abs() > 0.02 * first.abs().clamp(min=1e-30)).any()):
            return False
        if bool((first == 1).all()) and bool((a != 0).any()) and output != "out":
            return False
    return True


def rounding(lab: Lab) -> Found | None:
    """Wrong in 16 bits, right for the same numbers as float32: a rounding too many, or sums kept too short."""
    if not _is_coarse(lab.base):
        return None
    seeds = lab.seeds(count=_SEEDS)
    if not all(lab.ask(lab.base.with_(seed=seed), edit=edits.upcast()).right for seed in seeds):
        lab.ruled_out.append("16-bit roundings: not right with the same numbers as float32")
        return None
    larger = lab.grown(lab.base, (9, 17, 12, 10))
    if not all(lab.ask(larger.with_(seed=seed), edit=edits.upcast()).right for seed in seeds[:2]):
        lab.ruled_out.append("16-bit roundings: larger cases are wrong as float32 too")
        return None
    evidence = [f"right with the same numbers as float32, for {len(seeds)} seeds"]
    grown = _growth(lab)
    if grown is None:
        return Found("cast-order", [*evidence, "no dim along which an error could add up"])
    told = f"the error of a row is {grown.ratio:.2g} times as large at {grown.dim}={grown.long} as at {_SHORT}"
    # Errors of single elements average out along a row, by the root of its length; one that a row shares does not.
    shared = grown.along and grown.ratio > 4 * (_SHORT / grown.long) ** 0.5
    if grown.ratio >= (_GROWS if grown.long >= 256 else _GROWS_SHORT) or shared:
        return Found("low-precision-accumulation", [*evidence, told])
    return Found("cast-order", [*evidence, f"it does not add up: {told}"])


def _is_coarse(case: Case) -> bool:
    return any(tensor.dtype in ("float16", "bfloat16") for tensor in case.tensors.values())


@dataclass(frozen=True, slots=True)
class _Growth:
    """How the error grows with a dim, from a short one to ``long``; ``along``: the output has an axis of it."""

    dim: str
    long: int
    ratio: float
    along: bool


def _growth(lab: Lab) -> _Growth | None:
    """The dim along which the error grows most."""
    best: _Growth | None = None
    case = ordinary(lab.base, edits.free(lab.spec, lab.base))
    for name in lab.plain_sizes():
        short = _error(lab, _wide(lab, case, name, _SHORT), name)
        if short is None or short[0] <= 0:
            continue
        for length in _LONG:
            long = _error(lab, _wide(lab, case, name, length), name)
            if long is not None:
                found = _Growth(name, length, long[0] / short[0], along=long[1])
                if best is None or found.ratio > best.ratio:
                    best = found
                break
    return best


def _wide(lab: Lab, case: Case, name: str, length: int) -> Case | None:
    """The case at this length, with many slices beside it to average over."""
    sized = lab.resized({name: length}, case)
    if sized is None:
        return None
    for other in lab.plain_sizes():
        if other == name:
            continue
        for size in (_SLICES, 16, 4):
            widened = lab.resized({other: size, name: length}, sized)
            if widened is not None and cost(lab.spec, widened)[1] <= _MOST_WORK:
                sized = widened
                break
    return sized


def _error(lab: Lab, case: Case | None, dim: str) -> tuple[float, bool] | None:
    """The root mean square of the relative errors that rows share, and whether the output has rows along the dim."""
    answer = lab.ask(case)
    found = answer.probe
    if case is None or found is None or not found.got:
        return None
    name = str(lab.verdict.evidence.get("output", ""))
    name = name if name in found.got else next(iter(found.got))
    got, against = found.got[name].detach(), found.lanes.get(name)
    if against is None or not got.is_floating_point():
        return None
    right = (against.oracle if isinstance(against, OutputLanes) else against).double()
    if got.shape != right.shape or not got.numel():
        return None
    large = right.abs() > 0.25 * right.abs().mean()
    relative = torch.where(large & torch.isfinite(got), (got.double() - right) / right, 0.0).nan_to_num(0.0)
    axis = next((i for i, size in enumerate(got.shape) if size == case.sizes[dim]), None)
    if axis is not None:
        relative = relative.sum(axis) / large.sum(axis).clamp(min=1)
    return float(relative.square().mean().sqrt()), axis is not None


def digits(lab: Lab) -> Found | None:
    """Small whole numbers, whose sums are exact in few bits, are right; others are off by little."""
    names = edits.free(lab.spec, lab.base)
    wrong = lab.wrong_of(lab.ask(lab.base))
    if not names or wrong is None or not wrong.got.is_floating_point() or not bool(torch.isfinite(wrong.got).all()):
        return None
    scale = float(wrong.right.abs().max())
    inputs = _largest(lab, lab.base, names)
    error = float((wrong.got.double() - wrong.right.double()).abs().max())
    if not error <= _SMALL_ERROR * max(scale, inputs):
        return None
    centred = edits.centred(names)
    if _mean_dominates(lab, names) and all(
        lab.ask(lab.base.with_(seed=seed), edit=centred).right for seed in lab.seeds(count=_SEEDS)
    ):
        evidence = ["right once each row's mean is taken away first: the digits are lost in a difference of large sums"]
        return Found("low-precision-accumulation", evidence)
    larger = lab.grown(lab.base, (4, 4, 4, 4))
    cases = [case.with_(seed=seed) for case in (lab.base, larger) for seed in lab.seeds(case, _SEEDS)]
    if not all(lab.ask(case, edit=edits.whole(names)).right for case in cases):
        lab.ruled_out.append("lost digits: small whole numbers are wrong too")
        return None
    evidence = [
        "right for small whole numbers, whose products and sums need few bits",
        f"for others off by at most {error / max(scale, inputs):.2g} of the largest",
    ]
    return Found("low-precision-accumulation", evidence)


def _mean_dominates(lab: Lab, names: list[str]) -> bool:
    found = lab.ask(lab.base).probe
    if found is None:
        return False
    for name in names:
        inner = unwrap(lab.spec.inputs[name])
        assert isinstance(inner, TensorSpec)
        if not shape_of(inner, lab.base.sizes):
            continue
        t = found.logical[name].double()
        if t.numel() and t.shape[-1] > 1 and bool((t.mean(-1).abs() > 4 * t.std(-1)).any()):
            return True
    return False
