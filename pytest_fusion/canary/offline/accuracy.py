"""The error of a result relative to the allowed one, and the ratio of two kernels' errors over many cases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pytest_fusion.oracle import OutputLanes
from pytest_fusion.oracle.tolerance import excess_by
from pytest_fusion.spec.promises import Tolerance

# Results rounded once from the exact value have 0.03 to 0.05 (float32, some 40 cases of exp). Errors below depend on
# the values drawn, and a kernel that is exact on a few small numbers would give infinite ratios.
FLOOR = 0.05
RESAMPLES = 2000
LEVEL = 0.99
# Non-inferiority: a quarter more error is allowed (the judge of a rollout has the same limit).
MARGIN = math.log(1.25)
# With fewer cases a bootstrap has too few values to draw from.
FEWEST = 20


@dataclass(frozen=True, slots=True)
class Ratio:
    """The mean of log(candidate's error / incumbent's) over cases, ``low`` to ``high`` at ``LEVEL``."""

    output: str
    mean: float
    low: float
    high: float
    cases: int


def error(output: torch.Tensor, right: OutputLanes | torch.Tensor, tolerance: str | Tolerance) -> float | None:
    """The root mean square of the elements' errors, each divided by its allowed error.

    ``None`` where it means nothing: no elements, integers, another shape, or NaN and infinity in the wrong place.
    """
    native = right.native if isinstance(right, OutputLanes) else right
    if not output.numel() or output.shape != native.shape or not output.dtype.is_floating_point:
        return None
    shares = excess_by(output, right, tolerance)
    if not bool(shares.isfinite().all()):
        return None
    return float(shares.square().mean().sqrt())


def ratios(errors: Sequence[Mapping[str, tuple[float, float]]]) -> list[Ratio]:
    """The mean log ratio of errors, with its interval, for each output that has ``FEWEST`` cases or more.

    Errors are raised to ``FLOOR``. The interval is a bootstrap of ``RESAMPLES`` resamples of whole cases; ``LEVEL``
    holds for all outputs together. The seed is fixed, so equal arguments give equal results.
    """
    import numpy as np

    by_output: dict[str, list[float]] = {}
    for case in errors:
        for name, (ours, theirs) in case.items():
            by_output.setdefault(name, []).append(math.log(max(ours, FLOOR) / max(theirs, FLOOR)))
    enough = {name: values for name, values in by_output.items() if len(values) >= FEWEST}
    tail = (1 - LEVEL) / max(1, len(enough))
    found = []
    for name, values in enough.items():
        logs = np.asarray(values, dtype=np.float64)
        drawn = np.random.default_rng(0).integers(0, logs.size, (RESAMPLES, logs.size))
        low, high = np.quantile(logs[drawn].mean(axis=1), [tail, 1 - tail])
        found.append(Ratio(name, float(logs.mean()), float(low), float(high), int(logs.size)))
    return found
