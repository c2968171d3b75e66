"""Compares outputs with stored ones: bitwise equal, different by no more than rounding, or changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_fusion.bench.output_digest import GoldenOutput

GoldenStatus = Literal["same", "within", "changed", "unknown"]


@dataclass(frozen=True, slots=True)
class GoldenChange:
    """One output: bitwise ``same``, ``within`` tolerance (a drift), ``changed`` beyond it, or ``unknown``."""

    name: str
    verdict: GoldenStatus
    reason: str = ""


def compare_golden(before: Sequence[GoldenOutput], now: Sequence[GoldenOutput]) -> list[GoldenChange]:
    """Every output of either side, in the order of the baseline."""
    old, new = ({output.name: output for output in outputs} for outputs in (before, now))
    found = []
    verdict: GoldenStatus
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in old:
            verdict, reason = "unknown", "the baseline does not have it; add it with --fusion-update new"
        elif name not in new:
            verdict, reason = "unknown", "this run has none of it; accept that with --fusion-update all"
        else:
            verdict, reason = _compare(old[name], new[name])
        found.append(GoldenChange(name, verdict, reason))
    return found


def _compare(before: GoldenOutput, now: GoldenOutput) -> tuple[GoldenStatus, str]:
    for what in ("dtype", "shape"):
        was, is_ = getattr(before, what), getattr(now, what)
        if was != is_:
            return "changed", f"its {what} was {was} and is {is_}"
    if before.digest == now.digest:
        return "same", "bitwise"
    if not before.allowed or len(before.values) != len(now.values):
        return "unknown", "its bits differ, and the baseline does not say by how much they may"
    if before.nonfinite != now.nonfinite:
        return "changed", f"it had {before.nonfinite} NaN or infinite elements and has {now.nonfinite}"
    # What either side allows: a new kernel that rounds more is judged by its own rounding too.
    either = [max(pair) for pair in zip(before.allowed, now.allowed or before.allowed, strict=True)]
    worst, at = max(
        (_excess(was, is_, may), i)
        for i, (was, is_, may) in enumerate(zip(before.values, now.values, either, strict=True))
    )
    if worst > 1:
        values = f"sample {at} was {before.values[at]:.9g} and is {now.values[at]:.9g}"
        return "changed", f"{values}, where {either[at]:.3g} is allowed"
    slack = max(before.slack or 0.0, now.slack or 0.0)
    moved = abs(before.magnitude - now.magnitude)
    if moved > slack:
        magnitudes = f"the mean magnitude was {before.magnitude:.9g} and is {now.magnitude:.9g}"
        return "changed", f"{magnitudes}, where {slack:.3g} is allowed"
    if worst == 0 and moved == 0 and not any(either):
        return "changed", "its bits differ, and not one may"
    return "within", f"a drift: its bits differ, by {worst:.2f} of what is allowed at most"


def _excess(was: float, is_: float, allowed: float) -> float:
    if was == is_ or (math.isnan(was) and math.isnan(is_)):
        return 0.0
    if not (math.isfinite(was) and math.isfinite(is_)):
        return math.inf
    return abs(was - is_) / allowed if allowed > 0 else math.inf
