"""Recording on a device: nothing waits for it, captured calls are left alone, alignment comes back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pytest_fusion import FusionSpec, canary, tensor
from pytest_fusion.canary import Policy
from pytest_fusion.canary.recording import recordings
from pytest_fusion.case.make import make_inputs
from pytest_fusion.run.placing import place

pytestmark = pytest.mark.gpu


def kernel(x: Tensor, y: Tensor) -> Tensor:
    return x * y


SPEC = FusionSpec(fused=kernel, reference=kernel, inputs={"x": tensor("*b n"), "y": tensor("n")}, name="k")


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


@pytest.mark.parametrize("tensors", [False, True])
def test_no_call_waits_for_the_device(tmp_path: Path, tensors: bool) -> None:
    """Looking at calls, and copying them to the host where asked for, synchronises nothing; the numbers come later."""
    if tensors:
        pytest.importorskip("safetensors")
    recorder = canary.record("k", kernel, tmp_path, tensors=tensors, interval_s=3600)
    x = torch.arange(6400.0, device="cuda").half().reshape(64, 100)[:, ::2]
    large = torch.ones(2048, 2048, device="cuda", dtype=torch.int64)
    with _waiting_is_an_error():
        for _ in range(5):
            recorder(x, x[0])
            recorder(large, large[0])
    torch.cuda.synchronize()
    recorder.close()

    assert recorder.status()["skipped"] == {}
    found = recordings.cases(tmp_path, SPEC)
    assert found.total == 10
    assert sum(weight for _, weight in found) == 5
    case = found.found[0].case
    made = make_inputs(SPEC, case, torch.device("cuda"))["x"]
    assert (float(made.min()), float(made.max())) == (0.0, float(x.max()))
    assert torch.equal(made, x) is tensors


def test_a_captured_call_is_the_function_alone(tmp_path: Path) -> None:
    """Under capture nothing is added to the graph and nothing counted; replays give what the function gives."""
    recorder = canary.record("k", kernel, tmp_path, interval_s=3600)
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = recorder(x, x)
    x.fill_(3.0)
    graph.replay()

    assert torch.equal(out, torch.full_like(x, 9.0))
    assert recorder.status()["calls"] == {}
    assert recorder.status()["skipped"] == {}


@pytest.mark.parametrize("start", [0, 1, 8, 256, 300])
def test_alignment_comes_back(tmp_path: Path, start: int) -> None:
    """A tensor replays at an address that is aligned as the recorded one: what Triton compiles for it is the same."""
    recorder = canary.record("k", kernel, tmp_path, interval_s=3600)
    x = torch.randn(4000, device="cuda", dtype=torch.float16)[start : start + 640].view(10, 64)
    recorder(x, torch.ones(64, device="cuda", dtype=torch.float16))
    recorder.close()

    (one,) = recordings.cases(tmp_path, SPEC).found
    device = torch.device("cuda")
    placed = place(make_inputs(SPEC, one.case, device), one.case, device, "nan").arguments["x"]

    assert placed.data_ptr() % 256 == x.data_ptr() % 256
    assert (placed.shape, placed.stride()) == (x.shape, x.stride())


@pytest.mark.parametrize("keep_tensors", [False, True])
def test_finds_wait_for_nobody(tmp_path: Path, keep_tensors: bool) -> None:
    """A disagreement on a device is noted without a synchronisation, and is a case of the spec afterwards."""
    if keep_tensors:
        pytest.importorskip("safetensors")
    policy = Policy(
        shadow=1.0, trip_after=1000, directory=tmp_path, interval_s=3600, keep_tensors=keep_tensors, writes=()
    )
    guarded = canary("k", incumbent=kernel, candidate=lambda x, y: x * y * 2, policy=policy, spec=SPEC)
    x = torch.arange(1.0, 641.0, device="cuda").reshape(10, 64)
    with _waiting_is_an_error():
        for _ in range(3):
            guarded(x, x[0])
    torch.cuda.synchronize()
    guarded.refresh()

    assert guarded.status()["finds"] == 3
    path = min((tmp_path / "finds").glob("*.json"))
    from pytest_fusion.diagnosis.repro import replay_file

    found = replay_file.read(path)
    assert found.made["lane"] == "cuda"
    made = make_inputs(SPEC, found.case, torch.device("cuda"))["x"]
    assert (float(made.min()), float(made.max())) == (1.0, 640.0)
    assert torch.equal(made, x) is keep_tensors
