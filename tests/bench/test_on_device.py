"""What a GPU's figures are made of, and the rows that they become."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.bench import bench_run, on_device
from pytest_fusion.bench.baseline.row import Latency
from pytest_fusion.bench.bench_request import BenchRequest
from pytest_fusion.bench.entries import entries
from pytest_fusion.bench.gate import Gated
from pytest_fusion.bench.measured import Figures, Found, Side
from pytest_fusion.bench.on_device import without
from pytest_fusion.run.measure.launches.cupti import activities_of
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted
from pytest_fusion.run.measure.timing import pairs
from pytest_fusion.run.measure.timing.roofline import Activity, busy
from pytest_fusion.run.measure.traffic import Traffic
from pytest_fusion.spec import values
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

GPU = {"lane": "cuda", "device": "cuda:0", "device_name": "made up", "capability": "9.0"}


def counts(*names: str, method: Any = "graph") -> Counts:
    return Counts(len(names), 0, 0, tuple((name, names.count(name)) for name in sorted(set(names))), method)


def test_busy_counts_overlapping_work_once() -> None:
    """Two streams at a time are one device at work."""
    spans = [Activity("a", "kernel", 0.0, 2.0), Activity("b", "kernel", 1.0, 3.0), Activity("c", "memcpy", 6.0, 1.0)]
    assert busy(spans) == 5.0
    assert busy([]) == 0.0


def test_what_a_backward_pass_launches_is_the_difference() -> None:
    """By name; no number where two methods counted, or the forward pass is another one with gradients."""
    found = without(counts("f", "b", "b"), counts("f"))
    assert isinstance(found, Counts)
    assert (found.kernels, dict(found.names)) == (2, {"b": 2})
    assert isinstance(without(counts("f", "b"), counts("f", method="profiler")), Uncounted)
    assert isinstance(without(counts("g", "b"), counts("f")), Uncounted)


def test_a_trace_in_microseconds_is_told_in_seconds() -> None:
    """From the start of the first activity."""
    events = [
        {"cat": "kernel", "name": "void k<int>(int)", "ts": 100.0, "dur": 5.0},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 110.0, "dur": 1.0},
    ]
    first, second = activities_of(events)
    assert (first.name, first.kind, first.start) == ("k<int>", "kernel", 0.0)
    assert (second.kind, round(second.start, 9), round(second.seconds, 9)) == ("memcpy", 1e-5, 1e-6)


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: Found) -> bench_run.Measured:
    monkeypatch.setattr(bench_run, "_session", lambda *_, **__: found)
    spec = FusionSpec(
        name="f", fused=torch.relu, reference=torch.relu, inputs={"input": tensor("n")}, bench=[{"n": 8}, {"n": 16}]
    )
    return bench_run.bench(spec, BenchRequest(folder=tmp_path), nodeid="t.py::test_f", environment=GPU, extra={})


def test_figures_become_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the fused call with its latency, of the reference, of their backward passes, of the whole sweep."""
    timeline = (Activity("f", "kernel", 0.0, 1e-6),)
    latency = Latency(1e-6, 2e-6, -0.7, -0.71, -0.69, 0.005, (-0.7,) * 10)
    one = Figures(
        counts("f"),
        64,
        counts("r", "s"),
        Traffic(128, 2, 0),
        Side({"memory.peak": 512}, {"host_s": 1e-5}, timeline, counts("b"), {"memory.peak": 768}),
        Side({"memory.peak": 1024}, backward=Uncounted("no reason"), backward_memory={"memory.peak": 2048}),
        latency,
    )
    found = measured(monkeypatch, tmp_path, Found({}, [("n=8", one), ("n=16", "it raises")], again=[("n == 1", 2)]))

    rows = {(row.case, row.role): row for row in found.rows}
    roles = ("fused", "reference", "fused backward", "reference backward")
    assert set(rows) == {*(("n=8", role) for role in roles), ("all entries", "fused")}
    assert rows["n=8", "fused backward"].facts["memory.peak"] == 768
    assert rows["n=8", "fused backward"].facts["launches.kernels"] == 1
    assert rows["n=8", "reference backward"].facts == {"memory.peak": 2048}
    fused = rows["n=8", "fused"]
    assert (fused.latency, fused.measures, fused.timeline) == (latency, {"host_s": 1e-5}, timeline)
    assert fused.facts["memory.peak"] == 512
    assert fused.device == "made up (sm_90)"
    assert rows["n=8", "reference"].facts["bytes.moved"] == 128
    assert rows["all entries", "fused"].facts == {"recompiles": 2}
    assert sum(rows["all entries", "fused"].reasons.values()) == 2
    assert "n=16: not measured: it raises" in found.notes
    assert "n=8: launches of the reference's backward pass not known: no reason" in found.notes
    assert not found.complete


def test_a_wrong_result_at_full_size_has_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is told, and fails the test."""
    found = measured(monkeypatch, tmp_path, Found({}, [], ["n=8: values failed: too far off"]))
    assert (found.rows, found.wrong) == ([], ["n=8: values failed: too far off"])


class Ticks:
    """Stands for a batch of calls; each takes the same made-up time."""

    timer, calls, why = "graph", 1, ""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that computes on the CPU, and whose calls take 1 us where they are fused and 4 us where they are not."""
    seen: dict[str, Any] = {"counts": [], "notes": []}
    clock = iter(range(10**9))

    def timed(call: Any, logical: Any, outputs: Any, device: Any, cache: int, counts: Any) -> tuple[Ticks, bool]:
        seen["counts"].append(counts)
        return Ticks(1e-6 if call.func is torch.relu else 4e-6), True

    monkeypatch.setattr(on_device, "ceilings", lambda _: {"copy_bytes_per_s": 2e12, "matmul_flops_per_s": 5e14})
    monkeypatch.setattr(on_device, "synchronize", lambda _: None)
    monkeypatch.setattr(on_device, "activities", lambda *_: [Activity("k", "kernel", 0.0, 1e-6)])
    monkeypatch.setattr(on_device.timing, "timed", timed)
    monkeypatch.setattr(pairs, "perf_counter", lambda: next(clock) * 1e-3)
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 512)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 2048)
    return seen


