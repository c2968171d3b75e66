"""From a spec whose test passed to its rows, beside their baselines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fusion.baseline import store
from pytest_fusion.baseline.compare import Comparison, compare, judged
from pytest_fusion.baseline.model import Row, stable
from pytest_fusion.baseline.place import device_class
from pytest_fusion.bench import limits
from pytest_fusion.bench.entries import Entry, entries
from pytest_fusion.bench.figures import Figures, Found, NotMeasuredError
from pytest_fusion.bench.golden import goldens
from pytest_fusion.bench.limits import Limited, limited
from pytest_fusion.bench.modelled import CPU, measure
from pytest_fusion.bench.request import BenchRequest
from pytest_fusion.case.plan import Limits
from pytest_fusion.run.counting.model import Counts, Uncounted
from pytest_fusion.run.isolate import Channel, ChildError, Crash, run_isolated
from pytest_fusion.run.resources.measure import Report, recompilations_of, resources_of
from pytest_fusion.run.resources.record import Resources, figures
from pytest_fusion.run.resources.targets import parse_targets
from pytest_fusion.spec.fusion_spec import FusionSpec

# Of one entry at full sizes: on a CPU nothing is computed, on a GPU kernels compile.
_SECONDS = 300.0
_VERSIONS = ("torch", "triton", "cuda", "driver")
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
    # Entries whose result is wrong at their sizes, which have no row.
    wrong: list[str] = field(default_factory=list)
    limits: list[Limited] = field(default_factory=list)
    # Every entry was measured, so that another row of the test is of a case that is gone.
    complete: bool = False

    @property
    def failures(self) -> list[Comparison | Limited]:
        return [*(one for one in self.compared if one.failed), *(one for one in self.limits if one.failed)]

    def as_json(self) -> dict[str, Any]:
        """The ``bench`` of a test in reports."""
        return {
            "rows": [row.as_json() for row in self.rows],
            "compared": [
                {"case": one.key.case, "role": one.key.role, "verdict": one.verdict, "reason": one.reason}
                for one in self.compared
            ],
            "resources": [one.as_json() for one in self.resources],
            "wrong": list(self.wrong),
            "limits": [one.as_json() for one in self.limits],
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
    if not named and not spec.golden:
        return found
    on_gpu = environment.get("lane") == "cuda"
    measure = _on_device if on_gpu else _modelled
    session = measure(spec, named, extra, environment, isolated=isolated)
    if isinstance(session, str):
        found.notes.append(f"{spec.name} was not measured: {session}")
        return found
    environment = {**environment, **session.facts}
    found.wrong = session.wrong
    found.notes += [f"{text}: not measured: {one}" for text, one in session.entries if isinstance(one, str)]
    figured = [(text, one) for text, one in session.entries if not isinstance(one, str)]
    found.complete = len(figured) == len(named)
    targets = parse_targets(asked.targets) if asked.targets and not on_gpu else ()
    reports = resources_of(spec, [entry.given for entry in named], targets) if targets else []
    found.resources = [kernel for report in reports for kernel in report.kernels]
    found.resources += [kernel for _, one in figured for kernel in one.resources]
    again = session.again if on_gpu else recompilations_of(reports)
    sweep = (
        {"recompiles": sum(times for _, times in again)} if len(named) > 1 and (reports or (on_gpu and figured)) else {}
    )
    found.rows = _rows(figured, _by_case(named, reports), sweep, found, stable(nodeid), environment)
    found.rows += _golden_rows(session, found, stable(nodeid), environment)
    found.notes += [f"compiled again: {reason} ({times} x)" for reason, times in again]
    found.notes += dict.fromkeys(f"{report.target}: {report.problem}" for report in reports if report.problem)
    stored = store.load(asked.folder, stable(nodeid), device_class(environment))
    command = f"pytest {nodeid} --fusion-bench --fusion-update new"
    ci = asked.ci and asked.update == "none"
    noisy = session.noise.noisy if session.noise is not None else ""
    timed = [row for row in found.rows if row.case != ALL and not row.golden]
    found.limits = limited(timed, spec.bench_limits, noisy=noisy)
    found.notes += limits.notes(found.limits)
    compared = [compare(row, stored, machine=session.noise, ci=ci, command=command) for row in found.rows]
    found.compared = judged(compared, family=asked.family)
    return found


def _modelled(
    spec: FusionSpec,
    named: Sequence[Entry],
    extra: Mapping[str, Any],
    environment: Mapping[str, Any],  # noqa: ARG001 - as for a GPU
    *,
    isolated: bool,
) -> Found | str:
    def work(_: object) -> Found:
        found = Found({})
        for entry in named:
            try:
                found.entries.append((entry.text, measure(spec, entry, extra)))
            except NotMeasuredError as error:
                found.entries.append((entry.text, str(error)))
        if spec.golden:
            found.golden = goldens(spec, extra, CPU, Limits().programs)
        return found

    return _answer(run_isolated(work, time_limit_s=_SECONDS) if isolated else work(None))


def _on_device(
    spec: FusionSpec,
    named: Sequence[Entry],
    extra: Mapping[str, Any],
    environment: Mapping[str, Any],
    *,
    isolated: bool,
) -> Found | str:
    from pytest_fusion.bench.on_device import PROGRAMS, measure_all, opened

    asked = torch.device(str(environment["device"]))
    device = torch.device("cuda", asked.index or 0)

    def work(channel: Channel | None) -> Found:
        note = channel.note if channel is not None else lambda _: None
        found = measure_all(spec, named, extra, device, environment, note) if named else Found(opened(device).facts)
        if spec.golden:
            found.golden = goldens(spec, extra, device, PROGRAMS)
        return found

    return _answer(run_isolated(work, time_limit_s=_SECONDS) if isolated else work(None))


def _answer(outcome: Found | Crash | ChildError) -> Found | str:
    if isinstance(outcome, Crash):
        return outcome.detail
    return f"{outcome.type_name}: {outcome.message}" if isinstance(outcome, ChildError) else outcome


def _by_case(named: Sequence[Entry], reports: Sequence[Report]) -> dict[str, dict[str, int]]:
    """Exact figures of all targets by the text of the entry; reports come entry by entry."""
    found: dict[str, dict[str, int]] = {}
    each = len(reports) // len(named) if named else 0
    for number, entry in enumerate(named):
        for report in reports[number * each : (number + 1) * each]:
            found.setdefault(entry.text, {}).update(report.figures)
    return found


def _rows(
    figured: Sequence[tuple[str, Figures]],
    resources: Mapping[str, Mapping[str, int]],
    sweep: Mapping[str, int],
    found: Measured,
    test: str,
    environment: Mapping[str, Any],
) -> list[Row]:
    shared = _shared(test, environment)
    rows: list[Row] = []
    for text, one in figured:
        of_kernels = resources.get(text, {}) or figures(one.resources)
        work = one.reference
        moved = (
            {"bytes.moved": work.bytes, "work.operations": work.operations, "work.flops": work.flops} if work else {}
        )
        sides = (
            ("fused", one.counts, one.fused_side, {"bytes.algorithmic": one.moved, **of_kernels}),
            ("reference", one.reference_counts, one.reference_side, moved),
        )
        for role, counts, side, more in sides:
            facts, names, methods = facts_of(counts)
            facts |= {**more, **side.memory}
            if facts:
                latency, samples = (one.latency, one.samples) if role == "fused" else (None, {})
                rows.append(
                    Row(case=text, role=role, facts=facts, names=names, methods=methods, latency=latency,
                        samples=samples, measures=side.measures, timeline=side.timeline, **shared)
                )  # fmt: skip
            if side.backward is not None:
                facts, names, methods = facts_of(side.backward)
                if facts:
                    role = f"{role} backward"
                    rows.append(Row(case=text, role=role, facts=facts, names=names, methods=methods, **shared))
        found.notes += [f"{text}: {note}" for note in (*one.notes, *_unknown(one))]
    return [*rows, Row(case=ALL, role="fused", facts=sweep, **shared)] if sweep else rows


def _shared(test: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "test": test,
        "device": device_class(environment),
        "environment": {name: str(environment[name]) for name in _VERSIONS if environment.get(name)},
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _golden_rows(session: Found, found: Measured, test: str, environment: Mapping[str, Any]) -> list[Row]:
    found.notes += [f"{text}: not kept: {one}" for text, one in session.golden if isinstance(one, str)]
    return [
        Row(case=text, role="fused", golden=one, **_shared(test, environment))
        for text, one in session.golden
        if not isinstance(one, str) and one
    ]


def _unknown(one: Figures) -> list[str]:
    """What of an entry is not known, and why."""
    counted = (
        ("launches of the kernel", one.counts),
        (_REFERENCE[one.reference is None], one.reference_counts),
        ("launches of the kernel's backward pass", one.fused_side.backward),
        ("launches of the reference's backward pass", one.reference_side.backward),
    )
    said = [f"{what} not known: {counts.reason}" for what, counts in counted if isinstance(counts, Uncounted)]
    return [*said, f"no latency: {one.untimed}"] if one.untimed else said


def facts_of(counts: Counts | Uncounted) -> tuple[dict[str, int], dict[str, int], dict[str, str]]:
    """Facts, names and methods of a ``Row``; empty where nothing was counted."""
    if isinstance(counts, Uncounted):
        return {}, {}, {}
    facts = {"launches.kernels": counts.kernels, "launches.memcpy": counts.memcpy, "launches.memset": counts.memset}
    return facts, dict(counts.names), {"launches": counts.method}


def told(one: Comparison | Limited) -> str:
    """A failed comparison or limit in a sentence."""
    return f"{one.key.case}, {one.key.role}: {one.verdict}: {one.reason}"
