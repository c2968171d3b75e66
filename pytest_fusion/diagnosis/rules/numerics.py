"""Causes in numbers: NaN, and what leaves the range of a dtype."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from pytest_fusion.case import recorded_values
from pytest_fusion.case.case_model import Case
from pytest_fusion.checks import probe as probing
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.experiments import Found, Lab, Wrong, ordinary
from pytest_fusion.diagnosis.rules import extents

_NON_FINITE = ("nan", "inf")
# exp overflows float32 at 88.7, exp2 at 128, their float16 twins at 11 and 16; scores are scaled by as little as 1/30.
_EXP_RANGE = (4.0, 4096.0)
# After this shift a 0 has no weight in a softmax of float32, also with scores scaled down tenfold.
_SHIFT = 1000.0
# Three references run for each, at a third of a millisecond.
_MOST_ELEMENTS = 32
_SEEDS = 4
# Above what float32 resolves beside a 16-bit output, and a share of it that is no element.
_LARGE, _ROUNDED = 2.0**20, 2.0**-16
_MOST_DRAWN = 4


def special(lab: Lab) -> Found | None:
    """Wrong where an input holds NaN or infinity, right with finite numbers in their places."""
    regimes = {name: lab.base.tensors[name].regime for name in edits.free(lab.spec, lab.base)}
    drawn = [name for name, regime in regimes.items() if regime in _NON_FINITE or recorded_values.special(regime)]
    if not drawn:
        return None
    cured = [lab.attempt(lab.base.with_(seed=seed), edit=edits.finite(drawn)) for seed in lab.seeds(count=_SEEDS)]
    if any(answer.wrong for answer in cured):
        lab.ruled_out.append(f"NaN and infinity in {', '.join(drawn)}: wrong with finite numbers in their places too")
        plainer = ordinary(lab.base, drawn)
        if lab.attempt(plainer).wrong:
            lab.base = plainer
        return None
    if not all(answer.right for answer in cured):
        return None
    if (other := _wrong_otherwise_drawn(lab, ordinary(lab.base, drawn))) is not None:
        lab.base = other
        return None
    evidence = [f"right with finite numbers in place of NaN and infinity in {', '.join(drawn)}"]
    wrong = lab.wrong_of(lab.attempt(lab.base))
    if wrong is not None and wrong.got.is_floating_point():
        lost = int((~torch.isfinite(wrong.right) & torch.isfinite(wrong.got.double()) & wrong.mask).sum())
        made = int((torch.isfinite(wrong.right) & ~torch.isfinite(wrong.got.double()) & wrong.mask).sum())
        if made and not lost and _hidden(lab, drawn):
            evidence.append("the reference does not use those elements, whatever they hold")
            return Found("reads-padding", evidence)
        if made and not lost and _taken_away(lab, drawn):
            evidence.append(f"with {_LARGE:g} there others have its roundings: it is added and subtracted again")
            return Found("low-precision-accumulation", evidence)
        if lost or made:
            evidence.append(f"{wrong.name}: {lost} non-finite element(s) lost, {made} made where none belongs")
    return Found("nan-mishandled", evidence)


def _wrong_otherwise_drawn(lab: Lab, plain: Case) -> Case | None:
    """The case with another number or flag if that fails: a factor of 0 hides most bugs, though 0 times NaN is NaN."""
    for name, pool in lab.plan.pools.items():
        for value in pool[:_MOST_DRAWN]:
            if name in plain.drawn and repr(value) != repr(plain.drawn[name]):
                other = plain.with_(drawn={**plain.drawn, name: value})
                if lab.mostly_wrong(other):
                    lab.ruled_out.append(f"NaN and infinity: wrong with finite numbers too where {name}={value!r}")
                    return other
    return None


def _hidden(lab: Lab, names: list[str]) -> bool:
    """Whether the reference's result does not depend on the NaN and infinities."""
    answers = [lab.attempt(lab.base), *(lab.attempt(lab.base, edit=edits.finite(names, value)) for value in (0.5, 7.0))]
    outputs = [answer.probe.expected for answer in answers if answer.probe is not None]
    return len(outputs) == len(answers) and all(
        torch.equal(outputs[0][name].nan_to_num(), other[name].nan_to_num()) for other in outputs[1:] for name in other
    )


