"""`Figures`: what was measured of one entry, before it is compared with anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_fusion.bench.baseline.latency_judge import Noise
from pytest_fusion.bench.baseline.row import Latency
from pytest_fusion.bench.output_digest import GoldenOutput
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted
from pytest_fusion.run.measure.resources.resource_record import Resources
from pytest_fusion.run.measure.timing.activity import Activity
from pytest_fusion.run.measure.traffic import Traffic


class NotMeasuredError(Exception):
    """The entry cannot be called at all; the message says why."""


@dataclass(frozen=True, slots=True)
class Side:
    """What only a GPU has, of the fused call or of the reference.

    ``memory`` are exact facts in bytes, ``measures`` and ``timeline`` those of a ``Row``. ``backward`` is what a
    backward pass launches behind the forward one; ``None`` where there is none. ``backward_memory`` is the memory of
    both together.
    """

    memory: Mapping[str, int] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)
    timeline: tuple[Activity, ...] = ()
    backward: Counts | Uncounted | None = None
    backward_memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figures:
    """Facts of one entry.

    ``counts`` of the fused call and of the reference, ``moved`` its algorithmic bytes, ``reference`` what the reference
    moves and computes, ``None`` where its counts say why there is neither. The rest is a GPU's; ``samples`` are
    the seconds behind its latency by role, ``untimed`` says why there is none.
    """

    counts: Counts | Uncounted
    moved: int
    reference_counts: Counts | Uncounted
    reference: Traffic | None
    fused_side: Side = Side()
    reference_side: Side = Side()
    latency: Latency | None = None
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    untimed: str = ""
    resources: tuple[Resources, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Found:
    """What one session found: entries in order, each measured or with why not.

    Of a GPU: what baselines know it by, entries whose result is wrong at their sizes, what it makes of equal things,
    and why kernels were compiled again over the entries. ``golden`` are outputs of pinned cases, or why there are none.
    """

    facts: dict[str, str]
    entries: list[tuple[str, Figures | str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    noise: Noise | None = None
    again: list[tuple[str, int]] = field(default_factory=list)
    golden: list[tuple[str, tuple[GoldenOutput, ...] | str]] = field(default_factory=list)
