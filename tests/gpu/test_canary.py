"""The canary on a device: nothing waits for it, and captured calls are not decided one by one."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pytest_fusion import FusionSpec, canary, tensor
from pytest_fusion.canary import Policy
from pytest_fusion.errors import CanaryError

pytestmark = pytest.mark.gpu


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # setting the mode itself warns that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("state", ["shadow", "full"])
@pytest.mark.parametrize("wrong", [False, True])
def test_no_call_waits_for_the_device(state: str, wrong: bool) -> None:
    """Shadowed, routed and verified calls, of equal and of wrong candidates, synchronise nothing."""
    kernel = canary(
        "k",
        incumbent=lambda x: x * 2,
        candidate=lambda x: x * (3 if wrong else 2),
        policy=Policy(state=state, shadow=1.0, verify=1.0, interval_s=3600),
    )
    x = torch.randn(64, 100, device="cuda", dtype=torch.float16)[:, ::2]
    with _waiting_is_an_error():
        results = [kernel(x) for _ in range(5)]
    torch.cuda.synchronize()
    kernel.refresh()

    assert torch.equal(results[0], x * 2)
    assert kernel.state == ("tripped" if wrong else state)
    assert not any(name.startswith("skipped") for name in kernel.status()["counts"])


def test_the_devices_generator_goes_on_as_with_the_incumbent() -> None:
    """The candidate draws what the incumbent drew, and what is drawn next is what the incumbent alone leaves."""
    kernel = canary(
        "k",
        incumbent=lambda x: torch.nn.functional.dropout(x, 0.5),
        candidate=lambda x: torch.nn.functional.dropout(x, 0.5) + 0 * torch.rand_like(x),
        policy=Policy(shadow=1.0, interval_s=3600),
    )
    x = torch.ones(1000, device="cuda")
    torch.cuda.manual_seed(5)
    ours = kernel(x), torch.rand(3, device="cuda")
    torch.cuda.manual_seed(5)
    alone = torch.nn.functional.dropout(x, 0.5), torch.rand(3, device="cuda")
    kernel.refresh()

    assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
    assert kernel.state == "shadow"


def test_capture_is_refused_by_call_and_possible_for_each_kernel() -> None:
    """Routing by call raises while a graph is captured; ``only`` captures both, ``shadow`` the incumbent."""
    kernel = canary(
        "k",
        incumbent=lambda x: x * 2,
        candidate=lambda x: x + x + 1,
        policy=Policy(state="route", share=0.5, interval_s=3600),
    )
    x = torch.ones(8, device="cuda")
    graphs = {}
    for arm in ("incumbent", "candidate"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), kernel.only(arm):
            out = kernel(x)
        graph.replay()
        graphs[arm] = float(out[0])
    assert graphs == {"incumbent": 2.0, "candidate": 3.0}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph is empty, since nothing was launched before it was refused
        with pytest.raises(CanaryError, match="by='process'"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            kernel(x)


def _captured_while(asked: Callable[[], object]) -> float:
    """What a graph adds that this thread captures, in torch's default mode, while another thread goes on asking."""
    x, graph, stop = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph(), threading.Event()
    troubles: list[BaseException] = []

    def ask() -> None:
        while not stop.is_set():
            try:
                asked()
            except RuntimeError as error:
                troubles.append(error)
                return

    thread = threading.Thread(target=ask)
    try:
        with torch.cuda.graph(graph):
            thread.start()
            for _ in range(200):
                x += 1
                time.sleep(0.001)
    finally:
        stop.set()
        thread.join()
    assert not troubles
    x.zero_()
    graph.replay()
    return float(x[0])


def test_a_capture_of_another_thread_goes_on() -> None:
    """Copies, the candidate, pinned memory and comparisons do not end a graph that another thread captures."""
    x = torch.ones(64, device="cuda")
    # A capture begins with an empty cache, and memory that another thread asks the driver for ends it: what the
    # incumbent allocates, its caller had to answer for before there was a canary.
    doubled = torch.empty_like(x)
    kernel = canary(
        "k",
        incumbent=lambda x: torch.mul(x, 2, out=doubled),
        candidate=lambda x: x + x,
        policy=Policy(shadow=1.0, timed=1.0, gpu_share=1.0, interval_s=0.01),
    )
    side = torch.cuda.Stream()

    def serve() -> None:
        with torch.cuda.stream(side):
            kernel(x)
        kernel.refresh()

    for _ in range(50):  # the allocator and lazily loaded kernels are the process's own, and no capture bears them
        serve()
    torch.cuda.synchronize()
    assert _captured_while(serve) == 200.0
    assert kernel.state == "shadow"
    assert kernel.status()["counts"]["compared: ok"] > 3
    kernel.close()


@pytest.mark.parametrize("writes", [None, ()])
def test_no_call_waits_where_both_kernels_are_timed(writes: tuple[str, ...] | None) -> None:
    """Timing, the incumbent beside itself and the reference: nothing synchronises in a call, and all of it arrives."""
    spec = FusionSpec(fused=_twice, reference=_twice, inputs={"x": tensor("rows n")})
    kernel = canary(
        "k",
        incumbent=_twice,
        candidate=lambda x: x + x,
        policy=Policy(shadow=1.0, timed=1.0, gpu_share=1.0, interval_s=3600, writes=writes),
        spec=spec,
    )
    x = torch.randn(64, 100, device="cuda", dtype=torch.float16)
    kernel(x)
    for _ in range(10):
        with _waiting_is_an_error():
            for _ in range(20):
                kernel(x)
        torch.cuda.synchronize()
        kernel.refresh()

    evidence = kernel.evidence()
    assert kernel.state == "shadow"
    assert {name for name in kernel.status()["counts"] if not name.endswith(": ok")} == set()
    assert evidence.pooled("latency_ratio").seen >= 4
    assert evidence.pooled("latency_ratio").broken == 0
    assert evidence.pooled("latency_ratio", "itself").seen >= 1
    assert evidence.pooled("violation", "itself").counts.keys() == {0}
    assert evidence.pooled("error_ratio").seen >= 1


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_what_a_gpu_spends_on_looking_is_counted() -> None:
    """The time between the start of the candidate and the end of the comparison, summed over the calls."""
    blocks: list[Mapping[str, Any]] = []
    kernel = canary(
        "k",
        incumbent=_twice,
        candidate=lambda x: x + x,
        policy=Policy(shadow=1.0, interval_s=3600),
        publishers=[blocks.append],
    )
    x = torch.randn(1 << 20, device="cuda")
    for _ in range(10):
        kernel(x)
    torch.cuda.synchronize()
    kernel.refresh()

    assert sum(block["gpu_s"] for block in blocks if block["event"] == "block") > 0


def test_a_gpu_that_has_no_time_left_is_not_asked_for_more() -> None:
    """What was spent beyond the share shuts the shadow; callers get their results, and the calls are counted."""
    kernel = canary(
        "k",
        incumbent=_twice,
        candidate=lambda x: x + x,
        policy=Policy(shadow=1.0, gpu_share=1e-9, interval_s=3600),
    )
    x = torch.randn(1 << 20, device="cuda")
    kernel(x)
    torch.cuda.synchronize()
    kernel.refresh()
    for _ in range(5):
        assert torch.equal(kernel(x), x * 2)
    kernel.refresh()

    assert kernel.status()["counts"] == {"compared: ok": 1, "skipped: over its share of GPU time": 5}
    assert sum(kernel.evidence().calls.values()) == 6
