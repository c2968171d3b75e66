"""The latency of a fused call beside its reference on a GPU, as a record for baselines."""

from __future__ import annotations

import hashlib
import inspect
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from pytest_fusion.bench.baseline.bootstrap import Estimate, block_ratios, estimate, settled
from pytest_fusion.bench.baseline.latency_judge import Noise, noise
from pytest_fusion.bench.baseline.row import Latency, latency_place, unit_of
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted
from pytest_fusion.run.measure.timing.graph_replay import Replayed, copies_needed, replayed, rotated
from pytest_fusion.run.measure.timing.pairs import Blocks, Timed, paired
from pytest_fusion.run.measure.traffic import algorithmic_bytes

# Seconds to time a case, and the smallest change to detect.
BUDGET_S, SMALLEST = 0.5, 0.01
# Share of the free memory for copies of inputs and outputs.
_SHARE = 0.4


def timed(
    call: Callable[..., Any],
    logical: Mapping[str, Any],
    outputs: Any,
    device: torch.device,
    cache: int,
    counts: Counts | Uncounted | None = None,
) -> tuple[Replayed, bool]:
    """A timer of ``call`` on rotating copies, and whether caches are cold; a graph must have all of ``counts``."""
    touched = algorithmic_bytes(logical.values(), outputs)
    free, _ = torch.cuda.mem_get_info(device)
    sets, cold = rotated(logical, copies_needed(touched, cache), int(_SHARE * free) // 2)
    whole = counts is None or (isinstance(counts, Counts) and counts.method == "graph")
    reason = counts.reason if isinstance(counts, Uncounted) else "its launches were not counted in a graph"
    return replayed(call, sets, device, plain="" if whole else reason), cold


def compared(candidate: Timed, control: Timed, *, seed: int = 0) -> Blocks:
    """Pairs until the log ratio is known to half the smallest effect, or the budget is spent."""

    def enough(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> bool:
        return settled(estimate(block_ratios(ours, theirs)), SMALLEST)

    return paired(candidate, control, enough=enough, budget_s=BUDGET_S, seed=seed)


def against_itself(control: Replayed) -> tuple[Noise, Estimate]:
    """The machine's noise: one thing against itself, measured like two things."""
    found = compared(control, control)
    run = estimate(block_ratios(found.candidate, found.control))
    return noise([run]), run


def latency(
    blocks: Blocks, method: Mapping[str, str], *, control: str, environment: Mapping[str, Any], machine: Noise | None
) -> Latency:
    """The record of ``blocks``; ``control`` is a digest of the reference, ``machine`` the noise of this session."""
    found = estimate(block_ratios(blocks.candidate, blocks.control))
    return Latency(
        fused_s=median(blocks.candidate),
        reference_s=median(blocks.control),
        **asdict(found),
        method={**method, "warm-up": "steady" if blocks.warm else "unsteady"},
        control=control,
        aa=machine.spread if machine is not None else None,
        place=latency_place(environment),
        unit=unit_of(environment.get("uuid")),
    )


def replay_method(candidate: Replayed, control: Replayed, *, cold: bool) -> dict[str, str]:
    """How two batches of calls were timed, for a record."""
    timer = candidate.timer if candidate.timer == control.timer else f"{candidate.timer}/{control.timer}"
    return {"timer": timer, "cache": "cold" if cold else "warm"}


def samples(blocks: Blocks) -> dict[str, tuple[float, ...]]:
    """The seconds of each sample by role, as the ``samples`` of a row."""
    sides = {"fused": blocks.candidate, "reference": blocks.control}
    return {role: tuple(seconds for block in side for seconds in block) for role, side in sides.items()}


def digest(function: Callable[..., Any]) -> str:
    """Eight digits of a function's source, else of its name: ratios to two references do not compare."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(type(function)))}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def median(blocks: Sequence[Sequence[float]]) -> float:
    """The median of all samples, in seconds."""
    return statistics.median(value for block in blocks for value in block)
