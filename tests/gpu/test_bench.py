"""``--fusion-bench`` on a GPU: every figure is there, and two methods agree on what is launched."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

_TESTS = """
import torch, triton, triton.language as tl
from hypothesis import settings
from pytest_fusion import fused_equivalent, tensor

few = settings(max_examples=4, deadline=None)

@triton.jit
def double_kernel(x, out, n, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n) * 2
    if WRONG:
        value = tl.where(at > 100000, 0.0, value)
    tl.store(out + at, value, mask=at < n)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wrong):
        x = x.contiguous()
        out = torch.empty_like(x)
        if x.numel():
            double_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), WRONG=wrong, BLOCK=1024)
        return out

    @staticmethod
    def backward(ctx, dy):
        return dy * 2, None

def reference(x):
    return x.float().mul(2).to(x.dtype)

SPEC = {"inputs": {"x": tensor("rows cols")}, "bench": [{"rows": 4096, "cols": 4096}, {"rows": 64, "cols": 256}]}

@few
@fused_equivalent(reference, grad=True, **SPEC)
def test_right(x):
    return Double.apply(x, False)

@few
@fused_equivalent(reference, **SPEC)
def test_wrong_at_full_size(x):
    return Double.apply(x, True)
"""
LARGE, SMALL = "rows=4096 cols=4096 bfloat16", "rows=64 cols=256 bfloat16"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    pytester.makepyfile(_TESTS)

    def go(*options: str) -> tuple[pytest.RunResult, dict[str, Any]]:
        result = pytester.runpytest_subprocess(
            "--fusion-device=cuda", "--fusion-bench", "--fusion-json=o.json", *options
        )
        tests = json.loads((pytester.path / "o.json").read_text())["tests"]
        return result, {test["nodeid"].partition("::test_")[2]: test for test in tests}

    return go


def test_what_is_measured(run: Any) -> None:
    """A green test has its rows; one that is wrong at full size fails without a number."""
    result, found = run("--fusion-update", "new")
    result.assert_outcomes(passed=1, failed=1)
    rows = {(row["case"], row["role"]): row for row in found["right"]["bench"]["rows"]}

    assert not found["right"]["bench"]["notes"], found["right"]["bench"]["notes"]
    for case, size in ((LARGE, 4096 * 4096), (SMALL, 64 * 256)):
        fused, reference = rows[case, "fused"], rows[case, "reference"]
        facts = fused["facts"]
        assert (facts["launches.kernels"], reference["facts"]["launches.kernels"]) == (1, 3)
        assert (facts["bytes.algorithmic"], facts["memory.peak"]) == (4 * size, max(512, 2 * size))
        assert facts["memory.retained"] == 0
        assert fused["methods"] == {"launches": "graph"}
        assert any(name.endswith("/registers") for name in facts)
        latency, measures = fused["latency"], fused["measures"]
        assert latency["method"]["timer"] == "graph"
        assert 0 < latency["fused_s"] < latency["reference_s"]
        assert latency["low"] <= latency["ratio"] <= latency["high"] < 0
        assert 0 < measures["busy_s"] <= measures["span_s"]
        assert measures["copy_bytes_per_s"] > 1e11
        assert [span[1] for span in fused["timeline"]] == ["kernel"]
        backward = rows[case, "fused backward"]["facts"]
        assert backward["launches.kernels"] == 1
        # The result and the gradient; the reference saves nothing, and makes both in float32 on the way.
        assert (backward["memory.peak"], backward["memory.retained"]) == (2 * max(512, 2 * size), 0)
        assert rows[case, "reference backward"]["facts"]["memory.peak"] > backward["memory.peak"]
    assert rows["all entries", "fused"]["facts"]["recompiles"] >= 0
    wrong = found["wrong_at_full_size"]
    assert (wrong["verdict"], wrong["failed_check"]) == ("fail", "bench")
    assert LARGE in wrong["message"]
    assert (LARGE, "fused") not in {(row["case"], row["role"]) for row in wrong["bench"]["rows"]}

    again, found = run("-k", "right")
    again.assert_outcomes(passed=1)
    assert {one["verdict"] for one in found["right"]["bench"]["compared"]} <= {"same", "inconclusive"}
