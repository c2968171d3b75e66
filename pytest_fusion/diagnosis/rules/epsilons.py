"""Causes in small constants: an epsilon or a floor that is misplaced, missing or another one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.checks import probe as probing
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Found, Lab, ordinary

Outputs = Mapping[str, torch.Tensor]

_SEEDS = 4
_LARGE_EPSILON = 0.05
# Any two elements normalise to plus and minus one, and one to 0 / 0.
_SIZES = (5, 7, 3, 4, 6)
# 1e-3 is the largest epsilon in use; added to numbers of 2^14 it vanishes in float32. A constant of order 1 does not.
_FAR, _STEP = 14, 2
_POWERS = (1, 2, 0)
_MOST_SCALED = 4
# How far the reference may be from scaling with ordinary inputs: an epsilon is small beside them.
_NEARLY, _EXACTLY = 5e-3, 1e-4
# 2^10 times an epsilon has far less than 2^10 times its effect, a factor of 16-bit numbers nearly that.
_HUGE, _STRAIGHT = 10, 0.25
# float16 holds ordinary values times 2^-10 to so many digits, but not times 2^-16.
_DIGITS = 1e-3
# A smaller difference is a rounding, not a constant of the reference.
_SEEN = 1e-6


def epsilon(lab: Lab) -> Found | None:
    """Wrong in step with an epsilon (right without, wrong with a large one), or only for small values."""
    case = ordinary(lab.base, edits.free(lab.spec, lab.base))
    larger = lab.grown(case, _SIZES)
    for name in edits.epsilons(lab.spec, case):
        if (
            all(_comes_with(lab, each, name) for each in (case, larger))
            and telling(lab, larger, edits.number(name, 0.0))
            and not _factor(lab, larger, name)
        ):
            sizes = ", ".join(f"{dim}={size}" for dim, size in larger.sizes.items())
            fact = f"with ordinary values right for {name}=0 and wrong for {name}={_LARGE_EPSILON:g}, at {sizes} too"
            return Found("eps-misplaced", [fact])
        lab.ruled_out.append(f"{name}: the failure does not come and go with it")
    return _floor(lab, case, larger) or _constant(lab, case, larger)


def _comes_with(lab: Lab, case: Case, name: str) -> bool:
    """Whether the case is mostly wrong with a large epsilon, and always right with 0."""
    return lab.mostly_wrong(case, edit=edits.number(name, _LARGE_EPSILON)) and lab.always_right(
        case, edit=edits.number(name, 0.0)
    )


def _factor(lab: Lab, case: Case, name: str) -> bool:
    """Whether the reference is linear in a number however large, as in a learning rate; in an epsilon it is not."""
    found = lab.attempt(case).probe
    if found is None:
        return False
    at = [
        probing.right_of(lab.context, edits.number(name, value).apply(dict(found.logical)))
        for value in (0.0, _LARGE_EPSILON, _LARGE_EPSILON * 2.0**_HUGE)
    ]
    if None in at:
        return False
    seen = False
    for output in zip(*(each.values() for each in at if each is not None), strict=True):
        if not output[0].is_floating_point():
            continue
        none, some, much = (t.double() for t in output)
        step, share = some - none, (much - none) * 2.0**-_HUGE
        if not bool(torch.isfinite(share).all()) or float((share - step).norm()) > _STRAIGHT * float(step.norm()):
            return False
        seen = seen or bool((step != 0).any())
    return seen


def telling(lab: Lab, case: Case, edit: Edit) -> bool:
    """Whether the right results are finite and have more than one value: beside NaN anything is right."""
    found = lab.attempt(case, edit=edit).probe
    if found is None:
        return False
    floating = [t.double() for t in found.expected.values() if t.is_floating_point() and t.numel()]
    return bool(floating) and all(
        bool(torch.isfinite(t).all()) and (t.numel() == 1 or bool((t != t.flatten()[0]).any())) for t in floating
    )


def _floor(lab: Lab, case: Case, larger: Case) -> Found | None:
    """Wrong for values so small that the reference stops scaling with them, and right for ordinary ones."""
    names = edits.free(lab.spec, case)
    cases = list({each.key(): each for each in (case, larger)}.values())
    if not names:
        return None
    if not all(lab.attempt(each.with_(seed=seed)).right for each in cases for seed in lab.seeds(each, _SEEDS)):
        return None
    for power in (-10, -16, -24, -40):
        tiny = edits.scaled(names, power)
        if not _keeps_digits(lab, larger, names, power):
            return None
        if lab.mostly_wrong(case, edit=tiny):
            # Exponentials of values so small are all 1, so a kernel that drops equal values fails only here.
            if any(lab.mostly_wrong(each, edit=edits.twins(names)) for each in cases):
                lab.ruled_out.append("a floor of small values: ordinary ones are wrong too where two are equal")
                return None
            if lab.mostly_wrong(larger, edit=tiny) and not _scales(lab, case, names, power):
                fact = f"right for ordinary values, wrong for 2^{power} times ordinary ones"
                return Found("eps-misplaced", [f"{fact}, where the reference's epsilon or floor takes over"])
            # A larger constant of the kernel shows first, where the reference still scales.
            return None
    return None


def _keeps_digits(lab: Lab, case: Case, names: list[str], power: int) -> bool:
    """Whether the dtype holds values at this scale: among those that it rounds to few, many are equal."""
    found = lab.attempt(case).probe
    if found is None:
        return False
    scaled = edits.scaled(names, power).apply(dict(found.logical))
    for name in names:
        before, after = found.logical[name].double(), scaled[name].double() * 2.0**-power
        if float((after - before).norm()) > _DIGITS * float(before.norm()):
            return False
    return True


def _scales(lab: Lab, case: Case, names: list[str], power: int) -> bool:
    """Whether the reference scales with a power of the values' scale there, as it does far from an epsilon."""
    steps = [lab.attempt(case, edit=edits.scaled(names, power + shift)).probe for shift in (0, 2, 4)]
    outputs = [_rights(lab, step) for step in steps if step is not None]
    if len(outputs) < len(steps) or not outputs[0].keys() == outputs[1].keys() == outputs[2].keys():
        return True
    for output in outputs[0]:
        a, b, c = (each[output].double() for each in outputs)
        if not a.is_floating_point() or not a.numel():
            continue
        first, second = (b / a).nan_to_num(0.0), (c / b).nan_to_num(0.0)
        if bool(((first - second).abs() > 0.02 * first.abs().clamp(min=1e-30)).any()):
            return False
        if bool((first == 1).all()) and bool((a != 0).any()) and output != "out":
            return False
    return True


