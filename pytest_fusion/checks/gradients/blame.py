"""Why a gradient is wrong, by experiments with upstream gradients and fresh memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from pytest_fusion.checks.gradients.backward import Attempt
from pytest_fusion.checks.gradients.upstream import NoGraph, Upstream
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import DamagedMemory, Verdict, WrongAccess, WrongGradient
from pytest_fusion.oracle import OutputLanes
from pytest_fusion.oracle.reference import ReferenceFailed
from pytest_fusion.run.memory import FILLS

# A gradient that is a constant times the right one: how constant, and how far from 1.
_SAME_RATIO, _OTHER_RATIO = 0.02, 0.05
# A sum instead of a mean is off by its count; the rounding of a cancellation to 1e-16 by 1e11 and more.
_LARGEST_RATIO = 2.0**31
# Constant upstream gradients; code that assumes ones is right only with the first.
_ONE, _OTHER = 1.0, 3.0
# Roundings are far below this share of the largest element; another element's value is not.
_FAR = 0.02
# The most outputs tried one by one, each a forward and backward of kernel and reference.
_MOST_OUTPUTS = 4
# A gradient below this share of the case's own has cancelled.
_TELLING = 0.01
# A larger share of error, with an upstream gradient of threes, is no rounding: bfloat16 rounds by 1/256.
_LEFT_OUT = 0.1
# Up to so many elements of an upstream gradient are tried one by one: all in the reference, some in the kernel.
_MOST_ELEMENTS, _MOST_RUN = 128, 6
# Shares of the largest part: a different part, an equal part. Then the share of wrong parts that must match.
_MOVED, _SAME_PART, _MOST_PARTS = 1e-3, 1e-4, 0.9

# Whether a backward's gradients are all right, by attempt and upstream gradients; ``None`` if it ended early.
Right = Callable[[Attempt, Upstream], bool | None]


def explained(trial: Trial, upstream: Upstream, first: Attempt, verdict: Verdict, right: Right) -> Verdict:
    """The same failure, with its cause where one of the experiments below shows it."""
    if verdict.identity.startswith(("gradients:extra", "gradients:structure")):
        return verdict
    # Other upstream gradients may hide a statistical failure.
    gross = not verdict.statistical
    found = _of_layout(trial, upstream, right) if gross else None
    if gross and found is None and (of_one := _of_outputs(trial, upstream, verdict.output, right)) is not None:
        cause, sentence = of_one
        found = None if cause is None else (cause, sentence)
        verdict = verdict if found else replace(verdict, reason=f"{verdict.reason}; {sentence}")
    if found is None and verdict.identity.startswith("gradients:missing"):
        return verdict
    found = found or _of_memory(trial, upstream, first, verdict.output)
    # Roundings are right too where nothing cancels, as with equal numbers.
    if found is None and gross and _is_far_off(trial):
        found = _of_upstream(trial, upstream, verdict.output.removeprefix("d"), right)
    if found is not None:
        return replace(_because(verdict, *found), statistical=False)
    seen = verdict.evidence
    scaled = isinstance(seen, WrongGradient) and seen.ratio_to_right is not None
    return replace(verdict, cause="gradient-scale") if scaled else verdict


def _because(verdict: Verdict, cause: str, sentence: str) -> Verdict:
    return replace(verdict, reason=f"{verdict.reason}; {sentence}", cause=cause, because=sentence)


def of_access(trial: Trial, upstream: Upstream, verdict: Verdict, right: Right) -> Verdict:
    """The same failure, with its cause where a wrong access follows strides that the upstream gradient lacks."""
    # Code that assumes strides leaves the storage of one expanded element, and reads wrong elements in other layouts.
    if verdict.check not in ("bounds", "repeat") or not isinstance(verdict.evidence, WrongAccess | DamagedMemory):
        return verdict
    found = _of_layout(trial, upstream, right)
    return verdict if found is None else _because(verdict, *found)


def far_off(got: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether an error has the elements' own size, unlike any rounding; integers are always far off."""
    if not got.is_floating_point():
        return True
    a, b = (t.detach().double().nan_to_num(0.0, 0.0, 0.0) for t in (got, right))
    return float((a - b).abs().max()) > _FAR * float(b.abs().max())


def _is_far_off(trial: Trial) -> bool:
    if trial.result.evidence is None:
        return True
    _, got, against = trial.result.evidence
    return far_off(got, against.oracle if isinstance(against, OutputLanes) else against)


