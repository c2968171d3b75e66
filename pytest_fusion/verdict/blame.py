"""Why a gradient is wrong, as far as other upstream gradients and other bytes in fresh memory can tell."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_fusion.run.memory import FILLS
from pytest_fusion.verdict import repeat
from pytest_fusion.verdict.backward import Attempt
from pytest_fusion.verdict.model import Verdict, failed
from pytest_fusion.verdict.trial import Trial
from pytest_fusion.verdict.upstream import Upstream

# A gradient that is the right one times a constant: how constant, and how far from 1.
_SAME_RATIO, _OTHER_RATIO = 0.02, 0.05
# Upstream gradients that are the same everywhere; what only takes them for 1 is right with the first alone.
_ONE, _OTHER = 1.0, 3.0
# A gradient of less than this share of the case's own has cancelled.
_TELLING = 0.01

# Whether a backward is right in every gradient, given its attempt and the upstream gradients; ``None`` where it ended.
Right = Callable[[Attempt, Upstream], bool | None]


def explained(trial: Trial, upstream: Upstream, first: Attempt, verdict: Verdict, right: Right) -> Verdict:
    """The same failure with its cause, where one of these experiments shows it.

    Are elements of the gradient as fresh memory was? Does it change with what fresh memory holds? Is it right with a
    contiguous upstream gradient? With one of ones, or of equal numbers?
    """
    if verdict.identity.startswith(("gradients:missing", "gradients:extra", "gradients:structure")):
        return verdict
    evidence = dict(verdict.evidence)
    output = str(evidence["output"])
    # What only a statistic shows may be hidden by other upstream gradients, and be there all the same.
    gross = not verdict.statistical
    found = _of_layout(trial, upstream, right) if gross else None
    found = found or _of_memory(trial, upstream, first, output)
    if found is None and gross:
        found = _of_upstream(trial, upstream, output.removeprefix("d"), right)
    reason = verdict.reason
    if found is not None:
        evidence["cause"], said = found
        evidence["because"] = said
        reason = f"{reason}; {said}"
    elif "ratio_to_right" in evidence:
        evidence["cause"] = "gradient-scale"
    statistical = verdict.statistical and found is None
    return failed("gradients", reason, identity=verdict.identity, statistical=statistical, **evidence)


def _of_memory(trial: Trial, upstream: Upstream, first: Attempt, name: str) -> tuple[str, str] | None:
    """Cause and sentence where the gradient called ``name`` holds, or depends on, what nothing wrote."""
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
    """Cause and sentence where the gradient is right once the upstream gradient is contiguous."""
    kinds = {upstream.layout[name].kind for name in upstream.used if not upstream.layout[name].plain}
    if not kinds or not right(Attempt(trial, upstream, FILLS[0], contiguous=True), upstream):
        return None
    listed = ", ".join(sorted(kinds))
    return "gradient-layout", f"it is right when the upstream gradient is contiguous, here it is {listed}"


def _of_upstream(trial: Trial, upstream: Upstream, name: str, right: Right) -> tuple[str, str] | None:
    """Cause and sentence where the gradient of the input ``name`` is right for upstream gradients of equal numbers.

    A gradient that is next to nothing there (of a softmax or a norm) is right in any case and tells nothing.
    """
    usual = float(upstream.native[name].abs().nan_to_num().max()) if upstream.native[name].numel() else 0.0

    def deals_with(other: Upstream) -> bool:
        if not right(Attempt(trial, other, FILLS[0], contiguous=True), other):
            return False
        there = other.native.get(name)
        return there is not None and float(there.abs().nan_to_num().max()) > _TELLING * usual

    if not deals_with(upstream.constant(_ONE)):
        return None
    if deals_with(upstream.constant(_OTHER)):
        several = any(t.numel() > 1 for t in upstream.upstream.values())
        # In 16 bits sums of equal numbers are often exact where those of others are not.
        exact = upstream.native[name].dtype.itemsize >= 4
        if not (several and exact) or upstream.kind in ("expanded", "zero"):
            return None
        return (
            "wrong-index-map",
            "it is right when all elements of the upstream gradient are equal: they are taken from wrong places",
        )
    said = "it is right for an upstream gradient of ones and for no other: the factor is left out or applied wrongly"
    return "gradient-scale", said


def constant_ratio(got: torch.Tensor, right: torch.Tensor) -> float | None:
    """The constant that the gradient is too large by; ``None`` where it is none."""
    a, b = got.detach().double().flatten(), right.double().flatten()
    large = b.abs() > b.abs().max() / 16
    if not bool(large.any()) or not bool(torch.isfinite(a).all()):
        return None
    ratios = a[large] / b[large]
    middle = float(ratios.median())
    same = bool((ratios - middle).abs().max() <= _SAME_RATIO * abs(middle))
    if len(ratios) == 1:
        # One element is always some multiple of the right one; factors that are forgotten are small whole numbers.
        same = any(abs(r - round(r)) < _SAME_RATIO and 1 <= abs(round(r)) <= 64 for r in (middle, 1 / (middle or 1)))
    return middle if same and abs(middle - 1) > _OTHER_RATIO else None