def _taken_away(lab: Lab, names: list[str]) -> bool:
    """Whether large finite numbers in place of NaN make wrong elements, which are off by a rounding of these."""
    for case in lab.telling(lab.grown()):
        wrong = lab.wrong_of(lab.attempt(case, edit=edits.finite(names, _LARGE)))
        off = (wrong.got.double() - wrong.right.double()).abs() if wrong is not None else torch.tensor(torch.inf)
        if float(off.max()) < _LARGE * _ROUNDED:
            return True
    return False


def overflow(lab: Lab) -> Found | None:
    """Wrong for large values, right once they are scaled down; the scale separates an exponential from a product."""
    names, free = edits.scalable(lab.spec, lab.base), edits.free(lab.spec, lab.base)
    wrong = lab.wrong_of(lab.attempt(lab.base))
    if not names or wrong is None:
        return None
    lost = lost_values(wrong)
    huge = any(tensor.regime == "huge" for tensor in lab.base.tensors.values())
    if not lost and not huge and wrong.got.is_floating_point():
        return None
    most = largest(lab, lab.base, names)
    if not 2 < most < math.inf:
        return None
    # A code next to the right one has not left any range.
    floating = wrong.got.is_floating_point()
    if floating and is_coarse(lab.base) and lab.always_right(lab.base, edit=edits.upcast()):
        evidence = ["the same numbers given as float32 are right: a 16-bit intermediate overflows"]
        return Found("low-precision-accumulation", evidence)
    if not lab.always_right(lab.base, edit=edits.scaled(names, -math.ceil(math.log2(most)))):
        lab.ruled_out.append(f"overflow: wrong with {', '.join(names)} scaled below 1 too")
        return None
    limit = _limit(lab, names, most)
    evidence = [f"right once values are scaled below {limit:.3g}, wrong above {2 * limit:.3g}"]
    if not _near_an_end(wrong, limit):
        lab.ruled_out.append(f"overflow: {evidence[0]}, where no dtype ends")
        return None
    if lost and _EXP_RANGE[0] <= limit <= _EXP_RANGE[1]:
        if not bool((~torch.isfinite(wrong.got.double()) & torch.isfinite(wrong.right) & wrong.mask).any()):
            lab.ruled_out.append(f"overflow: {evidence[0]}, yet not to infinity")
            return None
        # If the overflow is in lanes that pad a tile, or in masked elements, the kernel does subtract a maximum.
        far = (edits.shifted(free, -_SHIFT), edits.shifted(free, _SHIFT))
        found = extents.tail(lab, far) or _masked_out(lab, free)
        if found is not None:
            return found
        evidence.append("so small a limit is an exponential's: its argument's maximum is not taken away first")
        return Found("missing-max-subtraction", evidence)
    # A cap turns a padded -inf into one more -30, which counts beside scores that are capped too: unsloth 2025.3.19's
    # cross entropy was off by log(4/3) for three scores of -100, and right for four of them.
    return extents.tail(lab) or Found("overflow", evidence)


def _near_an_end(wrong: Wrong, limit: float) -> bool:
    """Whether a dtype may end there: a float at an exponential's limit or more; an integer wraps or clamps there."""
    if wrong.got.is_floating_point():
        return limit >= _EXP_RANGE[0]
    if wrong.got.dtype is torch.bool:
        return False
    got, right, ends = wrong.got.long()[wrong.mask], wrong.right.long()[wrong.mask], torch.iinfo(wrong.got.dtype)
    return bool((((got - right).abs() > 1) | (right <= ends.min + 1) | (right == ends.max)).any())


