"""From a spec whose test passed to its rows, beside their baselines; and outputs of pinned cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pytest_fusion.bench import counters, limits
from pytest_fusion.bench.baseline.facts import RECOMPILES
from pytest_fusion.bench.baseline.row import GoldenOutput, Row
from pytest_fusion.bench.bench_request import BenchRequest
from pytest_fusion.bench.entries import Entry, entries, text_of
from pytest_fusion.bench.limits import limited
from pytest_fusion.bench.measured import (
    Figures,
    Found,
    Measured,
    NotMeasuredError,
    beside_baseline,
    common,
    facts_of,
    work_facts,
)
from pytest_fusion.bench.output_digest import apart, golden_of
from pytest_fusion.bench.without_gpu import CPU, measure
from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.case.plan import Limits, build, make_plan
from pytest_fusion.checks.context import Context, call, collect, reference_of, varies
from pytest_fusion.oracle.reference import ReferenceFailed
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted
from pytest_fusion.run.measure.resources.kernel_resources import Report, recompilations_of, resources_of
from pytest_fusion.run.measure.resources.targets import figures, parse_targets
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.process.fork import Channel, ChildError, Crash, run_isolated
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief

# For one entry at full sizes: on a CPU nothing is computed, on a GPU kernels compile.
_SECONDS = 300.0
ALL = "all entries"


def bench(
    spec: FusionSpec,
    request: BenchRequest,
    *,
    nodeid: str,
    environment: Mapping[str, Any],
    extra: Mapping[str, Any],
    isolated: bool = True,
) -> Measured:
    """Measures the entries of ``bench=`` beside their baselines. Raises ``SpecError``, ``BaselineError``."""
    found = Measured()
    named = entries(spec)
    if not named and not spec.golden:
        return found
    on_gpu = environment.get("lane") == "cuda"
    session = _session(spec, named, extra, environment, isolated=isolated)
    if isinstance(session, str):
        found.notes.append(f"{spec.name} was not measured: {session}")
        return found
    environment = {**environment, **session.facts}
    found.wrong = session.wrong
    found.notes += [f"{text}: not measured: {one}" for text, one in session.entries if isinstance(one, str)]
    figured = [(text, one) for text, one in session.entries if not isinstance(one, str)]
    found.complete = len(figured) == len(named)
    targets = parse_targets(request.targets) if request.targets and not on_gpu else ()
    reports = resources_of(spec, [entry.given for entry in named], targets) if targets else []
    each = len(reports) // len(named) if named else 0
    by_entry = {entry.text: reports[n * each : (n + 1) * each] for n, entry in enumerate(named)}
    found.resources = [(text, kernel) for text, own in by_entry.items() for one in own for kernel in one.kernels]
    found.resources += [(text, kernel) for text, one in figured for kernel in one.resources]
    again = session.again if on_gpu else recompilations_of(reports)
    swept = len(named) > 1 and (reports or (on_gpu and figured))
    shared = common(nodeid, environment)
    found.rows = rows_of(figured, by_entry, found, shared)
    if swept:
        facts = {RECOMPILES: sum(times for _, times in again)}
        found.rows.append(Row(case=ALL, role="fused", facts=facts, reasons=dict(again), **shared))
    for text, outputs in session.golden:
        if isinstance(outputs, str):
            found.notes.append(f"{text}: not kept: {outputs}")
        elif outputs:
            found.rows.append(Row(case=text, role="fused", golden=outputs, **shared))
    found.notes += [f"compiled again: {reason} ({times} x)" for reason, times in again]
    found.notes += dict.fromkeys(f"{report.target}: {report.problem}" for report in reports if report.problem)
    found.counters = counters.counted(request.counters, {text: one.counts for text, one in figured}, on_gpu=on_gpu)
    found.notes += counters.notes(found.counters)
    noisy = session.noise.noisy if session.noise is not None else ""
    found.limits = limited(found.rows, spec.bench_limits, noisy=noisy)
    found.notes += limits.notes(found.limits)
    return beside_baseline(found, request, nodeid, environment, session.noise)


def _session(
    spec: FusionSpec,
    named: Sequence[Entry],
    extra: Mapping[str, Any],
    environment: Mapping[str, Any],
    *,
    isolated: bool,
) -> Found | str:
    """The measurements, or why there are none."""

    def work(channel: Channel | None) -> Found:
        if environment.get("lane") == "cuda":
            from pytest_fusion.bench.gate import PROGRAMS
            from pytest_fusion.bench.on_device import measure_all, opened

            programs, device = PROGRAMS, torch.device("cuda", torch.device(str(environment["device"])).index or 0)
            note = channel.note if channel is not None else lambda _: None
            here = opened(device, environment)
            found = measure_all(spec, named, here, extra, note) if named else Found(here.facts)
        else:
            device, programs = CPU, Limits().programs
            found = Found({}, [(entry.text, _modelled(spec, entry, extra)) for entry in named])
        if spec.golden:
            found.golden = goldens(spec, extra, device, programs)
        return found

    outcome = run_isolated(work, time_limit_s=_SECONDS) if isolated else work(None)
    if isinstance(outcome, Crash):
        return outcome.detail
    return f"{outcome.type_name}: {outcome.message}" if isinstance(outcome, ChildError) else outcome


def _modelled(spec: FusionSpec, entry: Entry, extra: Mapping[str, Any]) -> Figures | str:
    """The figures of an entry, or why there are none."""
    try:
        return measure(spec, entry, extra)
    except NotMeasuredError as error:
        return str(error)


def rows_of(
    figured: Sequence[tuple[str, Figures]],
    reports: Mapping[str, Sequence[Report]],
    found: Measured,
    shared: Mapping[str, Any],
) -> list[Row]:
    """The rows of each entry, fused and reference; the notes of ``found`` get the unknown facts."""
    rows: list[Row] = []

    def add(role: str, counts: Counts | Uncounted, more: Mapping[str, int], **others: Any) -> None:
        facts, names, methods = facts_of(counts)
        facts |= more
        if facts:
            rows.append(Row(role=role, facts=facts, names=names, methods=methods, **others, **shared))

    for text, one in figured:
        exact = {name: value for report in reports.get(text, ()) for name, value in report.figures.items()}
        of_kernels = exact or figures(one.resources)
        moved = work_facts(one.reference) if one.reference is not None else {}
        sides = (
            ("fused", one.counts, one.fused_side, {"bytes.algorithmic": one.moved, **of_kernels}),
            ("reference", one.reference_counts, one.reference_side, moved),
        )
        for role, counts, side, more in sides:
            timed = {"latency": one.latency, "samples": one.samples} if role == "fused" else {}
            measured = {"measures": side.measures, "timeline": side.timeline, **timed}
            add(role, counts, {**more, **side.memory}, case=text, **measured)
            if side.backward is not None:
                add(f"{role} backward", side.backward, side.backward_memory, case=text)
        found.notes += [f"{text}: {note}" for note in (*one.notes, *_unknown(one))]
    return rows


def _unknown(one: Figures) -> list[str]:
    """The facts of an entry that are not known, and why."""
    counted = (
        ("launches of the kernel", one.counts),
        (f"launches{' and bytes' if one.reference is None else ''} of the reference", one.reference_counts),
        ("launches of the kernel's backward pass", one.fused_side.backward),
        ("launches of the reference's backward pass", one.reference_side.backward),
    )
    parts = [f"{what} not known: {counts.reason}" for what, counts in counted if isinstance(counts, Uncounted)]
    return [*parts, f"no latency: {one.untimed}"] if one.untimed else parts


# Sizes that are unequal and no multiples of tiles, and powers of two: kernels have a path for each.
_SIZES = ((33, 65, 17, 5), (64, 128, 16, 4))
_SEED = 0


def pinned(spec: FusionSpec) -> Iterator[Case]:
    """Contiguous cases of ordinary values in the first dtype of the spec, the same in every run."""
    plan = make_plan(spec, pools=searching.pools(spec, _SEED), limits=Limits())
    known: set[str] = set()
    for turn, sizes in enumerate(_SIZES):
        dims: dict[str, Any] = {f"dim {name}": sizes[i % len(sizes)] for i, name in enumerate(spec.dim_order)}
        dims |= {f"dim {name}": (sizes[0],) for name in spec.batch_names}
        dtype = {"dtype": spec.dtypes[0]} if spec.uses_case_dtype else {}
        try:
            case = build(plan, {**dims, **dtype}, counter_random.mix(_SEED, "golden", turn) >> 33).contiguous()
        except ImpossibleCase:
            continue
        if repr(case.sizes) not in known:
            known.add(repr(case.sizes))
            yield case


def goldens(
    spec: FusionSpec, extra: Mapping[str, Any], device: torch.device, programs: int
) -> list[tuple[str, tuple[GoldenOutput, ...] | str]]:
    """The outputs of each pinned case by its text, or why there are none; without outputs that may vary."""
    found: list[tuple[str, tuple[GoldenOutput, ...] | str]] = []
    for case in pinned(spec):
        text = "golden " + text_of({**case.sizes, "dtype": case.dtype})
        try:
            found.append((text, _outputs(Context(spec, device, extra, programs=programs), case)))
        except (ImpossibleCase, InputFailed, ReferenceFailed) as error:
            found.append((text, brief(error.__cause__ or error)))
    return found


def _outputs(context: Context, case: Case) -> tuple[GoldenOutput, ...] | str:
    spec = context.spec
    logical = make_inputs(spec, case, context.device)
    outcome, placed = call(context, case, logical, FILLS[0])
    if outcome.error is not None:
        return brief(outcome.error)
    ours = collect(outcome.result, placed.arguments, spec.mutates).tensors
    reference, _ = reference_of(context, case, logical)
    # There are no lanes if the spec has its own tolerance.
    allowed = dict(zip(ours, map(apart, reference.lanes), strict=False))
    return tuple(
        golden_of(name, one, allowed.get(name)) for name, one in ours.items() if not varies(spec.deterministic, name)
    )
