"""From a spec whose test passed to its rows, beside their baselines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fusion.baseline import store
from pytest_fusion.baseline.compare import Comparison, compare, judged
from pytest_fusion.baseline.model import Row, stable
from pytest_fusion.baseline.place import device_class
from pytest_fusion.bench.entries import Entry, entries
from pytest_fusion.bench.modelled import Modelled, NotMeasuredError, measure
from pytest_fusion.bench.request import BenchRequest
from pytest_fusion.run.counting.model import Counts, Uncounted
from pytest_fusion.run.isolate import ChildError, Crash, run_isolated
from pytest_fusion.run.resources.measure import Report, recompilations_of, resources_of
from pytest_fusion.run.resources.record import Resources
from pytest_fusion.run.resources.targets import parse_targets
from pytest_fusion.spec.fusion_spec import FusionSpec

# Making the inputs of full sizes and binding some launches; nothing is computed.
_SECONDS = 120.0
ALL = "all entries"
# What of a reference is not known where its launches are not, without and with its bytes.
_REFERENCE = ("launches of the reference", "launches and bytes of the reference")


@dataclass(slots=True)
class Measured:
    """Rows of one test, their comparisons, what kernels take of each target, and what is to be told."""

    rows: list[Row] = field(default_factory=list)
    compared: list[Comparison] = field(default_factory=list)
    resources: list[Resources] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Every entry was measured, so that another row of the test is of a case that is gone.
    complete: bool = False

    @property
    def failures(self) -> list[Comparison]:
        return [one for one in self.compared if one.failed]

    def as_json(self) -> dict[str, Any]:
        """The ``bench`` of a test in reports."""
        return {
            "rows": [row.as_json() for row in self.rows],
            "compared": [
                {"case": one.key.case, "role": one.key.role, "verdict": one.verdict, "reason": one.reason}
                for one in self.compared
            ],
            "resources": [one.as_json() for one in self.resources],
            "notes": list(self.notes),
            "complete": self.complete,
        }


def bench(
    spec: FusionSpec,
    asked: BenchRequest,
    *,
    nodeid: str,
    environment: Mapping[str, Any],
    extra: Mapping[str, Any],
    isolated: bool = True,
) -> Measured:
    """Measure every entry of ``bench=``, ``isolated`` in a child, and compare with the baselines.

    Raises ``SpecError`` for entries that name no case and ``BaselineError`` for a baseline that cannot be read.
    """
    found = Measured()
    named = entries(spec)
    if not named:
        return found
    if environment.get("lane") == "cuda":
        found.notes.append("bench= is measured on the CPU lane only by this version")
        return found
    modelled = _modelled(spec, named, extra, found.notes, isolated=isolated)
    found.complete = len(modelled) == len(named)
    targets = parse_targets(asked.targets) if asked.targets else ()
    reports = resources_of(spec, [entry.given for entry in named], targets) if targets else []
    found.resources = [kernel for report in reports for kernel in report.kernels]
    again = recompilations_of(reports)
    sweep = {"recompiles": sum(count for _, count in again)} if len(named) > 1 and reports else {}
    found.rows = _rows(modelled, _by_case(named, reports), sweep, found, stable(nodeid), environment)
    found.notes += [f"compiled again: {reason} ({count} x)" for reason, count in again]
    found.notes += dict.fromkeys(f"{report.target}: {report.problem}" for report in reports if report.problem)
    stored = store.load(asked.folder, stable(nodeid), device_class(environment))
    command = f"pytest {nodeid} --fusion-bench --fusion-update new"
    ci = asked.ci and asked.update == "none"
    found.compared = judged([compare(row, stored, ci=ci, command=command) for row in found.rows])
    return found


def _modelled(
    spec: FusionSpec, named: Sequence[Entry], extra: Mapping[str, Any], notes: list[str], *, isolated: bool
) -> list[tuple[str, Modelled]]:
    def work(_: object) -> list[tuple[str, Modelled | str]]:
        found: list[tuple[str, Modelled | str]] = []
        for entry in named:
            try:
                found.append((entry.text, measure(spec, entry, extra)))
            except NotMeasuredError as error:
                found.append((entry.text, str(error)))
        return found

    outcome = run_isolated(work, time_limit_s=_SECONDS) if isolated else work(None)
    if isinstance(outcome, Crash | ChildError):
        why = outcome.detail if isinstance(outcome, Crash) else f"{outcome.type_name}: {outcome.message}"
        notes.append(f"{spec.name} was not measured: {why}")
        return []
    notes += [f"{text}: not measured: {one}" for text, one in outcome if isinstance(one, str)]
    return [(text, one) for text, one in outcome if not isinstance(one, str)]


def _by_case(named: Sequence[Entry], reports: Sequence[Report]) -> dict[str, dict[str, int]]:
    """Exact figures of all targets by the text of the entry; reports come entry by entry."""
    found: dict[str, dict[str, int]] = {}
    each = len(reports) // len(named) if named else 0
    for number, entry in enumerate(named):
        for report in reports[number * each : (number + 1) * each]:
            found.setdefault(entry.text, {}).update(report.figures)
    return found


def _rows(
    modelled: Sequence[tuple[str, Modelled]],
    figures: Mapping[str, Mapping[str, int]],
    sweep: Mapping[str, int],
    found: Measured,
    test: str,
    environment: Mapping[str, Any],
) -> list[Row]:
    shared: dict[str, Any] = {
        "test": test,
        "device": device_class(environment),
        "environment": {name: str(environment[name]) for name in ("torch", "triton") if environment.get(name)},
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    rows: list[Row] = []
    for text, one in modelled:
        facts, names, methods = _counted(one.counts)
        facts |= {"bytes.algorithmic": one.moved, **figures.get(text, {})}
        rows.append(Row(case=text, role="fused", facts=facts, names=names, methods=methods, **shared))
        facts, names, methods = _counted(one.reference_counts)
        work = one.reference
        if work is not None:
            facts |= {"bytes.moved": work.bytes, "work.operations": work.operations, "work.flops": work.flops}
        if facts:
            rows.append(Row(case=text, role="reference", facts=facts, names=names, methods=methods, **shared))
        found.notes += [
            f"{text}: {what} not known: {counts.reason}"
            for what, counts in (
                ("launches of the kernel", one.counts),
                (_REFERENCE[work is None], one.reference_counts),
            )
            if isinstance(counts, Uncounted)
        ]
    return [*rows, Row(case=ALL, role="fused", facts=sweep, **shared)] if sweep else rows


def _counted(counts: Counts | Uncounted) -> tuple[dict[str, int], dict[str, int], dict[str, str]]:
    if isinstance(counts, Uncounted):
        return {}, {}, {}
    facts = {"launches.kernels": counts.kernels, "launches.memcpy": counts.memcpy, "launches.memset": counts.memset}
    return facts, dict(counts.names), {"launches": counts.method}


def told(one: Comparison) -> str:
    """A failed comparison in a sentence."""
    return f"{one.key.case}, {one.key.role}: {one.verdict}: {one.reason}"
