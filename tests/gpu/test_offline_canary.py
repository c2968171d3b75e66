"""``--fusion-canary`` on a GPU: latency of two kernels in one process, memory and launches of two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

_KERNEL = """
import torch
import triton
import triton.language as tl

@triton.jit
def exp_kernel(x, out, n, TIMES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, tl.exp(value / TIMES), mask=at < n)

def launched(x, times=8, more=0):
    x = x.contiguous()
    out = torch.empty_like(x)
    for _ in range(1 + more):
        if x.numel():
            exp_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), times, BLOCK=1024)
    return out

def fused(x):
    return launched(x)

def twice(x):
    return launched(x, more=1)
"""
_TEST = """
import torch
import kern
from pytest_fusion import dim, fused_equivalent, tensor

def reference(x):
    return torch.exp(x / 8)

S = dict(
    inputs={"x": tensor("rows hidden", layouts="contiguous")},
    dims={"rows": dim(1, 8192), "hidden": dim(1, 8192)},
    dtypes="float32",
    bench=[{"rows": 4096, "hidden": 4096}],
)

@fused_equivalent(reference, **S)
def test_same(x):
    return kern.fused(x)

@fused_equivalent(reference, **S)
def test_slower(x):
    return kern.twice(x)
"""


def _run(pytester: pytest.Pytester, *options: str) -> dict[str, Any]:
    result = pytester.run(
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--fusion-device", "cuda",
        "--fusion-json", "out.json", *options,
    )  # fmt: skip
    tests = json.loads((pytester.path / "out.json").read_text())["tests"]
    assert tests, result.stdout.str()
    return {test["nodeid"].partition("::")[2]: test["canary"] for test in tests}


def _metric(told: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [one for one in told["metrics"] if one["metric"] == name]
    return dict(found)


def test_a_function_is_timed(pytester: pytest.Pytester) -> None:
    """In one process a kernel that launches twice is slower and launches more; an equal one is neither."""
    pytester.makepyfile(kern=_KERNEL, test_it=_TEST)
    found = _run(pytester, "--fusion-canary", "kern:fused")
    assert found["test_slower"]["verdict"] == "rollback", found["test_slower"]["reasons"]
    assert _metric(found["test_slower"], "launches")["status"] == "worse"
    assert _metric(found["test_slower"], "latency")["status"] == "worse"
    assert found["test_same"]["verdict"] in ("promote", "hold"), found["test_same"]["reasons"]
    assert _metric(found["test_same"], "launches")["status"] == "pass"
    assert _metric(found["test_same"], "memory")["status"] == "pass"
    assert _metric(found["test_same"], "latency")["status"] != "worse"
    (timing,) = found["test_same"]["latency"]
    assert 0 < timing["candidate_s"] < 1e-2


def test_a_revision_is_measured_in_its_own_process(pytester: pytest.Pytester) -> None:
    """Launches and memory of another process compare; latency does not, and holds what it was not left out of."""
    pytester.makepyfile(kern=_KERNEL, test_it=_TEST)
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=pytester.path, check=True)
    held = _run(pytester, "--fusion-canary", "HEAD", "-k", "same")["test_same"]
    assert held["verdict"] == "hold"
    assert [reason.partition(":")[0] for reason in held["reasons"]] == ["latency was not measured"]
    promoted = _run(pytester, "--fusion-canary", "HEAD", "-k", "same", "--fusion-canary-without", "latency")[
        "test_same"
    ]
    assert promoted["verdict"] == "promote", promoted["reasons"]