def _of_memory(trial: Trial, upstream: Upstream, first: Attempt, name: str) -> tuple[str, str] | None:
    """Cause and sentence where the gradient ``name`` has, or depends on, unwritten memory."""
    before = first.named().get(name)
    if before is None or first.outcome.watch is None:
        return None
    mask = first.outcome.watch.unwritten(before)
    other = Attempt(trial, upstream, FILLS[1])
    after = other.named().get(name)
    if after is None or after.shape != before.shape or other.outcome.watch is None:
        return None
    again = other.outcome.watch.unwritten(after)
    if mask is not None and again is not None and bool((mask & again).any()):
        count = int((mask & again).sum())
        return "unwritten-output", f"{count} of {mask.numel()} element(s) of {name} were never written"
    if not bool(repeat.differing(before, after).any()):
        return None
    same = Attempt(trial, upstream, FILLS[0]).named().get(name)
    if same is None or bool(repeat.differing(before, same).any()):
        return None  # it varies by itself
    return "stale-memory", f"{name} changes with what fresh memory (torch.empty) held"


def _of_layout(trial: Trial, upstream: Upstream, right: Right) -> tuple[str, str] | None:
    """Cause and sentence where a contiguous upstream gradient makes it right."""
    kinds = {upstream.layout[name].kind for name in upstream.used if not upstream.layout[name].plain}
    if not kinds or not right(Attempt(trial, upstream, FILLS[0], contiguous=True), upstream):
        return None
    listed = ", ".join(sorted(kinds))
    return "gradient-layout", f"it is right when the upstream gradient is contiguous, here it is {listed}"


def _of_outputs(trial: Trial, upstream: Upstream, name: str, right: Right) -> tuple[str | None, str] | None:
    """A sentence where gradients are wrong for some outputs alone; a cause where these send nothing back."""
    if not 1 < len(upstream.able) <= _MOST_OUTPUTS:
        return None
    wrong: list[tuple[str, bool]] = []
    others = False
    for output in upstream.able:
        alone = upstream.alone(output)
        attempt = Attempt(trial, alone, FILLS[0])
        if right(attempt, alone):
            others |= _largest(alone.native.get(name.removeprefix("d"))) > 0
        elif attempt.backward is not None:
            exact = _exact(alone, name.removeprefix("d"))
            wrong.append((output, not _largest(attempt.named().get(name)) and _largest(exact) > 0))
    if len(wrong) != 1 or not others:
        return None
    output, lost = wrong[0]
    sentence = f"it is wrong only where {output} has an upstream gradient"
    if not lost:
        return None, sentence
    return "lost-output-gradient", f"{sentence}, and 0 where nothing else has one: what flows back from it is lost"


def _of_upstream(trial: Trial, upstream: Upstream, name: str, right: Right) -> tuple[str, str] | None:
    """Cause and sentence where the gradient of the input ``name`` is right for upstream gradients of equal numbers."""
    # A gradient near zero there (of a softmax or a norm) is always right, and no evidence.
    usual = _largest(_exact(upstream, name))

    def deals_with(other: Upstream) -> bool:
        if not right(Attempt(trial, other, FILLS[0], contiguous=True), other):
            return False
        exact = _exact(other, name)
        # With all weight on one element the gradient is 0, and 1e-16 in float64: only roundings.
        cancelled = exact is None or _largest(other.native[name].double() - exact) > _largest(exact)
        return not cancelled and _largest(exact) > _TELLING * usual

    if not deals_with(upstream.constant(_ONE)):
        return None
    others = upstream.constant(_OTHER)
    if deals_with(others):
        several = any(t.numel() > 1 for t in upstream.upstream.values())
        # In 16 bits sums of equal numbers are often exact, unlike others.
        exact = upstream.native[name].dtype.itemsize >= 4
        if not (several and exact) or upstream.kind in ("expanded", "zero"):
            return None
        if not _moves(trial, upstream, name):
            return None
        return (
            "wrong-index-map",
            "it is right when all elements of the upstream gradient are equal: they are taken from wrong places",
        )
    if not _lacks_a_factor(trial, others, name, usual):
        return None
    sentence = (
        "it is right for an upstream gradient of ones and for no other: the factor is left out or applied wrongly"
    )
    return "gradient-scale", sentence


