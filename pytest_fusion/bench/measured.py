"""`Figures`: what was measured of one entry; `Measured`: the rows of one test beside their baselines."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fusion.bench.baseline import store
from pytest_fusion.bench.baseline.latency_judge import Noise
from pytest_fusion.bench.baseline.row import GoldenOutput, Latency, Row, device_class, stable
from pytest_fusion.bench.baseline.row_compare import Comparison, compare, judged
from pytest_fusion.bench.bench_request import BenchRequest
from pytest_fusion.bench.counters import Counters
from pytest_fusion.bench.limits import Limited
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted
from pytest_fusion.run.measure.resources.targets import Resources
from pytest_fusion.run.measure.timing.roofline import Activity
from pytest_fusion.run.measure.traffic import Traffic


class NotMeasuredError(Exception):
    """The entry cannot be called at all; the message says why."""


@dataclass(frozen=True, slots=True)
class Side:
    """Facts of the fused call or the reference that only a GPU has: ``memory`` in bytes, ``measures`` and ``timeline``
    of a ``Row``, launches of the ``backward`` pass (``None`` without one), and ``backward_memory`` of both passes
    together."""

    memory: Mapping[str, int] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)
    timeline: tuple[Activity, ...] = ()
    backward: Counts | Uncounted | None = None
    backward_memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figures:
    """Facts of one entry: counts of both calls, ``moved`` (algorithmic bytes of the fused one), traffic of the
    ``reference``, ``None`` if its counts say why. The rest needs a GPU: ``samples`` are seconds by role, ``untimed`` is
    why there are none."""

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
    """The entries of one session in order, or why they are missing. A GPU also has ``facts`` for baselines, ``wrong``
    entries, A/A noise, and reasons to compile ``again``. ``golden`` are outputs of pinned cases, or why not."""

    facts: dict[str, str]
    entries: list[tuple[str, Figures | str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    noise: Noise | None = None
    again: list[tuple[str, int]] = field(default_factory=list)
    golden: list[tuple[str, tuple[GoldenOutput, ...] | str]] = field(default_factory=list)


_VERSIONS = ("torch", "triton", "cuda", "driver")


@dataclass(slots=True)
class Measured:
    """Rows of one test, their comparisons, resources of kernels on each target, and notes."""

    rows: list[Row] = field(default_factory=list)
    compared: list[Comparison] = field(default_factory=list)
    # Each with the text of the entry that launches it.
    resources: list[tuple[str, Resources]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Entries with a wrong result at their sizes; they have no row.
    wrong: list[str] = field(default_factory=list)
    # Kernels that a compiler refuses for every target, or for one that the baseline was compiled for.
    refused: list[str] = field(default_factory=list)
    limits: list[Limited] = field(default_factory=list)
    counters: list[Counters] = field(default_factory=list)
    # Every entry was measured, so other rows of the test are of cases that are gone.
    complete: bool = False

    @property
    def failures(self) -> list[Comparison | Limited]:
        return [*(one for one in self.compared if one.failed), *(one for one in self.limits if one.failed)]

    def as_json(self, *, accepted: bool = False) -> dict[str, Any]:
        """The ``bench`` of a test in reports; ``accepted``: the baseline gets the regressed rows."""
        word = {"regressed": "accepted"} if accepted else {}
        return {
            "rows": [row.as_json() for row in self.rows],
            "compared": [
                {
                    "case": one.key.case,
                    "role": one.key.role,
                    "verdict": one.verdict,
                    "reason": one.reason,
                    "changes": [{"verdict": word.get(verdict, verdict), "what": what} for verdict, what in one.changes],
                    "context": one.context,
                }
                for one in self.compared
            ],
            "resources": [{"case": case, **one.as_json()} for case, one in self.resources],
            "wrong": list(self.wrong),
            "limits": [one.as_json() for one in self.limits],
            "counters": [one.as_json() for one in self.counters],
            "notes": list(self.notes),
            "complete": self.complete,
        }


def beside_baseline(
    found: Measured, request: BenchRequest, nodeid: str, environment: Mapping[str, Any], machine: Noise | None
) -> Measured:
    """``found`` with its rows compared; ``machine`` is the noise for latencies. Raises ``BaselineError``."""
    stored = store.load(request.folder, stable(nodeid), device_class(environment))
    command = f"pytest {shlex.quote(nodeid)} --fusion-bench --fusion-update new"
    if request.folder.parts[-2:] != BenchRequest().folder.parts:
        command += f" --fusion-baseline {shlex.quote(str(request.folder))}"
    ci = request.ci and request.update == "none"
    compared = [compare(row, stored, machine=machine, ci=ci, command=command) for row in found.rows]
    found.compared = judged(compared, family=request.family)
    found.refused = _refused(found.resources, stored.rows.values() if stored is not None else ())
    return found


def _refused(resources: Sequence[tuple[str, Resources]], before: Iterable[Row]) -> list[str]:
    compiled = {(row.case, "/".join(fact.split("/")[:2])) for row in before for fact in row.facts}
    somewhere = {(case, one.kernel) for case, one in resources if one.status != "refused"}
    return [
        f"{case}: {one}"
        for case, one in resources
        if one.status == "refused"
        and ((case, one.kernel) not in somewhere or (case, f"{one.target}/{one.kernel}") in compiled)
    ]


def common(nodeid: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that all rows of a test share."""
    return {
        "test": stable(nodeid),
        "device": device_class(environment),
        "environment": {name: str(environment[name]) for name in _VERSIONS if environment.get(name)},
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def facts_of(counts: Counts | Uncounted) -> tuple[dict[str, int], dict[str, int], dict[str, str]]:
    """Facts, names and methods of a ``Row``; empty if nothing was counted."""
    if isinstance(counts, Uncounted):
        return {}, {}, {}
    facts = {"launches.kernels": counts.kernels, "launches.memcpy": counts.memcpy, "launches.memset": counts.memset}
    return facts, dict(counts.names), {"launches": counts.method}


def work_facts(work: Traffic) -> dict[str, int]:
    """The traffic and operations of a reference, under the names of a ``Row``."""
    return {"bytes.moved": work.bytes, "work.operations": work.operations, "work.flops": work.flops}


def failure_line(one: Comparison | Limited) -> str:
    """A failed comparison or limit as a sentence."""
    return f"{one.key.case}, {one.key.role}: {one.verdict}: {one.reason}"
