"""Costs of a fused call beside its reference, on the caller's own arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pytest_fusion import interpreter
from pytest_fusion.bench import counters
from pytest_fusion.bench.baseline.latency_judge import Noise
from pytest_fusion.bench.baseline.row import Latency
from pytest_fusion.bench.bench_request import BenchRequest
from pytest_fusion.bench.bench_run import rows_of
from pytest_fusion.bench.latency import against_itself, compared, latency, replay_method, samples, timed
from pytest_fusion.bench.measured import Figures, Measured, beside_baseline, common
from pytest_fusion.bench.on_device import opened
from pytest_fusion.case.containers import map_tensors, tensors_of
from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.run import pristine
from pytest_fusion.run.bits import as_bytes
from pytest_fusion.run.compiled import observe_compiled
from pytest_fusion.run.fused import bare
from pytest_fusion.run.measure.launches.count import count
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted
from pytest_fusion.run.measure.timing.alone import alone
from pytest_fusion.run.measure.timing.graph_replay import twin
from pytest_fusion.run.measure.timing.pairs import FEWEST_BLOCKS, PAIRS, Blocks, host_timed
from pytest_fusion.run.measure.traffic import Traffic, algorithmic_bytes, traffic_of
from pytest_fusion.spec.wording import brief

_INTERPRETED = "an interpreted kernel has no latency worth a number"
# Prefixes of Inductor's kernels, for a GPU and for the CPU; their bytes pass no operator of torch.
_INDUCTOR = ("triton_", "cpp_")
_UNSEEN = "it launches kernels whose bytes no operator of torch shows"
# The placement of memory and threads changes the ratio by several per cent between processes, which no A/A run within
# one process shows. A ratio of host times is stored and reported, and fails nothing.
_ON_CPU = Noise(0.0, "times of a CPU differ from process to process by more than one process can show")
# Seconds for the fewest pairs that give an interval, on a CPU.
_MOST_S = 10.0
# The A/A noise of each GPU, measured once in a process.
_noise: dict[str, Noise] = {}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two functions that take the caller's ``inputs`` (a copy may have other strides) by keyword and write none."""

    fused: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Mapping[str, Any]
    device: torch.device
    control: str


@dataclass(frozen=True, slots=True)
class _Counted:
    """One side: its launches, the kernels of Triton that were seen, and what a call returned."""

    counts: Counts | Uncounted
    launched: Sequence[Launch]
    result: Any


def measure(pair: Pair, request: BenchRequest, *, nodeid: str, case: str, environment: Mapping[str, Any]) -> Measured:
    """Launches, bytes and latency of both calls beside their baselines, or notes. Raises ``BaselineError``."""
    found = Measured()
    try:
        with torch.no_grad():
            ours, theirs = _counted(pair.fused, pair), _counted(pair.reference, pair)
            work = _traffic(theirs, pair)
    except Exception as error:  # noqa: BLE001 - a call that passes its checks may raise while it is counted
        found.notes.append(f"{case}: not measured: the call raises {brief(error)} while it is counted")
        return found
    notes = [f"launches of the kernel: {doubt}" for doubt in getattr(ours.counts, "doubts", ())]
    notes += [f"bytes of the reference not known: {work}"] if isinstance(work, str) else []
    moved = algorithmic_bytes(pair.inputs.values(), ours.result)
    traffic = None if isinstance(work, str) else work
    figures = Figures(ours.counts, moved, theirs.counts, traffic, notes=tuple(notes))
    machine: Noise | None = None
    try:
        timing, raw, machine = _timed(pair, ours, theirs, environment)
        figures = replace(figures, latency=timing, samples=raw)
    except _NoLatencyError as why:
        figures = replace(figures, untimed=str(why))
    found.rows = rows_of([(case, figures)], {}, found, common(nodeid, environment))
    found.counters = counters.counted(request.counters, {case: ours.counts}, on_gpu=pair.device.type == "cuda")
    found.notes += counters.notes(found.counters)
    return beside_baseline(found, request, nodeid, environment, machine)


