"""Check `device` on real streams: kernels on the wrong one, on the wrong GPU, and calls that wait."""

from __future__ import annotations

import json

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture
def one_gpu() -> None:
    """All of them."""


_TESTS = """
import torch, triton, triton.language as tl
from pytest_fusion import fused_equivalent, tensor

@triton.jit
def _double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

def launch(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _double[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)
    return out

def guarded(x):
    with torch.cuda.device(x.device):
        return launch(x)

def doubled(x):
    return 2 * x

SPEC = {"inputs": {"x": tensor("rows hidden")}, "dtypes": torch.float32}
OWN = []

@fused_equivalent(doubled, **SPEC)
def test_right(x):
    return guarded(x)

@fused_equivalent(doubled, **SPEC)
def test_default_stream(x):
    with torch.cuda.stream(torch.cuda.default_stream(x.device)):
        return guarded(x)

@fused_equivalent(doubled, **SPEC)
def test_own_stream(x):
    OWN[:] = OWN or [torch.cuda.Stream()]
    if torch.cuda.current_stream() == torch.cuda.default_stream():
        OWN[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(OWN[0]):
        return guarded(x)

@fused_equivalent(doubled, **SPEC)
def test_own_stream_in_order(x):
    OWN[:] = OWN or [torch.cuda.Stream()]
    OWN[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(OWN[0]):
        out = guarded(x)
    torch.cuda.current_stream().wait_stream(OWN[0])
    return out

@fused_equivalent(doubled, **SPEC)
def test_waits(x):
    out = guarded(x)
    if x.numel() and out.flatten()[0].item() > 1e38:
        return out
    return out

@fused_equivalent(doubled, **SPEC)
def test_synchronizes(x):
    out = guarded(x)
    torch.cuda.synchronize()
    return out

@fused_equivalent(doubled, syncs=True, **SPEC)
def test_waits_and_says_so(x):
    out = guarded(x)
    torch.cuda.synchronize()
    return out

@fused_equivalent(doubled, **SPEC)
def test_ignores_the_device(x):
    return launch(x)
"""


def test_streams_and_waits(pytester: pytest.Pytester) -> None:
    """Planted bugs fail `device` with their cause, waits are hazards, right kernels pass it with streams proved."""
    pytester.makepyfile(_TESTS)
    pytester.runpytest_subprocess("--fusion-device=cuda", "--fusion-seconds=2", "--fusion-json=out.json")

    tests = json.loads((pytester.path / "out.json").read_text())["tests"]
    found = {test["nodeid"].partition("::test_")[2]: test for test in tests}
    expected = {
        "right": None,
        "default_stream": "wrong-stream",
        "own_stream": "late-work",
        "own_stream_in_order": None,
        "waits": None,
        "synchronizes": None,
        "waits_and_says_so": None,
        "ignores_the_device": "wrong-device" if torch.cuda.device_count() > 1 else None,
    }
    assert {name: test["cause"] for name, test in found.items()} == expected
    lines = {
        "waits": "`if x.numel() and out.flatten()[0].item() > 1e38:`",
        "synchronizes": "`torch.cuda.synchronize()`",
    }
    for name, test in found.items():
        hazards = [finding for finding in test["findings"] if finding["code"] == "hidden-sync"]
        assert len(hazards) == (name in lines), name
        for hazard in hazards:
            assert f"{lines[name]} in test_{name}, the function under test itself" in hazard["message"]
    for name in ("right", "own_stream_in_order"):
        assert found[name]["checks"]["device"]["verdict"] == "pass"
        assert found[name]["checks"]["device"]["reason"].startswith("streams")


_LOOKS = """
import torch, triton
from pytest_fusion import fused_equivalent, tensor

DRIVER = triton.runtime.driver.active
SEEN = torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.is_bf16_supported()
MEMORY = DRIVER.utils.get_device_properties(0)["max_shared_mem"]
TARGET, DEVICE = DRIVER.get_current_target(), DRIVER.get_active_torch_device()
STARTED = torch.cuda.is_initialized()

def doubled(x):
    return 2 * x

@fused_equivalent(doubled, inputs={"x": tensor("rows hidden")}, dtypes=torch.float32)
def test_beside(x):
    return 2 * x

def test_the_same_as_torch_says():
    assert not STARTED
    torch.zeros(1, device="cuda")
    assert SEEN == (torch.cuda.get_device_name(), torch.cuda.get_device_capability(), True)
    assert MEMORY == DRIVER.utils.get_device_properties(0)["max_shared_mem"]
    assert (TARGET.arch, DEVICE) == (10 * SEEN[1][0] + SEEN[1][1], torch.device("cuda", 0))
"""


def test_a_module_that_looks_at_the_device_leaves_cuda_to_children(pytester: pytest.Pytester) -> None:
    """What fla and others want to know at import is answered, and the test still has a child of its own."""
    pytester.makepyfile(test_it=_LOOKS)
    pytester.runpytest_subprocess("--fusion-seconds=2", "--fusion-json", "out.json").assert_outcomes(passed=2)
    (record,) = json.loads((pytester.path / "out.json").read_text())["tests"]
    assert not any("ran in this process" in note for note in record["notes"]), record["notes"]
