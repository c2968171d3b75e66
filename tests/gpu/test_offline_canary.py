"""``--fusion-canary`` on a GPU: latency, memory, launches and spills of two kernels in one process and in two."""

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
    """Launches, memory, spills and latency of two processes compare, in pairs that both take part in."""
    pytester.makepyfile(kern=_KERNEL, test_it=_TEST)
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=pytester.path, check=True)
    same = _run(pytester, "--fusion-canary", "HEAD", "-k", "same")["test_same"]
    assert same["verdict"] in ("promote", "hold"), same["reasons"]
    assert {name: _metric(same, name)["status"] for name in ("launches", "recompiles", "spills", "memory")} == (
        dict.fromkeys(("launches", "recompiles", "spills", "memory"), "pass")
    )
    assert _metric(same, "latency")["value"] is not None, _metric(same, "latency")["words"]
    assert _metric(same, "latency")["status"] != "worse"

    pytester.makepyfile(kern=_KERNEL.replace("return launched(x)\n", "return launched(x, more=1)\n"))
    slower = _run(pytester, "--fusion-canary", "HEAD", "-k", "same")["test_same"]
    assert slower["verdict"] == "rollback", slower["reasons"]
    assert _metric(slower, "latency")["status"] == "worse", _metric(slower, "latency")["words"]
    (timing,) = slower["latency"]
    assert 1.5 < timing["candidate_s"] / timing["incumbent_s"] < 2.5