def _exact(upstream: Upstream, name: str) -> torch.Tensor | None:
    """The exact gradient; a 16-bit reference of one that cancels has only its own rounding."""
    try:
        lanes = upstream.lanes(1)
    except (NoGraph, ReferenceFailed):
        return None
    return lanes[name].oracle if name in lanes else None


def _largest(t: torch.Tensor | None) -> float:
    return float(t.double().abs().nan_to_num().max()) if t is not None and t.numel() else 0.0


def _lacks_a_factor(trial: Trial, others: Upstream, name: str, usual: float) -> bool:
    """Whether the gradient is off by its own size for upstream gradients that make products round."""
    # Products with ones are exact in any number of bits. With threes both a rounding and a missing factor show; a
    # rounding is below 2 % of the usual gradient, a missing factor takes two thirds of it.
    got, right = Attempt(trial, others, FILLS[0], contiguous=True).named().get(f"d{name}"), _exact(others, name)
    if got is None or right is None or got.shape != right.shape:
        return False
    return _largest(got.detach().double() - right) > _LEFT_OUT * max(usual, _largest(right))


def _moves(trial: Trial, upstream: Upstream, name: str) -> bool:
    """Whether the kernel gives elements of the upstream gradient parts that the reference gives to others."""
    # A gradient that is right for equal numbers may instead lack a part that is zero there, as a norm's gradient of its
    # mean. Then its parts belong to no element.
    sizes = {output: upstream.upstream[output].numel() for output in upstream.used}
    places = [(output, at) for output, size in sizes.items() for at in range(size)]
    if not 1 < len(places) <= _MOST_ELEMENTS:
        return False
    chosen = sorted({i * (len(places) - 1) // (_MOST_RUN - 1) for i in range(_MOST_RUN)})
    got, right = [], []
    for i, (output, at) in enumerate(places):
        alone = upstream.constant(0.0)
        alone.upstream[output].view(-1)[at] = 1.0
        try:
            alone.lanes(1)
        except (NoGraph, ReferenceFailed):
            return False
        if name not in alone.native:
            return False
        right.append(alone.native[name].detach().double().flatten())
        if i in chosen:
            gradient = Attempt(trial, alone, FILLS[0], contiguous=True).named().get(f"d{name}")
            if gradient is None or gradient.numel() != right[-1].numel():
                return False
            got.append(gradient.detach().double().flatten())
    shape = tuple(upstream.upstream[upstream.used[0]].shape) if len(sizes) == 1 else (len(places),)
    return rearranged(torch.stack(got), torch.stack(right), shape, chosen) is not False


def rearranged(got: torch.Tensor, right: torch.Tensor, shape: Sequence[int], chosen: Sequence[int]) -> bool | None:
    """Whether wrong parts are zero, those of another place, or of all places along an axis; ``None`` if none is wrong.

    ``right`` (N, M): the parts of M results for N places of ``shape`` in the reference; ``got``: for ``chosen`` places.
    """
    table = right.reshape(*shape, right.shape[-1])
    sums = [table.sum(axis).reshape(-1, right.shape[-1]) for axis in range(len(shape))]
    allowed = torch.cat([torch.zeros_like(right[:1]), right, *sums])
    largest = float(right.abs().nan_to_num().max()) if right.numel() else 0.0
    off = (got - right[list(chosen)]).abs() > _MOVED * largest
    if not bool(off.any()):
        return None
    near = torch.zeros_like(off)
    for candidate in allowed:
        near |= (got - candidate).abs() <= _SAME_PART * largest
    return float(near[off].double().mean()) >= _MOST_PARTS


def constant_ratio(got: torch.Tensor, right: torch.Tensor) -> float | None:
    """The constant factor by which the gradient is off; ``None`` where there is none."""
    a, b = got.detach().double().flatten(), right.double().flatten()
    large = b.abs() > b.abs().max() / 16
    if not bool(large.any()) or not bool(torch.isfinite(a).all()):
        return None
    ratios = a[large] / b[large]
    middle = float(ratios.median())
    same = bool((ratios - middle).abs().max() <= _SAME_RATIO * abs(middle))
    if len(ratios) == 1:
        # A single element is always some multiple of the right one; forgotten factors are small whole numbers.
        same = any(abs(r - round(r)) < _SAME_RATIO and 1 <= abs(round(r)) <= 64 for r in (middle, 1 / (middle or 1)))
    return middle if same and abs(middle - 1) > _OTHER_RATIO and abs(middle) < _LARGEST_RATIO else None