def remembers(pair: Pair) -> bool:
    """Whether the fused call returns an earlier result after operators wrote other values into its inputs, so that a
    cache with tensor versions in its key is right. False if no input is floating point of 16 bits or more, if the
    result does not depend on the values, or if the call raises."""
    inputs = {name: map_tensors(value, twin) for name, value in pair.inputs.items()}

    def call() -> list[torch.Tensor]:
        result = tensors_of(pair.fused(**inputs))
        return [t.detach().clone() for t in result]

    try:
        with bare(), torch.no_grad():
            before = call()
            for t in tensors_of(inputs):
                if t.is_floating_point() and t.element_size() > 1:
                    t.mul_(0.75).add_(0.125)
            if not _same(before, call()):
                return False
            inputs = {name: map_tensors(value, twin) for name, value in inputs.items()}
            return not _same(before, call())
    except Exception:  # noqa: BLE001 - a kernel may refuse values, and on the caller's own it was judged
        return False


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are bitwise equal, as results of a cache are."""
    return [t.shape for t in one] == [t.shape for t in other] and all(
        map(pristine.equal, map(as_bytes, one), map(as_bytes, other))
    )


def case_text(inputs: Mapping[str, Any]) -> str:
    """``"512x1000 float32, 1000 float32"``: shape and dtype of each tensor among the inputs, in order."""
    tensors = tensors_of(inputs)
    words = [f"{'x'.join(map(str, t.shape)) or 'scalar'} {str(t.dtype).removeprefix('torch.')}" for t in tensors]
    return ", ".join(words) or "no tensors"


def _counted(function: Callable[..., Any], pair: Pair) -> _Counted:
    launched: list[Launch] = []

    def call() -> Any:
        return function(**pair.inputs)

    with bare():
        result = call()
    with interpreter.observe(launched.append), observe_compiled(launched.append):
        counts = count(call, list(pair.inputs.values()), pair.device)
    return _Counted(counts, launched, result)


def _traffic(theirs: _Counted, pair: Pair) -> Traffic | str:
    """The bytes that the reference moves, or why they are not known."""
    names = theirs.counts.names if isinstance(theirs.counts, Counts) else ()
    if theirs.launched or any(name.startswith(_INDUCTOR) for name, _ in names):
        return _UNSEEN
    return traffic_of(lambda: pair.reference(**pair.inputs))


class _NoLatencyError(Exception):
    """The message says why the calls have no latency."""


def _timed(
    pair: Pair, ours: _Counted, theirs: _Counted, environment: Mapping[str, Any]
) -> tuple[Latency, dict[str, tuple[float, ...]], Noise]:
    """The latency, the seconds of each sample by role, and the noise that it is judged with."""
    if pair.device.type == "cpu" and (ours.launched or theirs.launched):
        raise _NoLatencyError(_INTERPRETED)
    if pair.device.type not in ("cpu", "cuda"):
        raise _NoLatencyError(f"nothing here times a device of type {pair.device.type}")
    try:
        with torch.no_grad():
            if pair.device.type == "cpu":
                (blocks, method), machine = _on_cpu(pair), _ON_CPU
            else:
                blocks, method, machine = _on_gpu(pair, ours, theirs)
    except _NoLatencyError:
        raise
    except Exception as error:
        raise _NoLatencyError(f"the call raises {brief(error)} while it is timed") from error
    spread = machine if pair.device.type == "cuda" else None
    found = latency(blocks, method, control=pair.control, environment=environment, machine=spread)
    return found, samples(blocks), machine


def _on_cpu(pair: Pair) -> tuple[Blocks, dict[str, str]]:
    """Pairs of calls, and how they were timed: on the same inputs each time, so that caches are warm."""
    candidate, control = (host_timed(partial(call, **pair.inputs)) for call in (pair.fused, pair.reference))
    seconds = candidate.seconds() * candidate.calls + control.seconds() * control.calls
    if seconds * FEWEST_BLOCKS * PAIRS > _MOST_S:
        raise _NoLatencyError(
            f"both calls take {seconds:.2g} s, and {FEWEST_BLOCKS * PAIRS} pairs are needed for an interval; use "
            "smaller arguments"
        )
    blocks = compared(candidate, control)
    return blocks, {"timer": candidate.timer, "cache": "warm", "threads": str(torch.get_num_threads())}


def _on_gpu(pair: Pair, ours: _Counted, theirs: _Counted) -> tuple[Blocks, dict[str, str], Noise]:
    here = opened(pair.device)
    with alone(here.device):
        control, cold = timed(pair.reference, pair.inputs, theirs.result, pair.device, here.cache, theirs.counts)
        if str(pair.device) not in _noise:
            _noise[str(pair.device)] = against_itself(control)[0]
        candidate, also_cold = timed(pair.fused, pair.inputs, ours.result, pair.device, here.cache, ours.counts)
        blocks = compared(candidate, control)
    return blocks, replay_method(candidate, control, cold=cold and also_cold), _noise[str(pair.device)]
