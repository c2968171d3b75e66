"""Latency of calls that the CPU computes itself, and how far these numbers can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_fusion.bench.baseline.latency_judge import Noise
from pytest_fusion.bench.latency import compared
from pytest_fusion.run.measure.timing.host import host_timed
from pytest_fusion.run.measure.timing.pairs import FEWEST_BLOCKS, PAIRS, Blocks

# Where each process puts its memory and its threads moves both sides apart by several per cent, which no run against
# itself within one process shows: a ratio of host times is kept and told, and accuses nobody.
NOISE = Noise(0.0, "times of a CPU differ from process to process by more than one process can show")
# What the fewest pairs that give an interval may take.
_MOST_S = 10.0


class NoLatencyError(Exception):
    """The message says why calls have no latency."""


def timed(
    fused: Callable[..., Any], reference: Callable[..., Any], inputs: Mapping[str, Any]
) -> tuple[Blocks, dict[str, str]]:
    """Pairs of calls, and how they were timed: on the same inputs each time, so that caches are warm.

    Raises ``NoLatencyError`` for calls too slow to be repeated, and what the calls raise.
    """
    candidate, control = host_timed(lambda: fused(**inputs)), host_timed(lambda: reference(**inputs))
    pair = candidate.seconds() * candidate.calls + control.seconds() * control.calls
    if pair * FEWEST_BLOCKS * PAIRS > _MOST_S:
        raise NoLatencyError(
            f"both calls take {pair:.2g} s, and {FEWEST_BLOCKS * PAIRS} pairs are needed for an interval; use smaller "
            "arguments"
        )
    blocks = compared(candidate, control)
    return blocks, {"timer": candidate.timer, "cache": "warm", "threads": str(torch.get_num_threads())}
