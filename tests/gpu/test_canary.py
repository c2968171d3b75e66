"""The canary on a device: nothing waits for it, and captured calls are not decided one by one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pytest_fusion import canary
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
