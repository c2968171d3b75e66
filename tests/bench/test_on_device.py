"""What a GPU's figures are made of, and the rows that they become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.baseline.model import Latency, Span
from pytest_fusion.bench import run
from pytest_fusion.bench.figures import Figures, Found, Side
from pytest_fusion.bench.on_device import busy, without
from pytest_fusion.bench.request import BenchRequest
from pytest_fusion.run.counting.model import Counts, Uncounted
from pytest_fusion.run.counting.profile import activities_of
from pytest_fusion.run.traffic import Traffic
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

GPU = {"lane": "cuda", "device": "cuda:0", "device_name": "made up", "capability": "9.0"}


def counts(*names: str, method: Any = "graph") -> Counts:
    return Counts(len(names), 0, 0, tuple((name, names.count(name)) for name in sorted(set(names))), method)


def test_busy_counts_overlapping_work_once() -> None:
    """Two streams at a time are one device at work."""
    spans = [Span("a", "kernel", 0.0, 2.0), Span("b", "kernel", 1.0, 3.0), Span("c", "memcpy", 6.0, 1.0)]
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


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: Found) -> run.Measured:
    monkeypatch.setattr(run, "_on_device", lambda *_, **__: found)
    spec = FusionSpec(
        name="f", fused=torch.relu, reference=torch.relu, inputs={"input": tensor("n")}, bench=[{"n": 8}, {"n": 16}]
    )
    return run.bench(spec, BenchRequest(folder=tmp_path), nodeid="t.py::test_f", environment=GPU, extra={})


def test_figures_become_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the fused call with its latency, of the reference, of their backward passes, of the whole sweep."""
    timeline = (Span("f", "kernel", 0.0, 1e-6),)
    latency = Latency(1e-6, 2e-6, -0.7, -0.71, -0.69, 0.005, (-0.7,) * 10)
    one = Figures(
        counts("f"),
        64,
        counts("r", "s"),
        Traffic(128, 2, 0),
        Side({"memory.peak": 512}, {"host_s": 1e-5}, timeline, counts("b")),
        Side({"memory.peak": 1024}, backward=Uncounted("no reason")),
        latency,
    )
    found = measured(monkeypatch, tmp_path, Found({}, [("n=8", one), ("n=16", "it raises")], again=[("n == 1", 2)]))

    rows = {(row.case, row.role): row for row in found.rows}
    assert set(rows) == {("n=8", "fused"), ("n=8", "reference"), ("n=8", "fused backward"), ("all entries", "fused")}
    fused = rows["n=8", "fused"]
    assert (fused.latency, fused.measures, fused.timeline) == (latency, {"host_s": 1e-5}, timeline)
    assert fused.facts["memory.peak"] == 512
    assert fused.device == "made up (sm_90)"
    assert rows["n=8", "reference"].facts["bytes.moved"] == 128
    assert rows["all entries", "fused"].facts == {"recompiles": 2}
    assert "n=16: not measured: it raises" in found.notes
    assert "n=8: launches of the reference's backward pass not known: no reason" in found.notes
    assert not found.complete


def test_a_wrong_result_at_full_size_has_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is told, and fails the test."""
    found = measured(monkeypatch, tmp_path, Found({}, [], ["n=8: values failed: too far off"]))
    assert (found.rows, found.wrong) == ([], ["n=8: values failed: too far off"])