def made_up_device() -> on_device.Device:
    facts = {"device_name": "made up"}
    return on_device.Device(torch.device("cpu"), facts, 1, environment={**GPU, **facts})


def relu_reference(input: torch.Tensor) -> torch.Tensor:
    return input * (input > 0)


def session(fused: Any, notes: list[str]) -> Found:
    spec = FusionSpec(
        name="f",
        fused=fused,
        reference=relu_reference,
        inputs={"input": tensor("n", values=values.finite())},
        grad=True,
        bench=[{"n": 100, "dtype": torch.float32}, {"n": 300, "dtype": torch.float32}],
    )
    return on_device.measure_all(spec, entries(spec), made_up_device(), {}, notes.append)


def test_a_session_measures_every_entry(made_up: dict[str, Any]) -> None:
    """Launches forward and backward, memory, latency beside the reference, ceilings; batches know their launches."""
    notes: list[str] = []
    found = session(torch.relu, notes)

    assert notes == ["n=100 float32", "n=300 float32"]
    assert not found.wrong
    assert [text for text, _ in found.entries] == notes
    for _, one in found.entries:
        assert isinstance(one, Figures)
        assert isinstance(one.counts, Counts)
        assert isinstance(one.fused_side.backward, Counts)
        assert (one.counts.kernels, one.fused_side.backward.kernels) == (1, 1)
        assert dict(one.fused_side.memory) == {"memory.peak": 1536, "memory.retained": 0}
        assert dict(one.reference_side.backward_memory) == {"memory.peak": 1536, "memory.retained": 0}
        assert one.fused_side.measures["copy_bytes_per_s"] == 2e12
        assert one.latency is not None
        assert one.latency.ratio == pytest.approx(-1.386294, abs=1e-5)
        assert one.latency.aa == 0.0
    assert len(made_up["counts"]) == 4
    assert all(isinstance(counts, Counts) for counts in made_up["counts"])


@pytest.mark.slow
def test_what_is_wrong_at_its_size_has_no_number(made_up: dict[str, Any]) -> None:
    """The entry that is right is measured."""

    def fused(input: torch.Tensor) -> torch.Tensor:
        return torch.relu(input) * (1 if len(input) < 200 else 1.01)

    found = session(fused, [])

    assert [text for text, _ in found.entries] == ["n=100 float32"]
    assert len(found.wrong) == 1
    assert found.wrong[0].startswith("n=300 float32: values failed")


@pytest.mark.slow
def test_an_entry_that_raises_says_so(made_up: dict[str, Any]) -> None:
    """Raised by the first call or by any later one."""

    def picky(input: torch.Tensor) -> torch.Tensor:
        if len(input) > 200 and not torch.is_grad_enabled():
            raise ValueError("not without gradients")
        return torch.relu(input)

    (_, right), (_, why) = session(picky, []).entries
    assert isinstance(right, Figures)
    assert why == "the call raises ValueError: not without gradients"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_reference_without_memory_costs_its_own_figures(
    made_up: dict[str, Any], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Scores of attention: what is fused is measured alone, with the reason beside it."""

    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "forward" and len(x) > 200:
                raise torch.OutOfMemoryError("made up")
            return x.relu()

        @staticmethod
        def backward(_ctx: Any, *_gradients: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("made up")

    def greedy(input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Greedy.apply(input)
        return result

    monkeypatch.setattr(on_device, "gate", lambda *_: Gated())
    spec = FusionSpec(
        name="f",
        fused=torch.relu,
        reference=greedy,
        inputs={"input": tensor("n", values=values.finite())},
        grad=True,
        bench=[{"n": 300, "dtype": torch.float32}],
    )
    ((_, one),) = on_device.measure_all(spec, entries(spec), made_up_device(), {}, lambda _: None).entries
    assert isinstance(one, Figures)
    assert isinstance(one.counts, Counts)
    assert isinstance(one.fused_side.backward, Counts)
    if where == "forward":
        assert (one.reference_counts, one.latency) == (Uncounted("the reference finds no memory at these sizes"), None)
        assert one.untimed == "the reference finds no memory at these sizes"
    else:
        assert isinstance(one.reference_counts, Counts)
        assert one.latency is not None
        assert one.reference_side.backward == Uncounted("there is no memory for it at these sizes")


def test_memory_with_a_backward_pass_holds_results_and_gradients(
    made_up: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured behind one call that warms up, while all that a caller gets is alive; the upstream is no part of it."""
    alive: list[tuple[int, int]] = []
    results: list[Any] = []

    def fused(input: torch.Tensor) -> torch.Tensor:
        results.append(result := torch.relu(input))
        return result

    def peak(*_: Any) -> int:
        alive.append((len(results), sys.getrefcount(results[-1])))
        return 2048

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    spec = FusionSpec(name="f", fused=fused, reference=fused, inputs={"input": tensor("n")}, grad=True)
    logical = {"input": torch.ones(8)}

    counted, memory = on_device._backward(spec, fused, logical, torch.device("cpu"))
    assert memory == {"memory.peak": 1536, "memory.retained": 0}
    assert isinstance(counted, Counts)
    (calls, references) = alive[0]
    # One reference is the list's and one the counter's own; the third is the result that is measured.
    assert (calls, references >= 3) == (2, True)