def _rights(lab: Lab, found: probing.Probe) -> Outputs:
    """The right results, or the gradient that fails, which a probe has only where it is wrong."""
    name = lab.verdict.output
    if lab.check != gradients.NAME or not name.startswith("d"):
        return found.expected
    pair = probing.gradient(found, name[1:])
    return {} if pair is None else {name: pair[1]}


def _constant(lab: Lab, case: Case, larger: Case) -> Found | None:
    """Wrong by a small constant: values that dwarf it are right, where the reference scales but for that constant.

    Inputs scale by powers of one factor, such as a moment by the factor and its square by the square; so do outputs.
    """
    if not lab.mostly_wrong(larger):
        return None
    powers = _homogeneous(lab, larger)
    if powers is None:
        return None
    edit = _scaled_by(powers, _FAR)
    if not lab.always_right(case, edit=edit) or not lab.always_right(larger, edit=edit):
        return None
    names = ", ".join(name if power == 1 else f"{name} (squared)" for name, power in powers.items() if power)
    fact = f"wrong for ordinary values, right with {names} 2^{_FAR} times as large"
    return Found("eps-misplaced", [f"{fact}, for which the reference gives the same but for a small constant's part"])


def _homogeneous(lab: Lab, case: Case) -> Mapping[str, int] | None:
    """The power of a factor that scales each floating tensor so that the outputs scale; ``None`` without one."""
    found = lab.attempt(case).probe
    if found is None:
        return None
    logical = found.logical
    names = [
        name for name in case.tensors if isinstance(t := logical.get(name), torch.Tensor) and t.is_floating_point()
    ]
    if not 0 < len(names) <= _MOST_SCALED:
        return None
    near = probing.right_of(lab.context, logical)
    for chosen in itertools.product(_POWERS, repeat=len(names)):
        powers = dict(zip(names, chosen, strict=True))
        if near is None or not any(chosen):
            continue
        scaled = (_scaled_by(powers, by).apply(dict(logical)) for by in (_FAR, _FAR + _STEP))
        far, further = (probing.right_of(lab.context, values) for values in scaled)
        if far is not None and further is not None and _follow(near, far, further):
            return powers
    return None


def _follow(near: Outputs, far: Outputs, further: Outputs) -> bool:
    """Whether outputs follow whole powers of the scale, exactly at a large one, and some only nearly before."""
    seen = False
    for output in zip(near.values(), far.values(), further.values(), strict=True):
        a, b, c = (t.double() for t in output)
        if not output[0].is_floating_point() or any(
            not t.numel() or not bool(torch.isfinite(t).all()) for t in (a, b, c)
        ):
            return False
        if not float(a.norm()) or not float(b.norm()) or not float(c.norm()):
            return False
        degree = round(float((c.norm() / b.norm()).log2()) / _STEP)
        if float((c / 2.0 ** (degree * _STEP) - b).norm()) > _EXACTLY * float(b.norm()):
            return False
        apart = float((a - b / 2.0 ** (degree * _FAR)).norm()) / float(a.norm())
        if apart > _NEARLY:
            return False
        seen = seen or apart > _SEEN
    return seen


def _scaled_by(powers: Mapping[str, int], by: int) -> Edit:
    """Each tensor times 2^by to its power; the others unchanged."""
    return functools.reduce(edits.both, [edits.scaled([name], by * power) for name, power in powers.items() if power])
