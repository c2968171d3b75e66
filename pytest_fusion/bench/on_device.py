"""Measurements of a case on a GPU: launches, resources, memory, latency, and the timeline of one call."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pytest_fusion.bench import latency as timing
from pytest_fusion.bench.baseline.latency_judge import Noise
from pytest_fusion.bench.baseline.row import Latency
from pytest_fusion.bench.entries import Entry
from pytest_fusion.bench.gate import gate
from pytest_fusion.bench.measured import Figures, Found, NotMeasuredError, Side
from pytest_fusion.bench.without_gpu import full_mask, traffic_of_reference
from pytest_fusion.case.containers import tensors_of
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.oracle.reference import takes
from pytest_fusion.run.measure.launches.count import count
from pytest_fusion.run.measure.launches.cupti import activities
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted, named
from pytest_fusion.run.measure.resources.kernel_resources import graded
from pytest_fusion.run.measure.resources.loaded_kernels import loaded
from pytest_fusion.run.measure.resources.specialisation import Specialisation, recompilations
from pytest_fusion.run.measure.resources.targets import Resources
from pytest_fusion.run.measure.timing.alone import alone
from pytest_fusion.run.measure.timing.graph_replay import replayed
from pytest_fusion.run.measure.timing.roofline import busy
from pytest_fusion.run.measure.traffic import algorithmic_bytes
from pytest_fusion.run.pristine import perf_counter, synchronize
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief, first_line, out_of_memory

# 512 MiB in and out pass every last-level cache many times; a product of 8192 cubed fills every multiprocessor.
_COPIED = 1 << 29
_SIDE = 8192
_CALLS, _SAMPLES = 4, 5


def ceilings(device: torch.device) -> dict[str, float]:
    """Rates of a copy and a bfloat16 product, as measures; some 30 ms on an H200. Empty without free memory."""
    try:
        source = torch.randint(1 << 30, (_COPIED // 4,), dtype=torch.int32, device=device)
        both = {"source": source, "target": torch.empty_like(source)}
        copied = min(_best_of(copy, both, device) for copy in COPIES)
        del source, both
        x = torch.zeros(_SIDE, _SIDE, dtype=torch.bfloat16, device=device).normal_()
        multiplied = _best_of(torch.mm, {"input": x, "mat2": x, "out": torch.empty_like(x)}, device)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return {}
    return {"copy_bytes_per_s": 2 * _COPIED / copied, "matmul_flops_per_s": 2 * _SIDE**3 / multiplied}


def _by_engine(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _by_kernel(source: torch.Tensor, target: torch.Tensor) -> None:
    torch.bitwise_not(source, out=target)


# The driver runs a copy node of a graph: 2.7 TB/s on an H200, where a kernel moved 4.2.
COPIES = (_by_engine, _by_kernel)


def _best_of(call: Any, arguments: dict[str, Any], device: torch.device) -> float:
    batch = replayed(call, [arguments] * _CALLS, device)
    return min(batch.seconds() for _ in range(_SAMPLES))


# A function and its launches.
_Call = tuple[Callable[..., Any], Counts | Uncounted]

# Launches queue up to about 1,000 before the host waits for the device.
_HOST_CALLS, _HOST_SAMPLES = 20, 5
_NO_ROOM = "the reference finds no memory at these sizes"


@dataclass(slots=True)
class Device:
    """A GPU: its identity in baselines, cache in bytes, ceilings and A/A noise; and what a session on it launched."""

    device: torch.device
    facts: dict[str, str]
    cache: int
    ceilings: Mapping[str, float] = field(default_factory=dict)
    noise: Noise | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    launches: list[Specialisation] = field(default_factory=list)


def measure_all(
    spec: FusionSpec, named: Sequence[Entry], here: Device, extra: Mapping[str, Any], note: Callable[[str], None]
) -> Found:
    """Measures every entry on ``here``, where this plugin times nothing else meanwhile; ``note`` gets the next."""
    torch.cuda.set_device(here.device)
    with alone(here.device):
        here.ceilings = ceilings(here.device)
    found = Found(here.facts)
    for entry in named:
        note(entry.text)
        try:
            gated = gate(spec, entry, extra, here.device)
            if gated.wrong:
                found.wrong.append(f"{entry.text}: {gated.wrong}")
                continue
            found.entries.append((entry.text, measure(spec, entry, extra, here, gated.notes)))
        except NotMeasuredError as error:
            found.entries.append((entry.text, str(error)))
        torch.cuda.empty_cache()
    found.noise, found.again = here.noise, recompilations(here.launches)
    return found


def opened(device: torch.device, environment: Mapping[str, Any] | None = None) -> Device:
    """The GPU as torch describes it."""
    about = torch.cuda.get_device_properties(device)
    facts = {"device_name": about.name, "capability": f"{about.major}.{about.minor}"}
    uuid = getattr(about, "uuid", None)
    if uuid is not None:
        facts["uuid"] = str(uuid)
    cache = int(getattr(about, "L2_cache_size", 0)) or 64 << 20
    return Device(device, facts, cache, environment={**(environment or {}), **facts})


def measure(
    spec: FusionSpec, entry: Entry, extra: Mapping[str, Any], here: Device, notes: Sequence[str] = ()
) -> Figures:
    """The figures of one judged entry, of the kernel alone if an unfused reference finds no memory (scores of
    attention). Raises ``NotMeasuredError`` if it cannot be made or called."""
    try:
        logical = make_inputs(spec, entry.case, here.device)
    except (ImpossibleCase, InputFailed, RuntimeError, MemoryError) as error:
        raise NotMeasuredError(f"the inputs cannot be made: {first_line(error)}") from error
    fused = partial(spec.fused, **extra)
    try:
        with torch.no_grad():
            fused(**logical)
            resources: list[Resources] = []
            with loaded(resources, here.launches):
                outputs = fused(**logical)
        arguments = {**extra, **full_mask(spec, entry.case.sizes, outputs)}
        reference = partial(spec.reference, **takes(spec.reference, arguments))
        counts = _counted(fused, logical, here.device)
        roomy = _fits(reference, logical)
        reference_counts = _counted(reference, logical, here.device) if roomy else Uncounted(_NO_ROOM)
        written = [logical[name] for name in spec.mutates]
        moved = algorithmic_bytes(logical.values(), [outputs, *written])
        traffic = traffic_of_reference(spec, logical, arguments)
        with alone(here.device):
            fused_side = _side(spec, fused, logical, here)
            reference_side = _side(spec, reference, logical, here) if roomy else Side()
            both = ((fused, counts), (reference, reference_counts))
            latency, samples, untimed = _timed(spec, both, logical, outputs, here) if roomy else (None, {}, _NO_ROOM)
    except Exception as error:
        raise NotMeasuredError(f"the call raises {brief(error)}") from error
    return Figures(
        counts,
        moved,
        reference_counts,
        traffic,
        fused_side=fused_side,
        reference_side=reference_side,
        latency=latency,
        samples=samples,
        untimed=untimed,
        resources=tuple(resources),
        notes=tuple(notes),
    )


def _fits(function: Callable[..., Any], logical: Mapping[str, Any]) -> bool:
    try:
        with torch.no_grad():
            function(**logical)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        torch.cuda.empty_cache()
        return False
    return True


def _counted(function: Callable[..., Any], logical: Mapping[str, Any], device: torch.device) -> Counts | Uncounted:
    with torch.no_grad():
        return count(lambda: function(**logical), dict(logical), device)


def _side(spec: FusionSpec, function: Callable[..., Any], logical: Mapping[str, Any], here: Device) -> Side:
    with torch.no_grad():
        memory = _memory(lambda: function(**logical), here.device)
        measures = {"host_s": _host_seconds(function, logical, here.device)}
        spent = activities(lambda: function(**logical), here.device)
    timeline = () if isinstance(spent, Uncounted) else tuple(spent)
    if timeline:
        measures |= {"span_s": max(one.start + one.seconds for one in timeline), "busy_s": busy(timeline)}
    measures |= here.ceilings
    backward: Counts | Uncounted | None
    try:
        backward, more = _backward(spec, function, logical, here.device) if spec.grad else (None, {})
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        torch.cuda.empty_cache()
        backward, more = Uncounted("there is no memory for it at these sizes"), {}
    return Side(memory, measures, timeline, backward, more)


def _memory(call: Callable[[], Any], device: torch.device) -> dict[str, int]:
    """The peak of bytes above the inputs, results included, and the bytes that remain when results are freed."""
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return {"memory.peak": peak, "memory.retained": max(0, torch.cuda.memory_allocated(device) - before)}


def _host_seconds(function: Callable[..., Any], logical: Mapping[str, Any], device: torch.device) -> float:
    """Seconds of one call from Python to its last launch: the best of some series, since other work only adds to it."""
    found = []
    for _ in range(_HOST_SAMPLES):
        synchronize(device)
        begun = perf_counter()
        for _ in range(_HOST_CALLS):
            function(**logical)
        found.append((perf_counter() - begun) / _HOST_CALLS)
    synchronize(device)
    return min(found)


def _backward(
    spec: FusionSpec, function: Callable[..., Any], logical: Mapping[str, Any], device: torch.device
) -> tuple[Counts | Uncounted, dict[str, int]]:
    """Launches of the backward pass: a call with it, less one without, as on one stream neither can be captured alone.
    And the memory of both passes: saved tensors, gradients, and all results, which a caller has until the end."""
    names = graded(spec)
    arguments = {
        name: value.detach().requires_grad_(name in names and value.is_floating_point())
        if isinstance(value, torch.Tensor)
        else value
        for name, value in logical.items()
    }
    wanted = [value for value in arguments.values() if isinstance(value, torch.Tensor) and value.requires_grad]
    given: list[torch.Tensor] = []

    def forward() -> Any:
        return function(**arguments)

    def both() -> tuple[Any, Any]:
        result = forward()
        ends = [t for t in tensors_of(result) if t.requires_grad]
        if not given:
            given.extend(torch.randn_like(end) for end in ends)
        return result, torch.autograd.grad(ends, wanted, given, allow_unused=True)

    with torch.enable_grad():
        # The first call makes the workspaces of the backward thread. Cycles of autograd are freed before measuring.
        both()
        gc.collect()
        memory = _memory(both, device)
        alone, together = count(forward, arguments, device), count(both, arguments, device)
    if isinstance(alone, Uncounted) or isinstance(together, Uncounted):
        return alone if isinstance(alone, Uncounted) else together, memory
    return without(together, alone), memory


def without(whole: Counts, part: Counts) -> Counts | Uncounted:
    """The launches of ``whole`` less those of ``part``; unknown for two methods, or if ``part`` has another kernel."""
    if whole.method != part.method:
        return Uncounted(f"with a backward pass the {whole.method} counted, without one the {part.method}")
    left = Counter(dict(whole.names))
    left.subtract(dict(part.names))
    if min(left.values(), default=0) < 0:
        return Uncounted("the forward pass launches other kernels where a backward pass follows")
    kernels, memcpy, memset = (a - b for a, b in zip(whole.totals, part.totals, strict=True))
    names = named(name for name, times in left.items() for _ in range(times))
    return Counts(kernels, memcpy, memset, names, whole.method, whole.agreed)


def _timed(
    spec: FusionSpec, both: tuple[_Call, _Call], logical: Mapping[str, Any], outputs: Any, here: Device
) -> tuple[Latency | None, dict[str, tuple[float, ...]], str]:
    """The latency beside that of the reference; the first call in a session measures the A/A noise."""
    try:
        with torch.no_grad():
            fused, reference = both
            control, cold = timing.timed(reference[0], logical, outputs, here.device, here.cache, reference[1])
            if here.noise is None:
                here.noise, _ = timing.against_itself(control)
            candidate, also = timing.timed(fused[0], logical, outputs, here.device, here.cache, fused[1])
        blocks = timing.compared(candidate, control)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return None, {}, "there is no memory for copies of its inputs and outputs"
    method = timing.replay_method(candidate, control, cold=cold and also)
    of, known = timing.digest(spec.reference), here.environment
    found = timing.latency(blocks, method, control=of, environment=known, machine=here.noise)
    return found, timing.samples(blocks), ""
