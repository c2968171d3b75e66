"""Latencies of two kernels in one process, with a GPU and its timers made up."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_fusion import paired_latency
from pytest_fusion.case.make import make_inputs
from pytest_fusion.run.timing.pairs import Blocks
from pytest_fusion.verdict.calls import Bench
from tests.canary.offline import kernels

SPEC = kernels.SPEC.with_(bench=[{"rows": 8, "hidden": 8}, {"rows": 16, "hidden": 8}])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the timer says of each kernel, by its name."""
    seconds: dict[str, float] = {}

    def timed(call: Any, *_: Any) -> tuple[float, bool]:
        return seconds[call.func.__name__], True

    def compared(candidate: float, control: float) -> Blocks:
        return Blocks(((candidate,) * 5,) * 10, ((control,) * 5,) * 10, True, True)

    monkeypatch.setattr(paired_latency, "opened", lambda device: SimpleNamespace(cache=1))
    monkeypatch.setattr(paired_latency, "alone", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(paired_latency, "count", lambda call, given, device: call())
    monkeypatch.setattr(
        paired_latency, "make_inputs", lambda spec, case, device: make_inputs(spec, case, torch.device("cpu"))
    )
    monkeypatch.setattr(paired_latency.latency, "timed", timed)
    monkeypatch.setattr(paired_latency.latency, "compared", compared)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return seconds


def timings(candidate: Any, incumbent: Any, spec: Any = SPEC) -> Any:
    bench = Bench(spec, torch.device("cuda:0"))
    return paired_latency.timings(spec.with_(fused=candidate), spec.with_(fused=incumbent), bench)


def test_every_size_has_its_ratio(device: dict[str, float]) -> None:
    """The candidate's seconds over the incumbent's, as a logarithm, at each size of ``bench=``."""
    device.update(right=2e-6, another=1e-6)
    found, problem = timings(kernels.right, kernels.another)
    assert problem == ""
    assert [one.text for one in found] == ["rows=8 hidden=8 float32", "rows=16 hidden=8 float32"]
    assert [(one.ratio, one.candidate_s, one.incumbent_s) for one in found] == [
        (pytest.approx(0.6931, abs=1e-4), 2e-6, 1e-6)
    ] * 2


def test_a_size_that_one_cannot_bear_leaves_no_number(device: dict[str, float]) -> None:
    """A worst size among those that happened to work would be no worst size."""
    device.update(right=2e-6, refuses_long=1e-6)
    found, problem = timings(kernels.right, kernels.refuses_long)
    assert found == []
    assert problem.startswith("rows=16 hidden=8 float32: NotImplementedError")


def test_without_sizes_there_is_no_latency() -> None:
    """Fuzzed sizes are nobody's traffic, and that is said."""
    found, problem = timings(kernels.right, kernels.another, kernels.SPEC)
    assert (found, "no bench=" in problem) == ([], True)
