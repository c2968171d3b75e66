"""``--fusion-counters`` with the real ncu: bytes of each kernel, at a size that no cache holds."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_fusion.run.measure.tools import ncu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ncu.find() is None, reason="ncu is not installed")]

_TESTS = """
import torch, triton, triton.language as tl
from hypothesis import settings
from pytest_fusion import fused_equivalent, tensor

@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

def double(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        double_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out

def reference(x):
    return x.float().mul(2).to(x.dtype)

@settings(max_examples=4, deadline=None)
@fused_equivalent(
    reference, inputs={"x": tensor("rows cols")}, bench=[{"rows": 8192, "cols": 8192}, {"rows": 64, "cols": 256}]
)
def test_one_kernel(x):
    return double(x)

def test_two_kernels(fusion_bench, fusion_device):
    x = torch.randn(8192, 8192, device=fusion_device, dtype=torch.bfloat16)
    fusion_bench(lambda x: double(double(x)), lambda x: x * 4, x, case="twice")
    fusion_bench(lambda x: double(x), lambda x: x * 2, x, case="once")
"""
# Twice the last cache of an H200; with twice the rows and columns the judge alone takes 120 GB.
SIZE = 2 * 8192 * 8192


@pytest.fixture
def benches(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The ``bench`` of each test of one run."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_subprocess(
        "--fusion-device=cuda", "--fusion-bench", "--fusion-counters", "--fusion-json=o.json"
    )
    result.assert_outcomes(passed=2)
    tests = json.loads((pytester.path / "o.json").read_text())["tests"]
    found: dict[str, Any] = {}
    for test in tests:
        found.setdefault(test["nodeid"].partition("::test_")[2], []).append(test["bench"])
    counters = [one for benched in found.values() for bench in benched for one in bench["counters"]]
    if any("ERR_NVGPUCTRPERM" in one.get("reason", "") for one in counters):
        pytest.skip("this user may not read the GPU's counters")
    return found


def test_a_kernel_moves_its_inputs_and_outputs_once(benches: dict[str, Any]) -> None:
    """An eighth of a gigabyte is read; of what is written, what the last cache holds back is missing."""
    (bench,) = benches["one_kernel"]
    large, small = bench["counters"]
    assert (large["status"], small["status"]) == ("counted", "counted"), (large, small)
    (launch,) = large["launches"]
    assert launch["kernel"] == "double_kernel"
    assert launch["dram_read_bytes"] == pytest.approx(SIZE, rel=0.05)
    assert 0.6 * SIZE < launch["dram_written_bytes"] < 1.1 * SIZE
    assert 0 < launch["duration_s"] < 0.1
    assert 0.1 < launch["occupancy"] <= 1
    assert launch["tensor_instructions"] is not None
    assert len(small["launches"]) == 1
    assert small["dram_read_bytes"] < SIZE / 100


def test_each_call_of_the_fixture_has_its_own_kernels(benches: dict[str, Any]) -> None:
    """Two kernels move twice the bytes that one needs."""
    twice, once = (bench["counters"][0] for bench in benches["two_kernels"])
    assert (twice["case"], once["case"]) == ("twice", "once")
    assert [len(one["launches"]) for one in (twice, once)] == [2, 1], (twice, once)
    assert twice["dram_read_bytes"] == pytest.approx(2 * once["dram_read_bytes"], rel=0.1)
