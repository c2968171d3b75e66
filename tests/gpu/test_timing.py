"""What is timed on a GPU is all of the work, and memory that a batch reads stays its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion.bench.latency import timed
from pytest_fusion.bench.on_device import opened
from pytest_fusion.run.measure.launches.count import count
from pytest_fusion.run.measure.launches.launch_count import Uncounted
from pytest_fusion.run.measure.timing.graph_replay import Replayed, replayed

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
_CYCLES = 1 << 20


def spin(x: torch.Tensor) -> torch.Tensor:
    """Some half a millisecond of work whose length no cache changes."""
    torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
    return x + 1


def batch(call: Callable[..., Any], plain: str = "") -> Replayed:
    return replayed(call, [{"x": torch.ones(64, device=DEVICE)} for _ in range(10)], DEVICE, plain=plain)


def test_a_batch_keeps_what_it_reads() -> None:
    """The next capture empties torch's cache, and nobody else has the batch's inputs and outputs."""
    x = torch.randn(1 << 22, device=DEVICE)
    here = opened(DEVICE)
    found, _ = timed(torch.relu, {"input": x}, torch.relu(x), DEVICE, here.cache)
    del x
    others = [batch(spin) for _ in range(2)]
    assert found.timer == "graph"
    assert found.seconds() > 0
    assert all(other.seconds() > 0 for other in others)


def test_work_on_a_stream_of_its_own_is_timed_too() -> None:
    """No graph has it, which the profiler tells; events on this stream would not see it either."""
    own = torch.cuda.Stream(DEVICE)

    def aside(x: torch.Tensor, work: Callable[[torch.Tensor], torch.Tensor] = spin) -> torch.Tensor:
        with torch.cuda.stream(own):
            return work(x)

    # Without `_sleep`, whose kernels the profiler takes for its own, and without memory, which no capture may ask for.
    x, out = torch.ones(2, 64, device=DEVICE).unbind()
    counts = count(lambda: aside(x, lambda x: torch.add(x, 1, out=out)), [x], DEVICE)
    assert isinstance(counts, Uncounted), counts
    honest, hidden = batch(spin), batch(aside, plain=counts.reason)
    assert (honest.timer, hidden.timer) == ("graph", "events")
    assert min(hidden.seconds() for _ in range(3)) > 0.5 * min(honest.seconds() for _ in range(3))


def test_a_patched_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events and clocks are those from before any kernel was imported."""
    found = batch(spin)
    right = found.seconds()
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda *_: 1e-9)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    assert found.seconds() > 0.5 * right


def test_a_call_that_waits_is_timed_by_events() -> None:
    """It cannot be captured; the record says why."""
    found = batch(lambda x: x * float(x.sum().item()))
    assert (found.timer, found.calls) == ("events", 10)
    assert found.why
    assert found.seconds() > 0
