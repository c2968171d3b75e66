"""Runs a reference once, with its lanes in lock-step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pytest_fusion.oracle.einsum import Contracting
from pytest_fusion.oracle.lane_mode import LaneMode
from pytest_fusion.oracle.lane_result import Kind, LaneRun, OutputLanes
from pytest_fusion.oracle.lane_store import Lanes
from pytest_fusion.oracle.outside import noting, priced
from pytest_fusion.oracle.rounding import Noise
from pytest_fusion.run.precision import full_precision


def run_lanes(
    call: Callable[[], Sequence[Tensor]],
    *,
    lanes: int = 6,
    kind: Kind = "E",
    seed: int,
    limit_s: float = math.inf,
    numbers: frozenset[float] = frozenset(),
) -> LaneRun:
    """Run ``call`` once; its results natively, in float64, and in ``lanes`` randomly rounded versions.

    ``call`` runs the reference and returns a flat sequence of result tensors, which may include inputs that it wrote;
    backward passes inside it are followed. For ``kind`` see `LaneMode`. Only ``call`` changes the global random state.
    ``numbers`` are those of an earlier run. Raises what ``call`` raises, and ``TooSlow`` in it after ``limit_s``
    seconds.
    """
    noise = Noise(lanes, kind, seed, numbers)
    mode = LaneMode(noise, limit_s)
    with full_precision(), noting(mode.taken, mode), Contracting(), mode:
        results = list(call())
    outputs = [_output(mode, result.detach(), lanes) for result in results]
    outside = tuple(f"what became of numbers outside of torch, by {name}" for name in sorted(set(mode.taken)))
    return LaneRun(outputs, (*mode.fallbacks, *outside), mode.drawn, frozenset(noise.numbers))


def _output(mode: LaneMode, native: Tensor, count: int) -> OutputLanes:
    with torch.no_grad():
        lanes: Lanes = mode.lanes_of(native)
        if mode.taken:
            lanes = priced(mode.noise, lanes, native, mode.store.tracks(native))
    # Integers are returned as their codes, floating results before their last rounding.
    value = lanes.raw
    noisy = value[1:] if value.shape[0] > 1 else value.expand(count, *value.shape[1:])
    return OutputLanes(native, value[0], noisy, moved=value.shape[0] == 1)
