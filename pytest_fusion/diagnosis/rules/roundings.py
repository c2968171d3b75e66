"""Causes in digits: a rounding too many, or sums in too few bits."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import shape_of
from pytest_fusion.case.plan import cost
from pytest_fusion.case.sizes import count
from pytest_fusion.checks import probe as probing
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.invariance.case_slices import selected
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Answer, Found, Lab, ordinary
from pytest_fusion.diagnosis.rules.indices import axis_of
from pytest_fusion.diagnosis.rules.numerics import is_coarse, largest, lost_values
from pytest_fusion.oracle import OutputLanes

# 16 bits round by 2^-9 of the largest element; a sum of many roundings is still far below this.
_SMALL_ERROR = 2.0**-5
# A sum of rounding errors grows with the length, least in a balanced tree: from 4 to 512 elements by the root of 9/2,
# less if a dim's bound is smaller. The error of one rounding does not grow.
_GROWS, _GROWS_SHORT = 1.4, 1.2
_SHORT, _LONG = 4, (512, 256, 128, 64, 40, 32, 24, 20)
_SLICES, _FEW = 48, 16
_MOST_WORK = 1 << 16
_SEEDS, _GROWTH_SEEDS = 4, 3
# The root mean square of one rounding, in epsilons.
_ONE_ROUNDING = 0.2
# So many roundings determine their mean square to a third.
_SAMPLES = 36
# An element that is off by a larger share has cancelled; its error does not show how many terms it had.
_CANCELLED = 0.5
# Sizes; one differs from those of all other dims.
_UNUSUAL = (13, 11, 14, 15, 17, 19, 21, 22, 23, 26)
# An error that correlates so well with that of values 3 % larger, in so many elements, is not a rounding: roundings in
# one direction, as in truncation, correlate by three quarters. With few elements they must be the same.
_ALIKE, _SAME = 0.9, 0.999
_FACTORS = (1.03, 1.01, 1.02, 1.025)
_ONE_OF_16_BITS = 2.0**-8
# Results that change by so small a share of a rounding are rounded alike.
_STEADY = 2.0**-10
_FEWEST_ERRORS, _ENOUGH_ERRORS = 3, 8
# Another order changes a sum in few bits by about its own error, a float32 sum by less than a thousandth of that.
_OTHER_ORDER = 0.2


def rounding(lab: Lab) -> Found | None:
    """Wrong in 16 bits, right for the same numbers as float32: a rounding too many, or sums in too few bits."""
    if not is_coarse(lab.base):
        return None
    seeds = lab.seeds(count=_SEEDS)
    if not all(lab.attempt(lab.base.with_(seed=seed), edit=edits.upcast()).right for seed in seeds):
        lab.ruled_out.append("16-bit roundings: not right with the same numbers as float32")
        return None
    larger = lab.grown(lab.base, (9, 17, 12, 10))
    if not all(lab.attempt(larger.with_(seed=seed), edit=edits.upcast()).right for seed in seeds[:2]):
        lab.ruled_out.append("16-bit roundings: larger cases are wrong as float32 too")
        return None
    evidence = [f"right with the same numbers as float32, for {len(seeds)} seeds"]
    dim, summed_well = _summed_coarsely(lab)
    if dim is not None:
        fact = f"another order along {dim}, which the exact result does not know, changes it by more than float32 does"
        return Found("low-precision-accumulation", [*evidence, fact])
    grown = _growth(lab, summed_well)
    if grown is None:
        return Found("cast-order", [*evidence, "no dim was found along which an error adds up"])
    fact = f"the error of a row is {grown.ratio:.2g} times as large at {grown.dim}={grown.long} as at {_SHORT}"
    # Independent errors average out along a row, by the root of its length; one that a row shares does not.
    thinned = (_SHORT / grown.long) ** 0.5
    if grown.adds_up:
        return Found("low-precision-accumulation", [*evidence, fact])
    if grown.along and grown.ratio > 4 * thinned:
        shared = f"a row shares it: {fact}, where errors of single elements would be {thinned:.2g} times as large"
        return Found("low-precision-accumulation", [*evidence, shared])
    return Found("cast-order", [*evidence, f"it does not add up: {fact}"])


@dataclass(frozen=True, slots=True)
class _Growth:
    """The growth of the error with a dim, from a short one to ``long``; ``along``: the output has an axis of it."""

    dim: str
    long: int
    ratio: float
    along: bool

    @property
    def adds_up(self) -> bool:
        return self.ratio >= (_GROWS if self.long >= 256 else _GROWS_SHORT)


def _growth(lab: Lab, summed_well: Collection[str]) -> _Growth | None:
    """The dim along which the error grows most, beside many slices of all others, or of one if all average it out."""
    names = list(lab.lengths())
    found = [grown for name in names if (grown := _growth_along(lab, name, [n for n in names if n != name]))]
    found = [
        grown for grown in found if not (stands_apart(lab, grown.dim) if grown.along else grown.dim in summed_well)
    ]
    for grown in list(found):
        # For example, with more rows of a table each one has fewer terms to sum.
        if not grown.along and not any(each.adds_up for each in found):
            singles = (_growth_along(lab, grown.dim, [n]) for n in names if n != grown.dim and len(names) > 2)
            found += filter(None, singles)
    return max(found, key=lambda grown: grown.ratio, default=None)


def stands_apart(lab: Lab, dim: str) -> bool:
    """Whether slices along a dim do not depend on the first or last one in the reference: nothing sums along it."""
    others = {count(size) for name, size in lab.base.sizes.items() if name != dim}
    size = next((n for n in _UNUSUAL if n not in others), _UNUSUAL[0])
    found = lab.attempt(lab.resized({dim: size}, ordinary(lab.base, edits.free(lab.spec, lab.base)))).probe
    before = probing.right_of(lab.context, found.logical) if found is not None else None
    if found is None or before is None or not any(axis_of(t, size) is not None for t in before.values()):
        return False
    for at in (0, size - 1):
        changed = dict(found.logical)
        for name, t in found.logical.items():
            if isinstance(t, torch.Tensor) and t.is_floating_point() and (axis := axis_of(t, size)) is not None:
                changed[name] = t.clone()
                changed[name].select(axis, at).mul_(0.5)
        after = probing.right_of(lab.context, changed)
        if after is None:
            return False
        for name, right in before.items():
            axis, rest = axis_of(right, size), [i for i in range(size) if i != at]
            pair = [t if axis is None else selected(t, axis, rest) for t in (right, after[name])]
            if pair[0].shape != pair[1].shape or not torch.equal(*(t.double().nan_to_num() for t in pair)):
                return False
    return True


def _growth_along(lab: Lab, name: str, beside: list[str]) -> _Growth | None:
    case = ordinary(lab.base, edits.free(lab.spec, lab.base))
    short = _error(lab, _wide(lab, case, name, _SHORT, beside), name)
    if short is None or short[0] <= 0:
        return None
    for length in _LONG:
        long = _error(lab, _wide(lab, case, name, length, beside), name)
        if long is not None:
            return _Growth(name, length, long[0] / short[0], along=long[1])
    return None


def _wide(lab: Lab, case: Case, name: str, length: int, beside: list[str], slices: int = _SLICES) -> Case | None:
    """The case at this length, with many slices of the other dims to average over."""
    sized = lab.resized({name: length}, case)
    if sized is None:
        return None
    for other in beside:
        for size in dict.fromkeys((slices, 16, 4)):
            widened = lab.resized({other: size, name: length}, sized)
            if widened is not None and cost(lab.spec, widened)[1] <= _MOST_WORK:
                sized = widened
                break
    return sized


def _error(lab: Lab, case: Case | None, dim: str) -> tuple[float, bool] | None:
    """The root mean square, over seeds, of the relative errors that rows share; whether the output has this dim."""
    if case is None:
        return None
    found = [
        _error_of(lab, lab.attempt(each), each, dim)
        for each in (case.with_(seed=seed) for seed in lab.seeds(case, _GROWTH_SEEDS))
    ]
    fact = [each for each in found if each is not None]
    if sum(samples for _, _, samples in fact) < _SAMPLES:
        return None
    return (sum(error**2 for error, _, _ in fact) / len(fact)) ** 0.5, fact[0][1]


def _error_of(lab: Lab, answer: Answer, case: Case, dim: str) -> tuple[float, bool, int] | None:
    pair = _pair(lab, answer)
    if pair is None:
        return None
    got, right, eps = pair
    large = right.abs() > 0.25 * right.abs().mean()
    relative = torch.where(large & torch.isfinite(got), (got - right) / right, 0.0).nan_to_num(0.0)
    axis = next((i for i, size in enumerate(got.shape) if size == count(case.sizes[dim])), None)
    if axis is not None:
        relative = relative.sum(axis) / large.sum(axis).clamp(min=1)
    error = float(relative.square().mean().sqrt())
    # The gradient of a softmax with equal upstream gradients is 0, and 1e-17 in float64: any rounding is 1e12 of that.
    if error > _CANCELLED:
        return None
    if axis is None:
        # An honest kernel too is exact for few terms, and rounds once for more.
        error = max(error, _ONE_ROUNDING * eps)
    return error, axis is not None, relative.numel()


def _pair(
    lab: Lab, answer: Answer, order: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """The failing output and its exact value in float64, its dtype's epsilon; ``order`` is the upstream gradients'."""
    found = answer.probe
    if found is None or not found.got:
        return None
    name = lab.verdict.output
    if lab.check == gradients.NAME and name.startswith("d"):
        pair = probing.gradient(found, name[1:], order)
        if pair is None:
            return None
        got, right = pair
    else:
        name = name if name in found.got else next(iter(found.got))
        against = found.lanes.get(name)
        if against is None:
            return None
        got, right = found.got[name].detach(), against.oracle if isinstance(against, OutputLanes) else against
    if not got.is_floating_point() or not got.numel() or got.shape != right.shape:
        return None
    return got.double(), right.double(), torch.finfo(got.dtype).eps


def _summed_coarsely(lab: Lab) -> tuple[str | None, set[str]]:
    """The dim along which another order changes the result by about its error, in two seeds; the well-summed dims."""
    case = ordinary(lab.base, edits.free(lab.spec, lab.base))
    names = list(lab.plain_sizes())
    well: set[str] = set()
    for name in names:
        beside = [n for n in names if n != name]
        wide = (_wide(lab, case, name, length, beside, _FEW) for length in (*_LONG[1:], 8))
        sized = next(filter(None, wide), None)
        if sized is None:
            continue
        depends = [_depends_on_order(lab, sized.with_(seed=seed), name) for seed in lab.seeds(sized, 2)]
        if all(depends):
            return name, well
        if not any(each is None or each for each in depends):
            well.add(name)
    return None, well


def _depends_on_order(lab: Lab, case: Case, dim: str) -> bool | None:
    """Whether the result depends on the order; ``None`` if the exact one does, or nothing is wrong."""
    size = case.sizes[dim]
    assert isinstance(size, int)
    order = sorted(range(size), key=lambda i: counter_random.mix(case.seed, "order", i))
    places = lab.axes_of(dim, case)
    if not places:
        return None
    edit = edits.along(places.items(), "another order of", lambda t, axis: _in_order(t, axis, order))
    before, after = _pair(lab, lab.attempt(case)), _pair(lab, lab.attempt(case, edit=edit), order)
    if before is None or after is None or before[0].shape != after[0].shape:
        return None
    for axis in (None, *(i for i, length in enumerate(before[0].shape) if length == size)):
        got, right = (t if axis is None else _in_order(t, axis, order) for t in before[:2])
        if not torch.allclose(right, after[1], 1e-9, 1e-12 * float(right.abs().max())):
            continue
        error, changed = (float((after[0] - t).square().mean().sqrt()) for t in (after[1], got))
        return changed > _OTHER_ORDER * error if error > 0 else None
    return None


def _in_order(t: torch.Tensor, axis: int, order: list[int]) -> torch.Tensor:
    return t.index_select(axis, torch.tensor(order, device=t.device))


def digits(lab: Lab) -> Found | None:
    """Small whole numbers, whose sums are exact in few bits, are right; others are off by little."""
    free, reals = edits.free(lab.spec, lab.base), edits.reals(lab.spec, lab.base)
    names = [*free, *(name for name in reals if name not in free)]
    wrong = lab.wrong_of(lab.attempt(lab.base))
    if not names or wrong is None or not wrong.got.is_floating_point() or not bool(torch.isfinite(wrong.got).all()):
        return None
    scale = float(wrong.right.abs().max())
    inputs = largest(lab, lab.base, names)
    error = float((wrong.got.double() - wrong.right.double()).abs().max())
    if not math.isfinite(error):
        return None
    small = error <= _SMALL_ERROR * max(scale, inputs)
    if not small and not _next_to_right(lab, lab.attempt(lab.base)):
        return None
    centred = edits.centred(names)
    if _mean_dominates(lab, names) and all(
        _right_and_finite(lab.attempt(lab.base.with_(seed=seed), edit=centred)) for seed in lab.seeds(count=_SEEDS)
    ):
        if _stays(lab, names):
            lab.ruled_out.append("lost digits: the error stays where other digits are lost")
            return None
        evidence = ["right once each row's mean is taken away first: the digits are lost in a difference of large sums"]
        return Found("low-precision-accumulation", evidence)
    if lost_values(wrong):
        lab.ruled_out.append("lost digits: whole elements are lost")
        return None
    larger = lab.grown(lab.base, (4, 4, 4, 4))
    cases = [case.with_(seed=seed) for case in (lab.base, larger) for seed in lab.seeds(case, _SEEDS)]
    exact = edits.whole(free)
    for name in names[len(free) :]:
        # As far from 0 as the profile allows, by a power of two.
        exact = edits.both(exact, edits.whole([name], math.floor(math.log2(reals[name] / 4))))
    if not all(_right_and_finite(lab.attempt(case, edit=exact)) for case in cases):
        lab.ruled_out.append("lost digits: small whole numbers are wrong too")
        return None
    if _stays(lab, names):
        lab.ruled_out.append("lost digits: the error stays where other digits are lost")
        return None
    evidence = [
        "right for small whole numbers, whose products and sums need few bits",
        f"for others off by at most {error / max(scale, inputs):.2g} of the largest",
    ]
    if all(_next_to_right(lab, lab.attempt(case)) for case in cases) and _summed_coarsely(lab)[0] is None:
        evidence.append("each wrong element is next to the right one in the output's dtype: it was rounded before")
        return Found("cast-order", evidence)
    return Found("low-precision-accumulation", evidence) if small else None


def _right_and_finite(answer: Answer) -> bool:
    """Whether results are right and finite; excludes agreement on NaN, as in the logarithm of a negative number."""
    outputs = answer.probe.expected.values() if answer.probe is not None else ()
    return answer.right and all(bool(torch.isfinite(t.double()).all()) for t in outputs if t.is_floating_point())


def _stays(lab: Lab, names: list[str]) -> bool:
    """Whether the error is nearly the same if all values are some percents larger.

    An epsilon, a bound or an element from elsewhere gives the same error; each rounding gives another. If one row of
    two has most of the error, as below a variance, it is one number, whose sign agrees every other time.
    """
    return all(_stays_with(lab, edits.larger(names, times)) for times in _FACTORS)


def _stays_with(lab: Lab, larger: Edit) -> bool:
    both: tuple[Edit | None, Edit] = None, larger
    if is_coarse(lab.base):
        # In 16 bits other values would be equal.
        both = edits.upcast(), edits.both(edits.upcast(), larger)
    samples, product, power = 0, 0.0, [0.0, 0.0]
    for case in (lab.base, lab.grown(lab.base, (4, 4, 4, 4))):
        for seed in lab.seeds(case, _SEEDS):
            before, after = (_pair(lab, lab.attempt(case.with_(seed=seed), edit=edit)) for edit in both)
            if before is None or after is None or before[1].shape != after[1].shape:
                continue
            # Where a scale follows the values, exact results stay, and so does each rounding to few bits.
            if torch.allclose(before[1], after[1], _STEADY * before[2], 0.0, equal_nan=True):
                continue
            errors = [(got - right).nan_to_num(0.0, 0.0, 0.0) for got, right, _ in (before, after)]
            samples += int((errors[0] != 0).sum())
            product += float((errors[0] * errors[1]).sum())
            power = [sum_ + float(error.square().sum()) for sum_, error in zip(power, errors, strict=True)]
    alike = _ALIKE if samples >= _ENOUGH_ERRORS else _SAME
    return samples >= _FEWEST_ERRORS and product > alike * (power[0] * power[1]) ** 0.5


def _next_to_right(lab: Lab, answer: Answer) -> bool:
    """Whether each element is within one step of an output that has fewer bits than the float inputs."""
    found = answer.probe
    wrong = lab.wrong_of(answer)
    if found is None or wrong is None:
        return answer.right
    dtype = found.got[wrong.name].dtype
    inputs = [t.element_size() for t in found.logical.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if not dtype.is_floating_point or dtype.itemsize >= max(inputs, default=0):
        return False
    info = torch.finfo(dtype)
    got, right, rounded = wrong.got.double(), wrong.right.double(), wrong.right.to(dtype).double()
    beside = (got - rounded).abs() <= info.eps * torch.maximum(got.abs(), rounded.abs()) + info.tiny
    # A rounding to 16 bits moves a number over the middle of two codes only from near there.
    near = (right - (got + rounded) / 2).abs() <= _ONE_OF_16_BITS * right.abs() + info.tiny
    return bool((beside & (near | (got == rounded))).all())


def _mean_dominates(lab: Lab, names: list[str]) -> bool:
    found = lab.attempt(lab.base).probe
    if found is None:
        return False
    for name in names:
        if not shape_of(lab.spec.tensors[name], lab.base.sizes):
            continue
        t = found.logical[name].double()
        if t.numel() and t.shape[-1] > 1 and bool((t.mean(-1).abs() > 4 * t.std(-1)).any()):
            return True
    return False