def _masked_out(lab: Lab, names: list[str]) -> Found | None:
    """Right once elements that the reference never uses are no larger than the others."""
    found = lab.attempt(lab.base).probe
    if found is None or not 1 < sum(found.logical[name].numel() for name in names) <= _MOST_ELEMENTS:
        return None
    unused = _unused(lab, names, found.logical).values()
    # If nothing counts, as in a softmax over one element, nothing is masked.
    if not any(bool(mask.any()) for mask in unused) or all(bool(mask.all()) for mask in unused):
        return None

    # The least of the used elements wins no maximum, and 0 adds nothing.
    for what in ("the least of the others", "0"):

        def apply(logical: dict[str, Any], what: str = what) -> dict[str, Any]:
            masks = _unused(lab, names, logical)
            changed = dict(logical)
            for name, mask in masks.items():
                t = logical[name]
                value = float(t[~mask].min()) if what != "0" and not bool(mask.all()) else 0.0
                changed[name] = t.masked_fill(mask, value)
            return changed

        edit = edits.Edit(f"{what} where {', '.join(names)} do not count", apply)
        if lab.always_right(lab.base, edit=edit):
            if _wrong_of_two(lab, names, edit):
                lab.ruled_out.append(f"masked elements: {what} in them cures one of what there is, and not two")
                return None
            fact = f"right once the elements of {', '.join(names)} that the reference does not use hold {what}"
            return Found("wrong-neutral-element", [fact])
    return None


def _wrong_of_two(lab: Lab, names: list[str], edit: edits.Edit) -> bool:
    """Whether it fails in spite of the edit with two of a single element: over one key a softmax uses no score."""
    for dim in (dim for dim, size in lab.plain_sizes().items() if size == 1):
        case = lab.resized({dim: 2})
        found = lab.attempt(case).probe if case is not None else None
        if case is None or found is None or sum(found.logical[name].numel() for name in names) > _MOST_ELEMENTS:
            continue
        if any(lab.attempt(case.with_(seed=seed), edit=edit).wrong for seed in lab.seeds(case, _SEEDS)):
            return True
    return False


def _unused(lab: Lab, names: list[str], logical: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """By tensor, the elements that may hold any finite number without changing the reference's results."""
    before = probing.right_of(lab.context, logical)
    masks = {}
    for name in names:
        t = logical[name]
        masks[name] = torch.zeros_like(t, dtype=torch.bool)
        far = min(4 * float(t.abs().nan_to_num(0, 0, 0).max()) + 1, 0.5 * float(torch.finfo(t.dtype).max))
        for index in itertools.product(*map(range, t.shape)):
            others = (_with(logical, name, index, value) for value in (-far, 0.0, far))
            masks[name][index] = all(_same(before, probing.right_of(lab.context, other)) for other in others)
    return masks


def _with(logical: Mapping[str, Any], name: str, index: tuple[int, ...], value: float) -> dict[str, Any]:
    changed = logical[name].clone()
    changed[index] = value
    return {**logical, name: changed}


def _same(before: Mapping[str, torch.Tensor] | None, after: Mapping[str, torch.Tensor] | None) -> bool:
    if before is None or after is None:
        return False
    return all(torch.equal(t.nan_to_num(), after[name].nan_to_num()) for name, t in before.items())


def lost_values(wrong: Wrong) -> bool:
    """Whether wrong elements are non-finite where the right ones are not, or saturated at 0."""
    if not wrong.got.is_floating_point():
        return False
    got = wrong.got.double()
    bad = (~torch.isfinite(got) & torch.isfinite(wrong.right)) | ((got == 0) & (wrong.right.abs() > 1e-30))
    return bool((bad & wrong.mask).any())


def largest(lab: Lab, case: Case, names: list[str]) -> float:
    found = lab.attempt(case).probe
    if found is None:
        return 0.0
    tensors = [found.logical[name].double() for name in names]
    return max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)


def _limit(lab: Lab, names: list[str], most: float) -> float:
    """The largest magnitude, to a factor of two, below which the case's values are right."""
    right, wrong = math.ceil(math.log2(most)), 0
    while right - wrong > 1:
        middle = (right + wrong) // 2
        if lab.attempt(lab.base, edit=edits.scaled(names, -middle)).right:
            right = middle
        else:
            wrong = middle
    return most * 2.0**-right


def is_coarse(case: Case) -> bool:
    return any(tensor.dtype in ("float16", "bfloat16") for tensor in case.tensors.values())
